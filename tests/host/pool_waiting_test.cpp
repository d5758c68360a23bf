// Waiting for blocks: order, giving up, and waiters that can no longer be served. No threads: a
// ticket is a fact.

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "host/block_pool.hpp"
#include "support/fake_device.hpp"

namespace kvmem {
namespace {

class PoolWaiting : public ::testing::Test {
 protected:
  static PoolOptions options() {
    PoolOptions options;
    options.block_bytes = 4096;
    options.capacity_bytes = std::size_t{8} * 4096;
    return options;
  }
  [[nodiscard]] HostBlocks acquire(std::size_t count) { return pool_->try_acquire(count).value(); }

  std::shared_ptr<test::FakeDevice> device_ = std::make_shared<test::FakeDevice>();
  std::optional<BlockPool> pool_{std::in_place, device_, options()};
};

TEST_F(PoolWaiting, ATicketIsGrantedAtOnceWhereThereIsEnough) {
  PoolTicket ticket = pool_->enqueue(8);
  EXPECT_TRUE(ticket.granted());
  EXPECT_FALSE(pool_->try_acquire(1).has_value());  // spoken for
  const HostBlocks blocks = ticket.take();
  EXPECT_EQ(blocks.size(), 8U);
  EXPECT_EQ(pool_->stats().slots.held, 8U);
  EXPECT_EQ(pool_->stats().acquired, 8U);
  EXPECT_THROW((void)ticket.take(), AlreadyReleased);
  EXPECT_THROW((void)ticket.granted(), AlreadyReleased);
}

TEST_F(PoolWaiting, ATicketThatWaitsCannotBeTaken) {
  const HostBlocks all = acquire(8);
  PoolTicket ticket = pool_->enqueue(1);
  EXPECT_FALSE(ticket.granted());
  EXPECT_THROW((void)ticket.take(), NotDone);
  EXPECT_EQ(pool_->stats().waiters, 1U);
}

TEST_F(PoolWaiting, SmallRequestsDoNotStarveALargeOne) {
  HostBlocks first = acquire(4), second = acquire(4);
  PoolTicket large = pool_->enqueue(8);
  PoolTicket small = pool_->enqueue(1);
  first.release();
  EXPECT_FALSE(pool_->try_acquire(1).has_value());
  EXPECT_FALSE(large.granted());
  EXPECT_FALSE(small.granted());
  second.release();
  EXPECT_TRUE(large.granted());
  EXPECT_FALSE(small.granted());
  {
    const HostBlocks taken = large.take();
  }
  EXPECT_TRUE(small.granted());
}

TEST_F(PoolWaiting, AWaiterThatGivesUpUnblocksThoseBehindIt) {
  const HostBlocks some = acquire(4);
  std::optional<PoolTicket> large(pool_->enqueue(8));
  PoolTicket small = pool_->enqueue(4);
  EXPECT_FALSE(small.granted());
  const std::uint64_t seen = device_->progress().value();
  large.reset();
  EXPECT_TRUE(small.granted());
  EXPECT_NE(device_->progress().value(), seen);
}

TEST_F(PoolWaiting, AGrantedTicketThatIsDroppedGivesBack) {
  std::optional<PoolTicket> granted(pool_->enqueue(6));
  PoolTicket behind = pool_->enqueue(4);
  EXPECT_FALSE(behind.granted());
  granted.reset();
  EXPECT_TRUE(behind.granted());
  EXPECT_EQ(behind.take().size(), 4U);
  EXPECT_TRUE(pool_->try_acquire(8).has_value());
}

TEST_F(PoolWaiting, ATicketMovesWithItsPlace) {
  HostBlocks all = acquire(8);
  PoolTicket ticket = pool_->enqueue(8);
  PoolTicket moved = std::move(ticket);
  EXPECT_THROW((void)ticket.granted(), AlreadyReleased);  // NOLINT: that is the question
  all.release();
  EXPECT_TRUE(moved.granted());
}

TEST_F(PoolWaiting, MoreThanThePoolCanEverGiveIsRefusedAtOnce) {
  try {
    (void)pool_->enqueue(9);
    FAIL();
  } catch (const CapacityError& error) {
    EXPECT_EQ(error.shortage.wanted, 9U);
    EXPECT_EQ(error.shortage.largest, 8U);
  }
}

TEST_F(PoolWaiting, QuarantinedBlocksServeAWaiterOnlyWhenTheirCopyHasEnded) {
  HostBlocks all = acquire(8);
  HostBlocks copy = all.share(0, 3).hold_for_copy();
  PoolTicket ticket = pool_->enqueue(6);
  all.release();
  EXPECT_FALSE(ticket.granted());
  copy.release();
  EXPECT_TRUE(ticket.granted());
}

TEST_F(PoolWaiting, EveryGiveBackThatSomebodyWaitsForMovesTheDevicesProgress) {
  HostBlocks first = acquire(4), second = acquire(4);
  std::uint64_t seen = device_->progress().value();
  {
    HostBlocks shared = first.share();
  }
  first.release();
  EXPECT_EQ(device_->progress().value(), seen);  // nobody waits
  const PoolTicket ticket = pool_->enqueue(8);
  second.release();
  EXPECT_NE(device_->progress().value(), seen);
}

TEST_F(PoolWaiting, AGrantWakesItsAwaiter) {
  const auto list = std::make_shared<WakeList>();
  HostBlocks all = acquire(8);
  const PoolTicket first = pool_->enqueue(8, Waker(list, 1));
  const PoolTicket second = pool_->enqueue(8, Waker(list, 2));
  EXPECT_TRUE(list->drain().empty());
  all.release();
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{1}));
  pool_->close();
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{2}));
}

TEST_F(PoolWaiting, AWaiterForMoreThanPoisonLeavesIsToldAndThoseBehindItAreServed) {
  const auto list = std::make_shared<WakeList>();
  HostBlocks lost = acquire(1), rest = acquire(7);
  HostBlocks copy = lost.hold_for_copy();
  PoolTicket all = pool_->enqueue(8, Waker(list, 1));
  PoolTicket seven = pool_->enqueue(7, Waker(list, 2));
  lost.release();
  const std::uint64_t seen = device_->progress().value();
  copy.poison();
  EXPECT_NE(device_->progress().value(), seen);
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{1}));
  try {
    (void)all.granted();
    FAIL();
  } catch (const CapacityError& error) {
    EXPECT_EQ(error.shortage.wanted, 8U);
    EXPECT_EQ(error.shortage.largest, 7U);
  }
  EXPECT_THROW((void)all.take(), CapacityError);
  EXPECT_THROW((void)pool_->enqueue(8), CapacityError);
  EXPECT_FALSE(seven.granted());
  rest.release();
  EXPECT_EQ(seven.take().size(), 7U);
  pool_->check();
}

TEST_F(PoolWaiting, PoisonOfABlockThatServedNobodyElseLeavesTheGrantsAlone) {
  HostBlocks lost = acquire(2);
  HostBlocks copy = lost.hold_for_copy();
  PoolTicket granted = pool_->enqueue(6);
  copy.poison();
  EXPECT_TRUE(granted.granted());
  EXPECT_EQ(granted.take().size(), 6U);
}

TEST_F(PoolWaiting, CloseTellsWaitersAndAGrantStaysGood) {
  HostBlocks some = acquire(4);
  PoolTicket granted = pool_->enqueue(4);
  PoolTicket waiting = pool_->enqueue(4);
  const std::uint64_t seen = device_->progress().value();
  pool_->close();
  EXPECT_NE(device_->progress().value(), seen);
  EXPECT_THROW((void)waiting.granted(), Closed);
  EXPECT_TRUE(granted.granted());
  EXPECT_EQ(granted.take().size(), 4U);
}

TEST_F(PoolWaiting, ATicketOutlivesThePoolAndSaysClosed) {
  std::optional<HostBlocks> all = acquire(8);
  PoolTicket waiting = pool_->enqueue(1);
  pool_.reset();
  EXPECT_THROW((void)waiting.granted(), Closed);
  all.reset();
  EXPECT_THROW((void)waiting.granted(), Closed);
}

}  // namespace
}  // namespace kvmem
