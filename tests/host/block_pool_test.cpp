#include "host/block_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/count_allocations.hpp"
#include "support/fake_device.hpp"

namespace kvmem {
namespace {

using test::FakeDevice;

constexpr std::size_t slot = 4096;

class Pool : public ::testing::Test {
 protected:
  static PoolOptions of(std::size_t block_bytes, std::size_t capacity_bytes,
                        Pin pin = Pin::automatic) {
    PoolOptions options;
    options.block_bytes = block_bytes;
    options.capacity_bytes = capacity_bytes;
    options.pin = pin;
    return options;
  }
  [[nodiscard]] SlotCounts counts() const { return pool_->stats().slots; }
  [[nodiscard]] HostBlocks acquire(std::size_t count) { return pool_->try_acquire(count).value(); }

  std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  std::optional<BlockPool> pool_{std::in_place, device_, of(slot, 8 * slot)};
};

SlotCounts counted(std::uint32_t free, std::uint32_t held, std::uint32_t quarantined,
                   std::uint32_t poisoned) {
  return {.capacity = free + held + quarantined + poisoned,
          .free = free,
          .held = held,
          .quarantined = quarantined,
          .poisoned = poisoned};
}

TEST_F(Pool, HandsOutDistinctBlocksOfItsOwnMemory) {
  const HostBlocks blocks = acquire(8);
  ASSERT_EQ(blocks.size(), 8U);
  EXPECT_EQ(std::set<SlotIndex>(blocks.slots().begin(), blocks.slots().end()).size(), 8U);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(blocks.data(i), pool_->data() + blocks.slots()[i] * pool_->slot_bytes());
    std::memset(blocks.data(i), static_cast<int>(i), slot);
  }
  for (std::size_t i = 0; i < 8; ++i)
    EXPECT_EQ(blocks.data(i)[slot - 1], static_cast<std::byte>(i));
  EXPECT_EQ(blocks.block_bytes(), slot);
  EXPECT_TRUE(blocks.of(pool_->core()));
  EXPECT_FALSE(HostBlocks().of(pool_->core()));
}

TEST_F(Pool, FullIsAnAnswerNotAnError) {
  HostBlocks most = acquire(6);
  EXPECT_FALSE(pool_->try_acquire(3).has_value());
  EXPECT_FALSE(pool_->try_acquire(1000000000000).has_value());
  EXPECT_EQ(pool_->stats().refused, 2U);
  EXPECT_EQ(pool_->stats().acquired, 6U);
  EXPECT_TRUE(pool_->try_acquire(2).has_value());
  most.release();
  EXPECT_TRUE(pool_->try_acquire(8).has_value());
  EXPECT_EQ(pool_->stats().acquired, 16U);
}

TEST_F(Pool, AnAcquireOfNothingIsRefused) {
  EXPECT_THROW((void)pool_->try_acquire(0), InvalidArgument);
  EXPECT_THROW((void)pool_->enqueue(0), InvalidArgument);
}

TEST_F(Pool, ReleasingTwiceFreesOnceAndNobodyElsesBlocks) {
  HostBlocks first = acquire(1);
  first.release();
  const HostBlocks second = acquire(1);  // the same slot
  first.release();
  first.poison();
  EXPECT_TRUE(first.empty());
  EXPECT_EQ(counts(), counted(7, 1, 0, 0));
  EXPECT_THROW((void)first.share(), AlreadyReleased);
  EXPECT_THROW((void)first.share(0, 0), AlreadyReleased);
  EXPECT_THROW((void)first.hold_for_copy(), AlreadyReleased);
}

TEST_F(Pool, AMoveMovesTheHold) {
  HostBlocks first = acquire(2);
  HostBlocks second = std::move(first);
  EXPECT_TRUE(first.empty());  // NOLINT: that is the question
  EXPECT_EQ(counts(), counted(6, 2, 0, 0));
  second = acquire(3);
  EXPECT_EQ(counts(), counted(5, 3, 0, 0));
  HostBlocks& same = second;
  second = std::move(same);
  EXPECT_EQ(second.size(), 3U);
  second = HostBlocks();
  EXPECT_EQ(counts(), counted(8, 0, 0, 0));
}

// Public failure 24: blocks were freed in one order of releases and leaked in the other.
TEST_F(Pool, BlocksGoHomeWithTheirLastHolder) {
  HostBlocks owner = acquire(4);
  HostBlocks tail = owner.share(2, 2);
  EXPECT_TRUE(std::ranges::equal(tail.slots(), owner.slots().subspan(2)));
  owner.release();
  EXPECT_EQ(counts(), counted(6, 2, 0, 0));
  tail.release();
  EXPECT_EQ(counts(), counted(8, 0, 0, 0));
}

TEST_F(Pool, AShareOutsideTheBlocksIsRefused) {
  const HostBlocks owner = acquire(4);
  EXPECT_THROW((void)owner.share(0, 5), InvalidArgument);
  EXPECT_THROW((void)owner.share(5, 0), InvalidArgument);
  EXPECT_THROW((void)owner.share(1, ~std::size_t{0}), InvalidArgument);
  EXPECT_THROW((void)owner.share(~std::size_t{0}, 2), InvalidArgument);
  EXPECT_EQ(owner.share().size(), 4U);
  EXPECT_TRUE(owner.share(4, 0).empty());
  EXPECT_EQ(counts(), counted(4, 4, 0, 0));
}

TEST_F(Pool, ABlockUnderACopyIsQuarantinedNotReusedUntilTheCopyLetsGo) {
  HostBlocks owner = acquire(8);
  HostBlocks copy = owner.hold_for_copy();
  owner.release();
  EXPECT_EQ(counts(), counted(0, 0, 8, 0));
  EXPECT_FALSE(pool_->try_acquire(1).has_value());
  copy.release();
  EXPECT_EQ(counts(), counted(8, 0, 0, 0));
  EXPECT_EQ(pool_->stats().peak_quarantined, 8U);
  EXPECT_EQ(pool_->stats().peak_held, 8U);
}

TEST_F(Pool, PoisonedBlocksAreNeverHandedOutAgain) {
  const std::uint64_t leaked = leaked_region_bytes();
  HostBlocks owner = acquire(3);
  const std::set<SlotIndex> poisoned(owner.slots().begin(), owner.slots().end());
  HostBlocks copy = owner.hold_for_copy();
  copy.poison();
  EXPECT_TRUE(copy.empty());
  EXPECT_EQ(counts(), counted(5, 0, 0, 3));
  owner.release();
  EXPECT_EQ(counts(), counted(5, 0, 0, 3));
  HostBlocks rest = acquire(5);
  for (const SlotIndex index : rest.slots()) EXPECT_FALSE(poisoned.contains(index));
  EXPECT_FALSE(pool_->try_acquire(1).has_value());
  pool_->check();
  rest.release();

  std::byte* const base = pool_->data();
  pool_.reset();
  EXPECT_EQ(leaked_region_bytes(), leaked + 8 * slot);
  std::memset(base, 1, 8 * slot);  // a copy may still do this
  munmap(base, 8 * slot);
}

TEST_F(Pool, AHolderOutlivesThePoolAndItsMemoryLivesWithIt) {
  const std::uint64_t leaked = leaked_region_bytes();
  HostBlocks owner = acquire(2);
  HostBlocks copy = owner.hold_for_copy();
  std::byte* const base = pool_->data();
  pool_.reset();
  std::memset(owner.data(0), 1, slot);
  owner.release();
  std::memset(copy.data(1), 2, slot);
  unsigned char page = 0;
  EXPECT_EQ(mincore(base, slot, &page), 0);
  copy.release();
  EXPECT_NE(mincore(base, slot, &page), 0);
  EXPECT_EQ(leaked_region_bytes(), leaked);
}

TEST_F(Pool, SharesByIndexWhatSomebodyOwns) {
  HostBlocks owner = acquire(3);
  const std::vector<SlotIndex> indices(owner.slots().begin(), owner.slots().end());
  HostBlocks second = pool_->share_indices(indices);
  owner.release();
  EXPECT_EQ(counts(), counted(5, 3, 0, 0));
  const HostBlocks twice = pool_->share_indices(std::vector<SlotIndex>{indices[0], indices[0]});
  second.release();
  EXPECT_EQ(counts(), counted(7, 1, 0, 0));
  EXPECT_TRUE(pool_->share_indices({}).empty());
}

TEST_F(Pool, SharesByIndexNothingThatNobodyOwns) {
  HostBlocks owner = acquire(2);
  const SlotIndex owned = owner.slots()[0];
  const HostBlocks copy = owner.share(1, 1).hold_for_copy();
  const SlotIndex quarantined = owner.slots()[1];
  HostBlocks kept = owner.share(0, 1);
  owner.release();
  for (const SlotIndex wrong : {quarantined, SlotIndex{7}, SlotIndex{8}, ~SlotIndex{0}}) {
    EXPECT_THROW((void)pool_->share_indices(std::vector<SlotIndex>{owned, wrong}), InvalidArgument)
        << wrong;
  }
  kept.release();
  EXPECT_EQ(counts(), counted(7, 0, 1, 0));
}

TEST_F(Pool, NeighboursComeOutInOrderAlsoAfterTheyWereUsed) {
  HostBlocks blocks = acquire(5);
  const std::vector<SlotIndex> before(blocks.slots().begin(), blocks.slots().end());
  blocks.release();
  const HostBlocks again = acquire(5);
  EXPECT_TRUE(std::ranges::equal(again.slots(), before));
}

TEST_F(Pool, AReleaseAllocatesNothingAlsoWhenItServesAWaiter) {
  const auto list = std::make_shared<WakeList>();
  HostBlocks blocks = acquire(8);
  HostBlocks copy = blocks.hold_for_copy();
  PoolTicket ticket = pool_->enqueue(8, Waker(list, 1));
  const std::size_t before = test::allocations;
  blocks.release();
  copy.release();
  EXPECT_EQ(test::allocations, before);
  EXPECT_TRUE(ticket.granted());
}

// Public failure 168: a refusal walked the whole cache.
TEST_F(Pool, AHandleOfAFewBlocksAllocatesNothing) {
  const std::size_t before = test::allocations;
  HostBlocks two = acquire(2);
  const HostBlocks moved = std::move(two);
  EXPECT_EQ(test::allocations, before);
}

TEST_F(Pool, ARefusalAllocatesLittleWhateverWasAskedFor) {
  const HostBlocks blocks = acquire(1);
  test::largest_allocation_bytes = 0;
  EXPECT_FALSE(pool_->try_acquire(std::size_t{1} << 40).has_value());
  EXPECT_LT(test::largest_allocation_bytes, 1000U);
}

TEST_F(Pool, CloseStopsAcquiresAndLeavesHoldersGood) {
  HostBlocks blocks = acquire(2);
  const std::vector<SlotIndex> indices(blocks.slots().begin(), blocks.slots().end());
  pool_->close();
  pool_->close();
  EXPECT_THROW((void)pool_->try_acquire(1), Closed);
  EXPECT_THROW((void)pool_->enqueue(1), Closed);
  std::memset(blocks.data(1), 3, slot);
  HostBlocks second = pool_->share_indices(indices);
  EXPECT_EQ(blocks.share().hold_for_copy().size(), 2U);
  blocks.release();
  second.release();
  EXPECT_EQ(counts(), counted(8, 0, 0, 0));
}

TEST_F(Pool, StatsSayWhatTheMemoryIs) {
  const BlockPool pool(device_, of(5000, 100000));
  const PoolStats stats = pool.stats();
  EXPECT_EQ(stats.block_bytes, 5000U);
  EXPECT_EQ(stats.slot_bytes, 8192U);
  EXPECT_EQ(stats.slots, counted(12, 0, 0, 0));
  EXPECT_EQ(stats.padding_bytes, 12U * 3192);
  EXPECT_EQ(stats.region.bytes, 12U * 8192);
  EXPECT_EQ(pool.capacity(), 12U);
  EXPECT_EQ(pool.device(), device_);
}

// Public failure 47: a pool that was full of leaked objects was taken for a fragmented one.
TEST_F(Pool, AShortageTellsALeakFromALargeRequest) {
  HostBlocks blocks = acquire(5);
  const HostBlocks copy = blocks.share(0, 2).hold_for_copy();
  const HostBlocks kept = blocks.share(2, 3);
  blocks.release();
  const Shortage shortage = pool_->shortage(4);
  EXPECT_EQ(shortage.bound, "pool blocks");
  EXPECT_EQ(shortage.wanted, 4U);
  EXPECT_EQ(shortage.free, 3U);
  EXPECT_EQ(shortage.largest, 8U);
  EXPECT_EQ(shortage.held, 3U);
  EXPECT_EQ(shortage.quarantined, 2U);
}

// Public failure 171: a size beyond the addressable limit was accepted.
TEST_F(Pool, SizesThatMakeNoPoolAreRefusedByName) {
  constexpr std::size_t huge = std::size_t{1} << 63;
  const auto build = [&](std::size_t block, std::size_t capacity) {
    BlockPool pool(device_, of(block, capacity));
  };
  EXPECT_THROW(build(0, slot), InvalidArgument);
  EXPECT_THROW(build(slot, 0), InvalidArgument);
  EXPECT_THROW(build(huge + 1, ~std::size_t{0}), InvalidArgument);
  EXPECT_THROW(build(~std::size_t{0}, ~std::size_t{0}), InvalidArgument);
  EXPECT_THROW(build(1, std::size_t{1} << 44), InvalidArgument);      // 2^32 slots
  EXPECT_THROW(build(1, (std::size_t{1} << 44) - 1), CapacityError);  // one slot fewer, but 16 TiB
  EXPECT_THROW(build(huge, huge), CapacityError);
  EXPECT_THROW(build(huge - 1, ~std::size_t{0}), CapacityError);
  EXPECT_THROW(build(huge, huge - 1), CapacityError);
  EXPECT_THROW(BlockPool(nullptr, of(slot, slot)), InvalidArgument);
  try {
    build(1, std::size_t{1} << 44);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("the most is 4294967295"), std::string::npos);
  }
  try {
    build(5000, 8191);
    FAIL();
  } catch (const CapacityError& error) {
    EXPECT_EQ(error.shortage.bound, "capacity_bytes");
    EXPECT_EQ(error.shortage.wanted, 8192U);
    EXPECT_EQ(error.shortage.free, 8191U);
    EXPECT_NE(std::string(error.what()).find("at least one slot, 8192 bytes"), std::string::npos);
  }
}

// Public failure 59: pinning failed and there was no way to go on without.
TEST_F(Pool, IsPinnedWhereTheDeviceNeedsItOrTheCallerWantsIt) {
  const auto needs = std::make_shared<FakeDevice>(true);
  EXPECT_TRUE(BlockPool(needs, of(slot, slot)).pinned());
  EXPECT_FALSE(BlockPool(device_, of(slot, slot)).pinned());
  EXPECT_TRUE(BlockPool(device_, of(slot, slot, Pin::required)).pinned());
  EXPECT_FALSE(BlockPool(needs, of(slot, slot, Pin::never)).pinned());
  EXPECT_EQ(BlockPool(needs, of(slot, slot, Pin::never)).pin_chunk_bytes(), 0U);
  EXPECT_EQ(BlockPool(needs, of(slot, slot)).pin_chunk_bytes(), PinnedRegion::bytes_a_pin(slot));
  EXPECT_TRUE(needs->pinned().empty());
  EXPECT_TRUE(device_->pinned().empty());
}

TEST_F(Pool, StaysPinnedAsLongAsAHolderLives) {
  std::optional<BlockPool> pool(std::in_place, device_, of(slot, 4 * slot, Pin::required));
  std::optional<HostBlocks> blocks = pool->try_acquire(1);
  pool.reset();
  EXPECT_EQ(device_->pinned().size(), 1U);
  blocks.reset();
  EXPECT_TRUE(device_->pinned().empty());
}

// Public failure 58: a failed registration was ignored and showed later as wrong bytes.
// Public failure 66: a failed allocation ended the process.
TEST_F(Pool, WhosePinningFailsIsNotBuiltAndLeavesNothing) {
  device_->refuse_pin(1);
  EXPECT_THROW(BlockPool(device_, of(slot, slot, Pin::required)), CapacityError);
  EXPECT_TRUE(device_->pinned().empty());
  EXPECT_EQ(device_.use_count(), 2);  // ours and the fixture's pool
}

#if KVMEM_CHECKED
TEST_F(Pool, DeathOfACheckedBuildWhenAnOwnerIsPoisoned) {
  HostBlocks blocks = acquire(1);
  EXPECT_DEATH(blocks.poison(), "invariant broken");
}
#endif

}  // namespace
}  // namespace kvmem
