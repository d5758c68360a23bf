// Blocks that an unfinished transfer uses are refused to others, on either side of the copy.
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "offload/block_uses.hpp"
#include "support/offload_world.hpp"

namespace kvmem::test {
namespace {

class BusyTest : public ::testing::Test {
 protected:
  World world_{still_device(), {.config = without_reaper()}};
  Stream engine_{world_.device_ptr()};
  std::shared_ptr<HostCopy> copy_ = world_.stored(31, 500);
  std::unique_ptr<Stall> stall_ = std::make_unique<Stall>(world_.device_ptr(), engine_.handle());

  After stalled() { return world_.after_stream(engine_.handle()); }
  std::shared_ptr<Transfer> offload(BlockId block) {
    return world_.offload({.blocks = {block}, .after = stalled()});
  }
  std::shared_ptr<Transfer> restore(BlockId block) {
    return world_.restore({.blocks = {block}, .after = stalled()}, *copy_);
  }

  template <class Call>
  void expect_busy(BlockId block, const Transfer& with, Call&& call) {
    const std::size_t active =
        world_.stats(Direction::to_host).active + world_.stats(Direction::to_device).active;
    const SlotCounts slots = world_.slots();
    try {
      call();
      FAIL() << "was accepted";
    } catch (const Busy& error) {
      EXPECT_EQ(error.block, block);
      EXPECT_EQ(error.transfer, with.job()->id);
    }
    EXPECT_EQ(world_.stats(Direction::to_host).active + world_.stats(Direction::to_device).active,
              active);
    EXPECT_EQ(world_.slots(), slots) << "a refusal must leave nothing behind";
  }
};

// Public failure 4: a preempted block was given away before its store had run.
TEST_F(BusyTest, ARestoreIntoABlockThatIsReadIsRefused) {
  const auto reader = offload(3);
  expect_busy(3, *reader, [&] { restore(3); });
  EXPECT_EQ(world_.stats(Direction::to_device).queued_bytes, 0U);
}

TEST_F(BusyTest, ARestoreIntoABlockThatIsWrittenIsRefused) {
  const auto writer = restore(3);
  expect_busy(3, *writer, [&] { restore(3); });
}

TEST_F(BusyTest, AnOffloadOfABlockThatIsWrittenIsRefused) {
  const auto writer = restore(3);
  expect_busy(3, *writer, [&] { offload(3); });
}

TEST_F(BusyTest, TwoOffloadsMayReadTheSameBlock) {
  const auto one = offload(3);
  const auto two = offload(3);
  expect_busy(3, *one, [&] {
    world_.restore({.blocks = {3}, .after = world_.after_transfer(*two)}, *copy_);
  });
  After both = world_.after_transfer(*one);
  world_.manager().add_transfer(both, *two);
  EXPECT_NO_THROW(world_.restore({.blocks = {3}, .after = both}, *copy_));
}

// Public failure 19: a request was admitted again with a transfer under way.
TEST_F(BusyTest, ATransferMayUseWhatThoseInItsAfterUse) {
  const auto one = offload(3);
  const auto two = world_.restore({.blocks = {3}, .after = world_.after_transfer(*one)}, *copy_);
  const auto three = world_.offload({.blocks = {3}, .after = world_.after_transfer(*two)});
  After all = world_.after_transfer(*three);
  all.transfers.push_back(one->job());
  all.transfers.push_back(two->job());
  const auto four = world_.restore({.blocks = {3}, .after = all}, *copy_);
  expect_busy(3, *four, [&] { offload(3); });
  stall_->open();
  four->wait(10);
  EXPECT_TRUE(CacheMemory::holds(one->result()->blocks(), 0, 3));
  EXPECT_TRUE(CacheMemory::holds(three->result()->blocks(), 0, 500));
}

// One in between may still be cancelled before it is submitted, and then it orders nothing.
TEST_F(BusyTest, OrderThroughAnotherTransferDoesNotExempt) {
  const auto one = offload(3);
  const auto between = world_.offload({.blocks = {9}, .after = world_.after_transfer(*one)});
  expect_busy(3, *one, [&] {
    world_.restore({.blocks = {3}, .after = world_.after_transfer(*between)}, *copy_);
  });
}

TEST_F(BusyTest, TheExemptionIsForThoseThatAfterNames) {
  const auto one = offload(3);
  const auto between = world_.offload({.blocks = {9}});
  between->wait(10);
  expect_busy(3, *one, [&] {
    world_.restore({.blocks = {3}, .after = world_.after_transfer(*between)}, *copy_);
  });
}

TEST_F(BusyTest, OneInBetweenThatWasCancelledOrdersNothing) {
  const auto one = offload(3);
  std::vector<std::shared_ptr<Transfer>> fillers;  // so that `between` is not submitted
  for (BlockId block = 20; block < 23; ++block) fillers.push_back(offload(block));
  const auto between = world_.offload({.blocks = {9}, .after = world_.after_transfer(*one)});
  const After behind = world_.after_transfer(*between);
  ASSERT_EQ(between->cancel(), CancelOutcome::not_submitted);
  expect_busy(3, *one, [&] { world_.restore({.blocks = {3}, .after = behind}, *copy_); });
}

TEST_F(BusyTest, ABlockIsFreeAgainWhenItsTransferHasEnded) {
  const auto reader = offload(3);
  const auto writer = restore(4);
  EXPECT_EQ(world_.manager().busy(std::vector<BlockId>{2, 3, 4, 5}), (std::vector<BlockId>{3, 4}));
  EXPECT_EQ(world_.manager().stats().restoration_slots, 1U);
  stall_->open();
  reader->wait(10);
  writer->wait(10);
  EXPECT_TRUE(world_.manager().busy(std::vector<BlockId>{2, 3, 4, 5}).empty());
  EXPECT_EQ(world_.manager().stats().restoration_slots, 0U);
  EXPECT_NO_THROW(restore(3)->wait(10));
  EXPECT_THROW(static_cast<void>(world_.manager().busy(std::vector<BlockId>{32})), InvalidArgument);
}

TEST(Busy, WhatHasEndedButWasNotAskedYetIsInNobodysWay) {
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
  World world(device, {.config = without_reaper()});
  const auto copy = world.stored(31, 500);
  const auto reader = world.offload({.blocks = {3}});
  EXPECT_THROW(world.restore({.blocks = {3}}, *copy), Busy);
  device->run_all();
  EXPECT_FALSE(reader->done());
  EXPECT_NO_THROW(world.restore({.blocks = {3}}, *copy)->wait(10));
  EXPECT_TRUE(reader->done());
}

TEST_F(BusyTest, ACancelledTransferUsesItsBlocksUntilItsEndWasObserved) {
  const auto writer = restore(3);
  ASSERT_EQ(writer->cancel(), CancelOutcome::draining);
  expect_busy(3, *writer, [&] { offload(3); });
  stall_->open();
  EXPECT_THROW(writer->wait(10), Cancelled);
  EXPECT_NO_THROW(offload(3)->wait(10));
}

// Public failure 18: the source of a copy was written before the copy had run.
TEST_F(BusyTest, HostBlocksThatARestoreReadsAreNotWrittenByAnOffload) {
  auto mine = world_.pool().try_acquire(1);
  const auto filled = world_.offload_into({.blocks = {1}}, mine->share());
  filled->wait(10);
  const auto reader = world_.restore({.blocks = {2}, .after = stalled()}, *filled->result());
  const BlockId slot = mine->slots()[0];
  expect_busy(slot, *reader, [&] { world_.offload_into({.blocks = {5}}, mine->share()); });
  EXPECT_NO_THROW(
      world_.offload_into({.blocks = {5}, .after = world_.after_transfer(*reader)}, mine->share()));
}

// Public failure 17: a key could be looked up before its bytes had been written.
TEST_F(BusyTest, HostBlocksThatAnOffloadWritesAreNoSourceOfARestoreEvenBehindIt) {
  auto mine = world_.pool().try_acquire(1);
  const auto filled = world_.offload_into({.blocks = {1}}, mine->share());
  filled->wait(10);
  const auto writer = world_.offload_into({.blocks = {5}, .after = stalled()}, mine->share());
  const BlockId slot = mine->slots()[0];
  expect_busy(slot, *writer, [&] { world_.restore({.blocks = {2}}, *filled->result()); });
  expect_busy(slot, *writer, [&] {
    world_.restore({.blocks = {2}, .after = world_.after_transfer(*writer)}, *filled->result());
  });
}

TEST(BlockUses, ReadersGoTogetherAndAWriterWithNobody) {
  BlockUses uses(8);
  const std::vector<BlockId> some{1, 2, 2};
  uses.begin(some, Access::read);
  EXPECT_FALSE(uses.conflicts(some, Access::read));
  EXPECT_TRUE(uses.conflicts(some, Access::write));
  EXPECT_TRUE(uses.in_use(1));
  EXPECT_FALSE(uses.in_use(3));
  EXPECT_EQ(uses.written(), 0U);
  uses.end(some, Access::read);
  uses.begin(some, Access::write);
  EXPECT_TRUE(uses.conflicts(std::vector<BlockId>{2}, Access::read));
  EXPECT_FALSE(uses.conflicts(std::vector<BlockId>{3}, Access::write));
  EXPECT_EQ(uses.written(), 2U);
  uses.end(some, Access::write);
  EXPECT_EQ(uses.written(), 0U);
  EXPECT_FALSE(uses.in_use(2));
}

}  // namespace
}  // namespace kvmem::test
