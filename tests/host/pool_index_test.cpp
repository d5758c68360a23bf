// Slots by index, without a handle; and the list of slots that a handle holds.
#include <array>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "host/block_pool.hpp"
#include "support/fake_device.hpp"

namespace kvmem {
namespace {

class PoolByIndex : public ::testing::Test {
 protected:
  PoolByIndex() {
    PoolOptions options;
    options.block_bytes = 4096;
    options.capacity_bytes = std::size_t{8} * 4096;
    pool_.emplace(device_, options);
  }
  [[nodiscard]] std::uint32_t free() const { return pool_->stats().slots.free; }

  std::shared_ptr<test::FakeDevice> device_ = std::make_shared<test::FakeDevice>();
  std::optional<BlockPool> pool_;
};

TEST_F(PoolByIndex, FillsAllOrNothing) {
  std::array<SlotIndex, 5> five{};
  std::array<SlotIndex, 4> four{9, 9, 9, 9};
  ASSERT_TRUE(pool_->try_acquire(five));
  EXPECT_FALSE(pool_->try_acquire(four));
  EXPECT_EQ(four, (std::array<SlotIndex, 4>{9, 9, 9, 9}));
  EXPECT_EQ(free(), 3U);
  EXPECT_EQ(pool_->free(), 3U);
  EXPECT_EQ(pool_->stats().refused, 1U);
  EXPECT_EQ(pool_->stats().acquired, 5U);
  EXPECT_EQ(pool_->stats().peak_held, 5U);
  pool_->release(five);
  EXPECT_EQ(free(), 8U);
  pool_->check();
}

TEST_F(PoolByIndex, ServesWhoeverWaits) {
  std::array<SlotIndex, 8> all{};
  ASSERT_TRUE(pool_->try_acquire(all));
  const PoolTicket ticket = pool_->enqueue(2);
  EXPECT_FALSE(ticket.granted());
  pool_->release(std::span(all).first(2));
  EXPECT_TRUE(ticket.granted());
  pool_->release(std::span(all).subspan(2));
}

TEST_F(PoolByIndex, RefusesWhatHasNoOwnerLeftAndChangesNothing) {
  std::array<SlotIndex, 3> held{};
  ASSERT_TRUE(pool_->try_acquire(held));
  const SlotIndex other = pool_->try_acquire(1).value().slots()[0];  // and home again
  const auto refuses = [&](std::vector<SlotIndex> slots) {
    EXPECT_THROW(pool_->release(slots), InvalidArgument);
    EXPECT_EQ(free(), 5U);
    pool_->check();
  };
  refuses({other});
  refuses({8});
  refuses({held[0], held[1], other});
  refuses({held[0], held[1], held[0]});
  pool_->release(held);
  EXPECT_THROW(pool_->release(held), InvalidArgument);
  EXPECT_EQ(free(), 8U);
}

TEST_F(PoolByIndex, EachOwnerOfASlotGivesItBackOnce) {
  std::array<SlotIndex, 1> slot{};
  ASSERT_TRUE(pool_->try_acquire(slot));
  HostBlocks second = pool_->share_indices(slot);
  const HostBlocks copy = second.hold_for_copy();
  pool_->release(slot);
  EXPECT_EQ(pool_->stats().slots.held, 1U);
  second.release();
  EXPECT_EQ(pool_->stats().slots.quarantined, 1U);
  EXPECT_THROW(pool_->release(slot), InvalidArgument);  // a copy is no owner
}

TEST_F(PoolByIndex, AnEmptyCallAndAClosedPoolAreRefused) {
  std::array<SlotIndex, 1> slot{};
  EXPECT_THROW(static_cast<void>(pool_->try_acquire(std::span<SlotIndex>())), InvalidArgument);
  ASSERT_TRUE(pool_->try_acquire(slot));
  pool_->close();
  EXPECT_THROW(static_cast<void>(pool_->try_acquire(slot)), Closed);
  pool_->release(slot);  // what is held stays good
  EXPECT_EQ(free(), 8U);
}

std::vector<SlotIndex> listed(const SlotList& list) {
  return {list.span().begin(), list.span().end()};
}

TEST(SlotListTest, KeepsItsSlotsThroughMovesWhateverTheirNumber) {
  for (std::size_t count = 0; count <= 5; ++count) {
    std::vector<SlotIndex> slots;
    for (std::size_t i = 0; i < count; ++i) slots.push_back(static_cast<SlotIndex>(7 * i + 1));
    SlotList first{std::span<const SlotIndex>(slots)};
    EXPECT_EQ(first.size(), count);
    SlotList second(std::move(first));
    EXPECT_EQ(first.size(), 0U);  // NOLINT: a moved-from list is empty
    EXPECT_EQ(listed(second), slots);
    SlotList third(3);
    third = std::move(second);
    EXPECT_EQ(second.size(), 0U);  // NOLINT
    EXPECT_EQ(listed(third), slots);
  }
}

}  // namespace
}  // namespace kvmem
