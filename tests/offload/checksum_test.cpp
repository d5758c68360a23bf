// Checksums of host blocks: kept from the end of an offload on, verified before a restore.
#include <atomic>
#include <filesystem>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "device/virtual_device.hpp"
#include "support/offload_world.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

ManagerConfig with_checksums(bool reaper = true) {
  ManagerConfig config;
  config.checksum = Checksum::always;
  config.reaper = reaper;
  return config;
}

void flip(World& world, SlotIndex slot, std::size_t offset) {
  world.pool().data()[slot * world.pool().slot_bytes() + offset] ^= std::byte{0x10};
}
void flip(World& world, const HostCopy& copy, std::size_t i, std::size_t offset = 0) {
  flip(world, copy.blocks().slots()[i], offset);
}

struct Kind {
  std::shared_ptr<ModelDevice> (*device)();
  bool reaper;
  const char* name;
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

const Kind kinds[] = {
    {[] { return make_host_device({}); }, true, "Host"},
    {still_device, false, "HostWithoutThreads"},
    {[] { return std::shared_ptr<ModelDevice>(make_virtual_device({})); }, true, "Virtual"},
};

class ChecksumTest : public ::testing::TestWithParam<Kind> {
 protected:
  std::shared_ptr<HostCopy> stored(World& world, const std::vector<BlockId>& blocks) {
    const auto transfer = world.offload({.blocks = blocks});
    transfer->wait(30);
    return transfer->result();
  }
  ManagerConfig config_ = with_checksums(GetParam().reaper);
  World world_{GetParam().device(), {.config = config_}};
};

TEST_P(ChecksumTest, AnOffloadEndsWithASumOfEachBlockAndARestoreVerifiesThem) {
  const auto copy = stored(world_, {3, 1, 4, 7, 5});
  for (std::size_t i = 0; i < copy->size(); ++i)
    EXPECT_EQ(copy->blocks().sum(i), crc32c(0, copy->blocks().data(i), CacheMemory::block_bytes()));
  world_.restore({.blocks = {10, 11, 12, 13, 14}}, *copy)->wait(30);
  EXPECT_TRUE(world_.cache().holds(10, 3));
  EXPECT_TRUE(world_.cache().holds(14, 5));
  const ChecksumStats stats = world_.manager().stats().checksum;
  EXPECT_EQ(stats.blocks_summed, 5U);
  EXPECT_EQ(stats.blocks_verified, 5U);
  EXPECT_EQ(stats.blocks_corrupt, 0U);
  EXPECT_EQ(stats.waiting, 0U);
}

TEST_P(ChecksumTest, AFlippedByteIsFoundBeforeAnythingReachesTheDevice) {
  const auto copy = stored(world_, {3, 1, 4});
  flip(world_, *copy, 1, CacheMemory::block_bytes() - 1);
  const SlotIndex slot = copy->blocks().slots()[1];
  const auto restore =
      world_.restore({.blocks = {10, 11, 12}, .tag = std::string("damaged")}, *copy);
  try {
    restore->wait(30);
    FAIL() << "was restored";
  } catch (const Corrupt& error) {
    EXPECT_EQ(error.block, 1U);
    EXPECT_EQ(error.slot, slot);
    EXPECT_EQ(error.expected, copy->blocks().sum(1));
    EXPECT_EQ(error.found, crc32c(0, copy->blocks().data(1), CacheMemory::block_bytes()));
  }
  EXPECT_EQ(restore->state(), TransferState::failed);
  EXPECT_EQ(restore->job()->submitted_at(), -1);
  for (const BlockId block : {10, 11, 12})
    EXPECT_TRUE(world_.cache().holds(block, static_cast<std::uint64_t>(block)));
  const std::vector<BlockId> targets{10, 11, 12};
  EXPECT_TRUE(world_.manager().busy(targets).empty());
  const auto reports = world_.manager().poll();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].state, TransferState::failed);
  EXPECT_NE(reports[0].error.find("block 1 "), std::string::npos) << reports[0].error;
  EXPECT_EQ(world_.manager().stats().checksum.blocks_corrupt, 1U);
  EXPECT_EQ(world_.stats(Direction::to_device).queued_bytes, 0U);

  world_
      .restore(
          {.blocks = {10, 12}},
          HostCopy(copy->layout_ptr(), world_.pool().share_indices(std::vector<SlotIndex>{
                                           copy->blocks().slots()[0], copy->blocks().slots()[2]})))
      ->wait(30);
  EXPECT_TRUE(world_.cache().holds(10, 3)) << "the others are good";
  EXPECT_TRUE(world_.cache().holds(12, 4));
}

TEST_P(ChecksumTest, ThePaddingOfASlotIsNotSummed) {
  const auto copy = stored(world_, {3});
  flip(world_, *copy, 0, CacheMemory::block_bytes());
  EXPECT_NO_THROW(world_.restore({.blocks = {10}}, *copy)->wait(30));
}

TEST_P(ChecksumTest, WhoWaitsOnAStreamHearsWhatTheVerificationFound) {
  const auto copy = stored(world_, {3});
  flip(world_, *copy, 0);
  const Stream engine(world_.device_ptr());
  const auto restore = world_.restore({.blocks = {10}}, *copy);
  EXPECT_THROW(restore->wait_on(engine.handle(), std::nullopt), Corrupt);
}

TEST_P(ChecksumTest, WaitingOnAStreamWaitsForTheVerification) {
  const auto copy = stored(world_, {3, 4});
  const Stream engine(world_.device_ptr());
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy);
  restore->wait_on(engine.handle(), std::nullopt);
  EXPECT_GE(restore->job()->submitted_at(), 0);
  restore->wait(30);
  EXPECT_TRUE(world_.cache().holds(11, 4));
}

TEST_P(ChecksumTest, ATransferBehindACorruptRestoreGoesOn) {
  const auto bad = stored(world_, {3});
  const auto good = stored(world_, {4});
  flip(world_, *bad, 0);
  const auto first = world_.restore({.blocks = {10}}, *bad);
  const auto second =
      world_.restore({.blocks = {10}, .after = world_.after_transfer(*first)}, *good);
  second->wait(30);
  EXPECT_TRUE(world_.cache().holds(10, 4));
  EXPECT_THROW(first->wait(30), Corrupt);
}

TEST_P(ChecksumTest, ACopyCanBeVerifiedByHand) {
  const auto copy = stored(world_, {3, 4, 5});
  EXPECT_EQ(copy->verify(), 3U);
  flip(world_, *copy, 2);
  EXPECT_EQ(copy->slice(0, 2).verify(), 2U);
  try {
    static_cast<void>(copy->verify());
    FAIL();
  } catch (const Corrupt& error) {
    EXPECT_EQ(error.block, 2U);
  }
  world_.pool().forget_sums(copy->blocks().slots().subspan(2));
  EXPECT_EQ(copy->verify(), 2U) << "what has no sum is not compared";
  copy->release();
  EXPECT_THROW(static_cast<void>(copy->verify()), AlreadyReleased);
}

TEST_P(ChecksumTest, SampledSumsTheFirstBlockAndEachNthBehindIt) {
  config_.checksum = Checksum::sampled;
  config_.checksum_every = 4;
  World world(GetParam().device(), {.config = config_});
  std::vector<std::shared_ptr<HostCopy>> copies;
  std::vector<bool> summed;
  for (const std::vector<BlockId>& blocks :
       std::vector<std::vector<BlockId>>{{0, 1, 2}, {3}, {4, 5, 6, 7, 8, 9}, {10, 11}}) {
    copies.push_back(stored(world, blocks));
    for (std::size_t i = 0; i < blocks.size(); ++i)
      summed.push_back(copies.back()->blocks().sum(i).has_value());
  }
  const std::vector<bool> expected{true,  false, false, false, true,  false,
                                   false, false, true,  false, false, false};
  EXPECT_EQ(summed, expected);
  EXPECT_EQ(world.manager().stats().checksum.blocks_summed, 3U);

  flip(world, *copies[2], 1);  // of block 5, which has none
  world.restore({.blocks = {20, 21}}, copies[2]->slice(0, 2))->wait(30);
  EXPECT_FALSE(world.cache().holds(21, 5)) << "a sample does not find everything";
  flip(world, *copies[2], 0);  // of block 4
  const auto restore = world.restore({.blocks = {22, 23}}, copies[2]->slice(0, 2));
  EXPECT_THROW(restore->wait(30), Corrupt);
}

TEST_P(ChecksumTest, AnOffloadOfAnotherManagerWithoutChecksumsForgetsThem) {
  const auto copy = stored(world_, {3, 4});
  ManagerConfig off = config_;
  off.checksum = Checksum::off;
  const auto other =
      Manager::make(world_.manager().runtime(), world_.cache().layout(world_.device().info().name),
                    world_.pool_ptr(), off);
  TransferRequest request;
  request.blocks = {8};
  Admission admission = other->admit(TransferKind::offload, request, false);
  ASSERT_TRUE(admission.try_take());
  other->offload_into(request, copy->blocks().share(1, 1), std::move(admission))->wait(30);
  EXPECT_TRUE(copy->blocks().sum(0));
  EXPECT_FALSE(copy->blocks().sum(1)) << "the slot holds other bytes";
  world_.restore({.blocks = {10, 11}}, *copy)->wait(30);
  EXPECT_TRUE(world_.cache().holds(11, 8));
  EXPECT_EQ(other->stats().checksum.blocks_summed, 0U);
}

TEST_P(ChecksumTest, AnOffloadBehindAnotherOneIntoItsSlotKeepsNoSumOfIt) {
  config_.checksum = Checksum::sampled;
  config_.checksum_every = 2;
  World world(GetParam().device(), {.config = config_});
  const HostBlocks slot = *world.pool().try_acquire(1);
  const auto summed = world.offload_into({.blocks = {2}}, slot.share());
  const auto second =
      world.offload_into({.blocks = {3}, .after = world.after_transfer(*summed)}, slot.share());
  second->wait(30);
  summed->wait(30);
  EXPECT_FALSE(slot.sum(0)) << "the slot holds other bytes";
  world.restore({.blocks = {10}}, *second->result())->wait(30);
  EXPECT_TRUE(world.cache().holds(10, 3));
}

TEST_P(ChecksumTest, OffloadsBehindEachOtherIntoOneSlotLeaveTheSumOfTheLast) {
  const HostBlocks slot = *world_.pool().try_acquire(1);
  After after;
  std::shared_ptr<Transfer> last;
  for (BlockId block = 0; block < 6; ++block) {
    last = world_.offload_into({.blocks = {block}, .after = after}, slot.share());
    world_.manager().add_transfer(after, *last);
  }
  last->wait(30);
  EXPECT_TRUE(CacheMemory::holds(slot, 0, 5));
  EXPECT_EQ(slot.sum(0), crc32c(0, slot.data(0), CacheMemory::block_bytes()));
  EXPECT_TRUE(world_.manager().drain(30, {}));
  EXPECT_EQ(slot.sum(0), crc32c(0, slot.data(0), CacheMemory::block_bytes()));
}

TEST_P(ChecksumTest, WhoWaitsOnAStreamWaitsForTheSumsOfWhatIsBefore) {
  const HostBlocks slot = *world_.pool().try_acquire(1);
  const Stream engine(world_.device_ptr());
  const auto first = world_.offload_into({.blocks = {2}}, slot.share());
  const auto second =
      world_.offload_into({.blocks = {3}, .after = world_.after_transfer(*first)}, slot.share());
  second->wait_on(engine.handle(), std::nullopt);
  EXPECT_TRUE(second->job()->begun());
  second->wait(30);
  EXPECT_TRUE(CacheMemory::holds(slot, 0, 3));
}

TEST_P(ChecksumTest, ASlotThatIsAcquiredHasNoSum) {
  auto copy = stored(world_, {3, 4});
  const std::vector<SlotIndex> slots(copy->blocks().slots().begin(), copy->blocks().slots().end());
  copy->release();
  const auto all = world_.pool().try_acquire(world_.pool().capacity());
  ASSERT_TRUE(all);
  for (const SlotIndex slot : slots) EXPECT_FALSE(world_.pool().sum(slot));
}

TEST_P(ChecksumTest, DroppedHandlesLoseNothing) {
  static_cast<void>(world_.offload({.blocks = {1, 2}}));
  {
    const auto copy = stored(world_, {3, 4});
    static_cast<void>(world_.restore({.blocks = {10, 11}}, *copy));
    copy->release();
  }
  ASSERT_TRUE(world_.manager().drain(30, {}));
  EXPECT_TRUE(world_.cache().holds(10, 3));
  EXPECT_TRUE(world_.cache().holds(11, 4));
  EXPECT_EQ(world_.slots().free, world_.slots().capacity);
}

TEST_P(ChecksumTest, CloseWaitsForAFullQueue) {
  const auto copy = stored(world_, {3});
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (BlockId block = 8; block < 24; ++block) {
    transfers.push_back(world_.offload({.blocks = {block % 8}}));
    transfers.push_back(world_.restore({.blocks = {block}}, *copy));
  }
  const CloseReport report = world_.manager().close(30, {});
  EXPECT_TRUE(report.quiet);
  for (const auto& transfer : transfers) EXPECT_EQ(transfer->state(), TransferState::done);
  EXPECT_EQ(transfers[0]->result()->verify(), 1U);
}

TEST_P(ChecksumTest, TheTimelineSaysWhenTheSumsWereThere) {
  config_.timeline = true;
  World world(GetParam().device(), {.config = config_});
  const auto copy = stored(world, {3});
  world.restore({.blocks = {10}}, *copy)->wait(30);
  const auto records = world.manager().timeline();
  ASSERT_EQ(records.size(), 2U);
  EXPECT_GE(records[0].observed, records[0].completed);
  EXPECT_GE(records[0].checked, records[0].observed);
  EXPECT_GE(records[1].checked, records[1].requested);
  EXPECT_GE(records[1].submitted, records[1].checked);
}

INSTANTIATE_TEST_SUITE_P(Devices, ChecksumTest, ::testing::ValuesIn(kinds),
                         [](const auto& kind) { return kind.param.name; });

// ---- workers that stand still ----

// A worker looks at the clock when it begins some blocks and when it has done them: there it stops.
class StoppedWorkerTest : public ::testing::Test {
 protected:
  StoppedWorkerTest() {
    device_->before_each_look_at_the_clock([this, own = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == own || !stop_.load()) return;
      if (looks_before_.load() > 0) {
        --looks_before_;
        return;
      }
      ++stopped_;
      while (stop_.load()) std::this_thread::yield();
      --stopped_;
    });
    copy_ = stored({3, 4});
  }
  ~StoppedWorkerTest() override { let_go(); }

  static ManagerConfig one_worker() {
    ManagerConfig config = with_checksums(false);
    config.checksum_workers = 1;
    config.timeline = true;
    return config;
  }
  void drive() {
    device_->run_all();
    static_cast<void>(world_.manager().poll());
  }
  bool ends(const Transfer& transfer) {
    return comes_true([&] {
      drive();
      return transfer.done();
    });
  }
  std::shared_ptr<HostCopy> stored(const std::vector<BlockId>& blocks) {
    const auto transfer = world_.offload({.blocks = blocks});
    EXPECT_TRUE(ends(*transfer));
    return transfer->result();
  }
  // The worker stops in an offload that this makes.
  std::shared_ptr<Transfer> stop_the_worker() {
    stop_.store(true);
    auto transfer = world_.offload({.blocks = {30}});
    drive();
    EXPECT_TRUE(comes_true([this] { return stopped_.load() == 1; }));
    return transfer;
  }
  void let_go() {
    stop_.store(false);
    EXPECT_TRUE(comes_true([this] {
      drive();
      return !world_.manager_ptr() || world_.manager().drain(0, {});
    }));
  }
  std::size_t copies() const { return device_->calls(CallKind::copy).size(); }

  std::atomic<bool> stop_{false};
  std::atomic<int> looks_before_{0}, stopped_{0};
  std::shared_ptr<ScriptedDevice> device_ = std::make_shared<ScriptedDevice>();
  World world_{device_, {.config = one_worker()}};
  std::shared_ptr<HostCopy> copy_;
};

TEST_F(StoppedWorkerTest, AnOffloadIsUnfinishedUntilItsSumIsThere) {
  const auto offload = stop_the_worker();
  drive();
  EXPECT_EQ(offload->state(), TransferState::in_flight);
  EXPECT_THROW(static_cast<void>(offload->result()), NotDone);
  EXPECT_EQ(world_.stats(Direction::to_host).lanes_owned, 0U);
  EXPECT_FALSE(world_.manager().drain(0, {}));
  let_go();
  EXPECT_TRUE(offload->result()->blocks().sum(0));
}

TEST_F(StoppedWorkerTest, ARestoreIsAcceptedAndItsBlocksAreBusyWhileItIsVerified) {
  stop_.store(true);
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  ASSERT_TRUE(comes_true([this] { return stopped_.load() == 1; }));
  const std::size_t before = copies();
  drive();
  EXPECT_EQ(restore->state(), TransferState::queued);
  const std::vector<BlockId> blocks{9, 10, 11};
  EXPECT_EQ(world_.manager().busy(blocks), (std::vector<BlockId>{10, 11}));
  EXPECT_THROW(static_cast<void>(world_.offload({.blocks = {10}})), Busy);
  EXPECT_EQ(world_.stats(Direction::to_device).waiting, 1U);
  EXPECT_EQ(copies(), before);
  let_go();
  EXPECT_EQ(restore->state(), TransferState::done);
  EXPECT_TRUE(world_.cache().holds(11, 4));
}

TEST_F(StoppedWorkerTest, ARestoreThatWaitsForAWorkerIsCancelledAtOnce) {
  const auto offload = stop_the_worker();
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  const std::size_t before = copies();
  EXPECT_EQ(restore->cancel(), CancelOutcome::not_submitted);
  EXPECT_EQ(restore->state(), TransferState::cancelled);
  EXPECT_EQ(world_.manager().stats().checksum.waiting, 0U);
  copy_->release();
  EXPECT_EQ(world_.slots().held, 1U) << "the offload's";
  let_go();
  EXPECT_EQ(offload->state(), TransferState::done);
  EXPECT_EQ(copies(), before);
  EXPECT_EQ(world_.manager().stats().checksum.blocks_verified, 0U);
}

TEST_F(StoppedWorkerTest, ARestoreThatIsBeingVerifiedIsCancelledWhenTheWorkerLetsGo) {
  stop_.store(true);
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  ASSERT_TRUE(comes_true([this] { return stopped_.load() == 1; }));
  const std::size_t before = copies();
  EXPECT_EQ(restore->cancel(), CancelOutcome::draining);
  EXPECT_EQ(restore->cancel(), CancelOutcome::draining) << "twice is fine";
  copy_->release();
  EXPECT_EQ(world_.slots().quarantined, 2U) << "the worker reads them";
  let_go();
  EXPECT_EQ(restore->state(), TransferState::cancelled);
  EXPECT_EQ(copies(), before);
  EXPECT_EQ(world_.slots().free, world_.slots().capacity);
  EXPECT_TRUE(world_.cache().holds(10, 10));
}

TEST_F(StoppedWorkerTest, ACancelOutweighsWhatTheVerificationFinds) {
  flip(world_, *copy_, 0);
  stop_.store(true);
  looks_before_.store(1);  // the worker stops when it has found it
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  ASSERT_TRUE(comes_true([this] { return stopped_.load() == 1; }));
  EXPECT_EQ(restore->cancel(), CancelOutcome::draining);
  let_go();
  EXPECT_EQ(restore->state(), TransferState::cancelled);
  EXPECT_EQ(world_.manager().stats().checksum.blocks_corrupt, 1U);
}

TEST_F(StoppedWorkerTest, WhatRunsBehindACancelledRestoreWaitsUntilTheWorkerHasReadItsSlots) {
  stop_.store(true);
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  ASSERT_TRUE(comes_true([this] { return stopped_.load() == 1; }));
  EXPECT_EQ(restore->cancel(), CancelOutcome::draining);
  const auto over = world_.offload_into(
      {.blocks = {5, 6}, .after = world_.after_transfer(*restore)}, copy_->blocks().share());
  drive();
  EXPECT_EQ(over->state(), TransferState::queued);
  let_go();
  EXPECT_EQ(restore->state(), TransferState::cancelled);
  EXPECT_EQ(over->state(), TransferState::done);
  EXPECT_TRUE(CacheMemory::holds(copy_->blocks(), 1, 6));
}

TEST_F(StoppedWorkerTest, AnOffloadBehindARestoreDoesNotKeepItFromBeingVerified) {
  flip(world_, *copy_, 0);
  stop_the_worker();
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  const auto over = world_.offload_into(
      {.blocks = {5, 6}, .after = world_.after_transfer(*restore)}, copy_->blocks().share());
  let_go();
  EXPECT_THROW(restore->expect_done(), Corrupt);
  EXPECT_TRUE(world_.cache().holds(10, 10));
  EXPECT_EQ(over->state(), TransferState::done);
}

TEST_F(StoppedWorkerTest, ARestoreIsVerifiedWithTheSumsThatItsBlocksHadWhenItWasAccepted) {
  flip(world_, *copy_, 0);
  stop_the_worker();
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  world_.pool().forget_sums(copy_->blocks().slots());
  let_go();
  EXPECT_THROW(restore->expect_done(), Corrupt);
}

TEST_F(StoppedWorkerTest, WhatRunsBehindAnOffloadWaitsUntilTheWorkerHasReadItsSlots) {
  stop_.store(true);
  const HostBlocks slot = *world_.pool().try_acquire(1);
  const auto first = world_.offload_into({.blocks = {5}}, slot.share());
  drive();
  ASSERT_TRUE(comes_true([this] { return stopped_.load() == 1; }));
  const auto behind = [&](BlockId block) {
    After after = world_.after_transfer(*first);
    return world_.offload_into({.blocks = {block}, .after = after}, slot.share());
  };
  const auto cancelled = behind(6);
  EXPECT_EQ(cancelled->cancel(), CancelOutcome::not_submitted);
  const auto second = behind(7);
  drive();
  EXPECT_EQ(second->state(), TransferState::queued);
  EXPECT_TRUE(CacheMemory::holds(slot, 0, 5));
  EXPECT_EQ(world_.stats(Direction::to_host).lanes_owned, 0U);
  EXPECT_EQ(first->cancel(), CancelOutcome::draining);
  let_go();
  EXPECT_EQ(first->state(), TransferState::cancelled);
  EXPECT_EQ(second->state(), TransferState::done);
  EXPECT_TRUE(CacheMemory::holds(slot, 0, 7));
  EXPECT_EQ(slot.sum(0), crc32c(0, slot.data(0), CacheMemory::block_bytes()));
}

TEST_F(StoppedWorkerTest, ACancelledOffloadIsNotSummed) {
  const auto first = stop_the_worker();
  const auto second = world_.offload({.blocks = {5, 6}});
  drive();
  EXPECT_EQ(second->cancel(), CancelOutcome::draining);
  const std::uint64_t before = world_.manager().stats().checksum.blocks_summed;
  let_go();
  EXPECT_EQ(second->state(), TransferState::cancelled);
  EXPECT_EQ(world_.manager().stats().checksum.blocks_summed, before + 1);
  EXPECT_EQ(first->state(), TransferState::done);
}

TEST_F(StoppedWorkerTest, AFailedOffloadIsNotSummed) {
  const auto first = stop_the_worker();
  device_->fail(CallKind::copy, 1);
  const auto second = world_.offload({.blocks = {5, 6}});
  EXPECT_TRUE(ends(*second)) << "it waits for no worker";
  EXPECT_EQ(second->state(), TransferState::failed);
  let_go();
  EXPECT_THROW(second->expect_done(), CopyFailed);
}

TEST_F(StoppedWorkerTest, WhatIsBehindARestoreWaitsForItsVerificationAndTheOthersDoNot) {
  auto blocks = world_.pool().try_acquire(1);  // of no sum
  const HostCopy plain(copy_->layout_ptr(), std::move(*blocks));
  stop_.store(true);
  const auto first = world_.restore({.blocks = {10, 11}}, *copy_);
  ASSERT_TRUE(comes_true([this] { return stopped_.load() == 1; }));
  const auto behind =
      world_.restore({.blocks = {10}, .after = world_.after_transfer(*first)}, plain);
  const auto other = world_.restore({.blocks = {20}}, plain);
  EXPECT_TRUE(ends(*other));
  EXPECT_EQ(behind->state(), TransferState::queued);
  let_go();
  EXPECT_EQ(behind->state(), TransferState::done);
  EXPECT_LT(first->job()->submitted_at(), behind->job()->submitted_at());
}

TEST_F(StoppedWorkerTest, VerificationsGoBeforeSums) {
  const auto first = stop_the_worker();
  const auto offload = world_.offload({.blocks = {5}});
  drive();
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  EXPECT_EQ(world_.manager().stats().checksum.waiting, 2U);
  let_go();
  EXPECT_LT(restore->job()->checked, offload->job()->checked);
}

TEST_F(StoppedWorkerTest, CloseCancelsAtTheDeadlineAndLeavesTheRestGuarded) {
  const auto offload = stop_the_worker();
  const auto queued = world_.offload({.blocks = {6}});
  drive();
  const auto restore = world_.restore({.blocks = {10, 11}}, *copy_);
  const CloseReport report = world_.manager().close(0, {});
  EXPECT_FALSE(report.quiet);
  EXPECT_EQ(report.cancelled, 3U);
  EXPECT_EQ(report.in_flight, 2U) << "the worker and the queue have them";
  EXPECT_EQ(restore->state(), TransferState::cancelled);
  let_go();
  EXPECT_EQ(offload->state(), TransferState::cancelled);
  EXPECT_EQ(queued->state(), TransferState::cancelled);
}

// ---- threads ----

std::size_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(ChecksumThreadsTest, NoneExistsWhenOffAndTheyEndWithTheManager) {
  std::thread([] {}).join();  // TSan makes one of its own beside the first
  const std::size_t before = threads_of_this_process();
  World off(still_device(), {.config = without_reaper()});
  EXPECT_EQ(threads_of_this_process(), before);
  {
    ManagerConfig config = with_checksums(false);
    config.checksum_workers = 3;
    World world(still_device(), {.config = config});
    EXPECT_EQ(threads_of_this_process(), before + 3);
    world.offload({.blocks = {1}})->wait(30);
    world.manager().close(30, {});
    EXPECT_TRUE(comes_true([&] { return threads_of_this_process() == before; }));
  }
  {
    World world(still_device(), {.config = with_checksums(false)});
  }
  EXPECT_TRUE(comes_true([&] { return threads_of_this_process() == before; }));
}

TEST(ChecksumThreadsTest, TheLastHandleMayGoWhileWorkIsQueued) {
  World world(make_host_device({}), {.config = with_checksums()});
  std::weak_ptr<Manager> manager = world.manager_ptr();
  for (BlockId block = 0; block < 16; ++block)
    static_cast<void>(world.offload({.blocks = {block}}));
  world.manager_ptr().reset();
  EXPECT_TRUE(comes_true([&] { return manager.expired(); }));
  EXPECT_EQ(world.slots().free, world.slots().capacity);
}

TEST(ChecksumConfigTest, BoundsAreRefusedByName) {
  const auto refuses = [](const char* name, auto&& change) {
    ManagerConfig config = with_checksums();
    change(config);
    try {
      const World world(still_device(), {.config = config});
      FAIL() << name;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  };
  refuses("checksum_every", [](ManagerConfig& config) { config.checksum_every = 0; });
  refuses("checksum_workers", [](ManagerConfig& config) { config.checksum_workers = 0; });
  refuses("checksum_workers", [](ManagerConfig& config) { config.checksum_workers = 65; });
}

TEST(ChecksumConfigTest, MemoryWithoutBytesHasNoChecksums) {
  const auto device = make_virtual_device({.moves_bytes = false});
  EXPECT_THROW(World(device, {.config = with_checksums()}), InvalidArgument);
}

// Threads offload, restore, cancel and drop at random; what comes back is right.
TEST(ChecksumStormTest, WhatEndsDoneIsRight) {
  constexpr BlockId blocks_each = 8;
  ManagerConfig config = with_checksums();
  config.checksum = Checksum::sampled;
  config.checksum_every = 2;
  World world(make_host_device({}), {.config = config});
  const auto run = [&](unsigned seed) {
    std::mt19937 random(seed);
    const BlockId first = static_cast<BlockId>(seed) * blocks_each;
    for (int turn = 0; turn < 150; ++turn) {
      const auto key = static_cast<std::uint64_t>(turn) * 100 + seed;
      world.cache().fill(first, key);
      const auto offload = world.try_offload({.blocks = {first, first + 1}});
      if (!offload) continue;
      if (random() % 4 == 0) static_cast<void>(offload->cancel());
      try {
        offload->wait(30);
      } catch (const Cancelled&) {
        continue;
      }
      const auto restore =
          world.try_restore({.blocks = {first + 2}}, offload->result()->slice(0, 1));
      if (!restore) continue;
      if (random() % 3 == 0) static_cast<void>(restore->cancel());
      try {
        restore->wait(30);
        EXPECT_TRUE(world.cache().holds(first + 2, key));
      } catch (const Cancelled&) {
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(run, seed);
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(world.manager().drain(30, {}));
  EXPECT_EQ(world.slots().free, world.slots().capacity);
  EXPECT_GT(world.manager().stats().checksum.blocks_verified, 50U);
}

}  // namespace
}  // namespace kvmem::test
