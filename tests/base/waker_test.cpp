#include "base/waker.hpp"

#include <poll.h>

#include <thread>

#include <gtest/gtest.h>

#include "support/count_allocations.hpp"

namespace kvmem {
namespace {

bool readable(int descriptor) {
  pollfd waited{.fd = descriptor, .events = POLLIN, .revents = 0};
  return poll(&waited, 1, 0) == 1;
}

TEST(WakeList, IsReadableFromAFireUntilTheDrain) {
  const auto list = std::make_shared<WakeList>();
  Waker first(list, 7), second(list, 8);
  EXPECT_FALSE(readable(list->descriptor()));
  second.fire();
  first.fire();
  EXPECT_TRUE(readable(list->descriptor()));
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{8, 7}));
  EXPECT_FALSE(readable(list->descriptor()));
  EXPECT_TRUE(list->drain().empty());
}

TEST(Waker, FiresAtMostOnceAndNotAfterAMove) {
  const auto list = std::make_shared<WakeList>();
  Waker waker(list, 1);
  Waker moved = std::move(waker);
  waker.fire();  // moved from: nothing
  EXPECT_TRUE(list->drain().empty());
  moved.fire();
  moved.fire();
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{1}));
}

TEST(Waker, AnEmptyOneFiresNothing) {
  Waker().fire();
  Waker(nullptr, 3).fire();
}

TEST(Waker, FiringAllocatesNothing) {
  const auto list = std::make_shared<WakeList>();
  std::vector<Waker> wakers;
  for (std::uint64_t i = 0; i < 1000; ++i) wakers.emplace_back(list, i);
  const std::size_t before = test::allocations;
  for (Waker& waker : wakers) waker.fire();
  EXPECT_EQ(test::allocations, before);
  EXPECT_EQ(list->drain().size(), 1000U);
}

TEST(WakeList, ForgetsWakersThatWereDroppedUnfired) {
  const auto list = std::make_shared<WakeList>();
  test::largest_allocation_bytes = 0;
  for (std::uint64_t i = 0; i < 100000; ++i) {
    Waker dropped(list, i);
    Waker overwritten(list, i);
    overwritten = Waker(list, i);
  }
  EXPECT_LT(test::largest_allocation_bytes, 1000U);
}

TEST(WakeList, NeedsNoMoreRoomHoweverManyWereDrained) {
  const auto list = std::make_shared<WakeList>();
  test::largest_allocation_bytes = 0;
  for (std::uint64_t i = 0; i < 100000; ++i) {
    Waker(list, i).fire();
    ASSERT_EQ(list->drain(), std::vector<std::uint64_t>{i});
  }
  EXPECT_LT(test::largest_allocation_bytes, 1000U);
}

TEST(WakeList, WakesAThreadThatPolls) {
  const auto list = std::make_shared<WakeList>();
  Waker waker(list, 5);
  std::thread other([&] { waker.fire(); });
  pollfd waited{.fd = list->descriptor(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&waited, 1, 60000), 1);
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{5}));
  other.join();
}

}  // namespace
}  // namespace kvmem
