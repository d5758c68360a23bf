// Host memory runs out at one named place: what must not be lost, and must not hang, there.
#include <poll.h>

#include <limits>

#include "fault/scenario.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t all = std::numeric_limits<std::size_t>::max();

class NoMemoryTest : public ::testing::Test {
 protected:
  ~NoMemoryTest() override { heal_allocations(); }

  std::shared_ptr<ScriptedDevice> device_ = scenario_device({});
  World world_{device_, {.device_blocks = 16, .slots = 16, .config = without_reaper()}};
};

TEST_F(NoMemoryTest, WhatIsInFlightEndsAndGoesHomeAllTheSame) {
  const auto kept = world_.offload({.blocks = {0}, .tag = std::int64_t{1}});
  world_.offload({.blocks = {1}});  // dropped
  const auto cancelled = world_.offload({.blocks = {2}, .tag = std::int64_t{2}});
  fail_allocation(1, all);
  armed([&] {
    static_cast<void>(cancelled->cancel());
    EXPECT_TRUE(world_.manager().drain(10, {}));
    EXPECT_THROW(static_cast<void>(world_.manager().poll()), std::bad_alloc);
  });
  heal_allocations();
  EXPECT_EQ(kept->state(), TransferState::done);
  EXPECT_EQ(cancelled->state(), TransferState::cancelled);
  EXPECT_EQ(world_.manager().poll().size(), 2U) << "a poll that failed took nothing";
  EXPECT_EQ(world_.slots().held, 1U);
  EXPECT_EQ(world_.slots().free, 15U);
  EXPECT_TRUE(CacheMemory::holds(kept->result()->blocks(), 0, 0));
}

TEST_F(NoMemoryTest, ALostDeviceStillEndsEveryTransferAndKeepsItsArrays) {
  const auto copy = world_.stored(4, 44);
  const auto offload = world_.offload({.blocks = {0, 5}});
  const auto restore = world_.restore({.blocks = {6}}, *copy);
  device_->lose();
  fail_allocation(1, all);
  armed([&] { EXPECT_TRUE(world_.manager().drain(10, {})); });
  heal_allocations();
  EXPECT_EQ(offload->state(), TransferState::failed);
  EXPECT_EQ(restore->state(), TransferState::failed);
  EXPECT_EQ(world_.slots().poisoned, 3U);
  EXPECT_THROW(world_.offload({.blocks = {9}}), DeviceLost);
}

// It must leave the next one able to hurry all that stands before.
TEST(NoMemory, AWaitOnThatFailedDoesNotMakeTheNextOneHang) {
  std::size_t k = 1;
  for (bool failed = true; failed && !HasFailure(); ++k) {
    SCOPED_TRACE(k);
    const auto device = scenario_device({});
    World world(device, {.device_blocks = 16, .slots = 16, .config = without_reaper()});
    const Stream engine(device);
    const Stall stall(device);
    const auto unready = [&](BlockId block) {
      return world.offload({.blocks = {block}, .after = world.after_event(stall.event())});
    };
    std::vector<std::shared_ptr<Transfer>> owners;  // of every lane but the shared one
    while (owners.size() < CopyQueue::lanes - 1)
      owners.push_back(unready(static_cast<BlockId>(owners.size())));
    const auto first = unready(8);
    const auto second = world.offload({.blocks = {9}, .after = world.after_transfer(*first)});
    const auto third = world.offload({.blocks = {10}, .after = world.after_transfer(*second)});
    EXPECT_EQ(third->state(), TransferState::queued);
    fail_allocation(k);
    try {
      surely([&] { third->wait_on(engine.handle(), std::nullopt); });
    } catch (const std::bad_alloc&) {  // where that is the end of the transfer
    }
    heal_allocations();
    EXPECT_TRUE(third->job()->all_submitted());
    failed = failed_allocations() > 0;
  }
  EXPECT_GT(k, 5U);
}

TEST(NoMemory, AWakeListThatCouldNotBeDrainedIsStillReadable) {
  const auto list = std::make_shared<WakeList>();
  Waker(list, 7).fire();
  fail_allocation(1);
  EXPECT_THROW(armed([&] { static_cast<void>(list->drain()); }), std::bad_alloc);
  heal_allocations();
  pollfd readable{.fd = list->descriptor(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&readable, 1, 0), 1) << "or the loop would never look again";
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{7}));
}

// The model behind the host device: a call that finds no memory has done nothing.
TEST(NoMemory, ACallOfTheHostDeviceThatFailsCanBeMadeAgain) {
  for (std::size_t k = 1;; ++k) {
    SCOPED_TRACE(k);
    const auto device = still_device();
    std::byte source[3]{std::byte{1}, std::byte{2}, std::byte{3}}, middle[3]{}, target[3]{};
    std::byte *middle_at = middle, *target_at = target;
    const std::byte *source_at = source, *from_middle = middle;
    const std::size_t bytes = 3;
    fail_allocation(k);
    const StreamHandle first = surely([&] { return device->create_stream(); });
    const StreamHandle second = surely([&] { return device->create_stream(); });
    ASSERT_NE(first, second);
    const EventHandle between = surely([&] { return device->create_event(false); });
    const EventHandle end = surely([&] { return device->create_event(true); });
    const auto copy = [&](const CopyDescriptors& batch, StreamHandle stream) {
      surely([&] { device->copy(batch, Direction::to_host, SourceAccess::stream_order, stream); });
    };
    copy({&middle_at, &source_at, &bytes, 1}, first);
    surely([&] { device->record(between, first); });
    surely([&] { device->wait(second, between); });
    copy({&target_at, &from_middle, &bytes, 1}, second);
    surely([&] { device->record(end, second); });
    heal_allocations();
    ASSERT_EQ(device->query(end), EventState::pending);
    while (device->query(end) == EventState::pending) {
      device->sleep(device->progress().value(), 1'000'000, true);
    }
    EXPECT_TRUE(std::ranges::equal(source, target));
    device->destroy_event(between);
    device->destroy_event(end);
    device->destroy_stream(first);
    device->destroy_stream(second);
    if (failed_allocations() == 0) {
      EXPECT_GT(k, 8U);
      break;
    }
  }
}

}  // namespace
}  // namespace kvmem::test
