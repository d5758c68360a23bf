// One transfer from its request to its end. Bytes move when a thread of the test sleeps, not
// before.
#include "offload/transfer.hpp"

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/child_process.hpp"
#include "support/offload_world.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

class TransferTest : public ::testing::Test {
 protected:
  World world_{still_device(), {.config = without_reaper()}};
  Stream engine_{world_.device_ptr()};

  // Transfers that hold all lanes but the shared one until the stall opens. Of blocks from 20 on.
  std::vector<std::shared_ptr<Transfer>> fill_lanes() {
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (BlockId block = 20; block < 20 + static_cast<BlockId>(CopyQueue::lanes - 1); ++block) {
      transfers.push_back(
          world_.offload({.blocks = {block}, .after = world_.after_stream(engine_.handle())}));
    }
    return transfers;
  }
};

TEST_F(TransferTest, RandomBlocksComeBackAsTheyWere) {
  std::mt19937 random(7);
  std::vector<std::pair<std::shared_ptr<HostCopy>, std::vector<std::uint64_t>>> kept;
  std::uint64_t next_key = 1000;
  for (int round = 0; round < 200; ++round) {
    std::vector<BlockId> blocks(32);
    std::iota(blocks.begin(), blocks.end(), BlockId{0});
    std::ranges::shuffle(blocks, random);
    blocks.resize(1 + random() % 5);
    if (kept.size() < 6 && random() % 2 == 0) {
      std::vector<std::uint64_t> keys;
      for (const BlockId block : blocks) world_.cache().fill(block, keys.emplace_back(next_key++));
      const auto transfer = world_.offload({.blocks = blocks});
      transfer->wait(10);
      kept.emplace_back(transfer->result(), std::move(keys));
      for (const BlockId block : blocks) world_.cache().fill(block, 0);
    } else if (!kept.empty()) {
      const std::size_t which = random() % kept.size();
      auto [copy, keys] = kept[which];
      blocks.resize(std::min(blocks.size(), copy->size()));
      const std::size_t first = random() % (copy->size() - blocks.size() + 1);
      world_.restore({.blocks = blocks}, copy->slice(first, blocks.size()))->wait(10);
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        ASSERT_TRUE(world_.cache().holds(blocks[i], keys[first + i]));
      }
      if (random() % 2 == 0) kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  kept.clear();
  EXPECT_TRUE(world_.cache().padding_is_untouched());
  EXPECT_EQ(world_.slots().free, 32U);
}

// Public failure 17: a key could be looked up before its bytes had been written.
TEST_F(TransferTest, AnOffloadIsQueuedThenInFlightThenDone) {
  Stall stall(world_.device_ptr(), engine_.handle());
  auto others = fill_lanes();
  const auto waiting =
      world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
  EXPECT_EQ(others[0]->state(), TransferState::in_flight);
  EXPECT_EQ(waiting->state(), TransferState::queued);
  EXPECT_FALSE(waiting->done());
  EXPECT_THROW(waiting->expect_done(), NotDone);
  EXPECT_THROW(static_cast<void>(waiting->result()), NotDone);
  stall.open();
  waiting->wait(10);
  EXPECT_EQ(waiting->state(), TransferState::done);
  EXPECT_TRUE(waiting->done());
  EXPECT_NO_THROW(waiting->expect_done());
}

TEST_F(TransferTest, TheResultIsTheSameObjectEveryTime) {
  const auto transfer = world_.offload({.blocks = {3, 5}});
  transfer->wait(10);
  const auto copy = transfer->result();
  EXPECT_EQ(transfer->result(), copy);
  EXPECT_EQ(copy->size(), 2U);
  EXPECT_EQ(copy->nbytes(), 2 * CacheMemory::block_bytes());
  EXPECT_TRUE(CacheMemory::holds(copy->blocks(), 0, 3));
  EXPECT_TRUE(CacheMemory::holds(copy->blocks(), 1, 5));
  copy->release();
  EXPECT_EQ(world_.slots().free, 32U);
  EXPECT_THROW(copy->release(), AlreadyReleased);
  EXPECT_THROW(static_cast<void>(copy->slice(0, 1)), AlreadyReleased);
  EXPECT_THROW(static_cast<void>(world_.restore({.blocks = {3, 5}}, *copy)), AlreadyReleased);
  EXPECT_EQ(transfer->result(), copy) << "also when it was released";
}

TEST_F(TransferTest, ARestoreHasNoResult) {
  const auto copy = world_.stored(2, 77);
  const auto transfer = world_.restore({.blocks = {9}}, *copy);
  transfer->wait(10);
  EXPECT_EQ(transfer->result(), nullptr);
  EXPECT_TRUE(world_.cache().holds(9, 77));
}

TEST_F(TransferTest, ASliceOfACopyRestoresThoseBlocksOnly) {
  const auto transfer = world_.offload({.blocks = {1, 2, 3, 4}});
  transfer->wait(10);
  const HostCopy middle = transfer->result()->slice(1, 2);
  transfer->result()->release();
  EXPECT_EQ(world_.slots().held, 2U);
  world_.restore({.blocks = {10, 11}}, middle)->wait(10);
  EXPECT_TRUE(world_.cache().holds(10, 2));
  EXPECT_TRUE(world_.cache().holds(11, 3));
  EXPECT_THROW(static_cast<void>(middle.slice(1, 2)), InvalidArgument);
}

TEST_F(TransferTest, OffloadIntoBlocksOfTheCallersKeepsTheirOtherHolders) {
  auto mine = world_.pool().try_acquire(2);
  const auto transfer = world_.offload_into({.blocks = {6, 7}}, mine->share());
  transfer->wait(10);
  EXPECT_TRUE(CacheMemory::holds(*mine, 0, 6));
  EXPECT_TRUE(CacheMemory::holds(*mine, 1, 7));
  EXPECT_EQ(world_.slots().held, 2U);
  transfer->result()->release();
  EXPECT_EQ(world_.slots().held, 2U);
  mine->release();
  EXPECT_EQ(world_.slots().free, 32U);
}

TEST_F(TransferTest, OffloadIntoRefusesBlocksThatDoNotFit) {
  auto mine = world_.pool().try_acquire(2);
  EXPECT_THROW(static_cast<void>(world_.offload_into({.blocks = {6}}, mine->share())),
               InvalidArgument);
  World other(still_device(), {.config = without_reaper()});
  auto foreign = other.pool().try_acquire(2);
  EXPECT_THROW(static_cast<void>(world_.offload_into({.blocks = {6, 7}}, foreign->share())),
               InvalidArgument);
  EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 0U);
}

TEST_F(TransferTest, OffloadIntoOneSlotTwiceIsRefused) {
  const auto mine = world_.pool().try_acquire(1);
  const SlotIndex slot = mine->slots()[0];
  HostBlocks twice = world_.pool().share_indices(std::vector<SlotIndex>{slot, slot});
  EXPECT_THROW(static_cast<void>(world_.offload_into({.blocks = {6, 7}}, std::move(twice))),
               InvalidArgument);
  EXPECT_EQ(world_.stats(Direction::to_host).accepted, 0U);
}

TEST_F(TransferTest, ARequestThatIsWrongNamesWhatIsWrong) {
  const auto copy = world_.stored(0, 1);
  EXPECT_THROW(static_cast<void>(world_.offload({.blocks = {}})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(world_.offload({.blocks = {32}})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(world_.offload({.blocks = {-1}})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(world_.restore({.blocks = {1, 2}}, *copy)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(world_.restore({.blocks = {1, 1}}, copy->slice(0, 1))),
               InvalidArgument);
  World other(still_device(), {.config = without_reaper()});
  EXPECT_THROW(static_cast<void>(other.restore({.blocks = {1}}, *copy)), InvalidArgument);
  const auto foreign = other.offload({.blocks = {1}});
  EXPECT_THROW(static_cast<void>(world_.after_transfer(*foreign)), InvalidArgument);
  foreign->wait(10);
  EXPECT_EQ(world_.slots().held, 1U);
  EXPECT_EQ(world_.stats(Direction::to_device).queued_bytes, 0U);
}

// Two copies without an order would write one block.
TEST_F(TransferTest, ARestoreIntoOneBlockTwiceIsRefused) {
  const auto offload = world_.offload({.blocks = {1, 2}});
  offload->wait(10);
  EXPECT_THROW(static_cast<void>(world_.restore({.blocks = {3, 3}}, *offload->result())),
               InvalidArgument);
  EXPECT_EQ(world_.stats(Direction::to_device).accepted, 0U);
}

TEST_F(TransferTest, ATransferOfNoBlocksIsRefusedBeforeItTakesAnything) {
  for (const TransferKind kind : {TransferKind::offload, TransferKind::restore})
    EXPECT_THROW(static_cast<void>(world_.manager().admit(kind, {}, false)), InvalidArgument);
}

TEST_F(TransferTest, WaitOnRefusesAnUnknownStreamAlsoWhenThereIsNothingToWaitFor) {
  const auto transfer = world_.offload({.blocks = {1}});
  transfer->wait(10);
  const StreamHandle gone = Stream(world_.device_ptr()).handle();
  EXPECT_THROW(transfer->wait_on(gone, std::nullopt), InvalidArgument);
}

// ---- waiting ----

TEST_F(TransferTest, AWaitThatIsTooShortTimesOutAndTheTransferGoesOn) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto transfer =
      world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
  EXPECT_THROW(transfer->wait(0), TimedOut);
  EXPECT_THROW(transfer->wait(0.001), TimedOut);
  EXPECT_EQ(transfer->state(), TransferState::in_flight);
  stall.open();
  transfer->wait(10);
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, 1));
}

TEST_F(TransferTest, AnInterruptEndsTheWaitAndNothingElse) {
  Stall stall(world_.device_ptr(), engine_.handle());
  auto transfer = world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
  struct Signal {};
  EXPECT_THROW(transfer->wait(std::nullopt, [] { throw Signal{}; }), Signal);
  EXPECT_EQ(transfer->state(), TransferState::in_flight);
  transfer.reset();
  EXPECT_EQ(world_.slots().quarantined, 1U);
  stall.open();
  EXPECT_TRUE(world_.manager().drain(10, {}));
  EXPECT_EQ(world_.slots().free, 32U);
}

TEST_F(TransferTest, AWaitThatTheExitOfTheProcessEndsSaysSo) {
  EXPECT_TRUE(true_in_child([]() -> bool {
    World world(still_device(), {.config = without_reaper()});
    const Stream engine(world.device_ptr());
    const Stall stall(world.device_ptr(), engine.handle());
    const auto transfer =
        world.offload({.blocks = {1}, .after = world.after_stream(engine.handle())});
    set_process_exiting();
    try {
      transfer->wait(std::nullopt);
    } catch (const TimedOut&) {
      std::_Exit(0);  // no destructor
    }
    std::_Exit(1);
  }));
}

TEST_F(TransferTest, AForkedChildIsToldAndTouchesNothing) {
  Stall stall(world_.device_ptr(), engine_.handle());
  auto transfer = world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
  EXPECT_TRUE(true_in_child([&] {
    int refused = 0;
    const auto expect_forked = [&](auto&& call) {
      try {
        call();
      } catch (const Forked&) {
        ++refused;
      }
    };
    expect_forked([&] { transfer->wait(0); });
    expect_forked([&] { static_cast<void>(transfer->cancel()); });
    expect_forked([&] { transfer->wait_on(engine_.handle(), std::nullopt); });
    expect_forked([&] { static_cast<void>(world_.manager().poll()); });
    expect_forked([&] { static_cast<void>(world_.manager().drain(0, {})); });
    expect_forked([&] { static_cast<void>(world_.manager().close(0, {})); });
    expect_forked([&] { static_cast<void>(world_.offload({.blocks = {2}})); });
    transfer.reset();
    return refused == 7;
  }));
  stall.open();
  transfer->wait(10);
}

// ---- cancel ----

TEST_F(TransferTest, CancelBeforeSubmissionEndsTheTransferNow) {
  Stall stall(world_.device_ptr(), engine_.handle());
  auto others = fill_lanes();
  const auto waiting =
      world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
  EXPECT_EQ(waiting->cancel(), CancelOutcome::not_submitted);
  EXPECT_EQ(waiting->state(), TransferState::cancelled);
  EXPECT_THROW(waiting->expect_done(), Cancelled);
  EXPECT_THROW(waiting->wait(0), Cancelled);
  EXPECT_THROW(static_cast<void>(waiting->result()), Cancelled);
  EXPECT_EQ(waiting->cancel(), CancelOutcome::already_done);
  EXPECT_TRUE(world_.manager().busy(std::vector<BlockId>{1}).empty());
  EXPECT_EQ(world_.slots().free, 28U);
  EXPECT_EQ(world_.stats(Direction::to_host).waiting, 0U);
}

TEST_F(TransferTest, CancelInFlightKeepsEverythingUntilTheEndWasObserved) {
  Stall stall(world_.device_ptr(), engine_.handle());
  auto transfer =
      world_.offload({.blocks = {1, 2}, .after = world_.after_stream(engine_.handle()), .tag = 5});
  EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  EXPECT_EQ(transfer->state(), TransferState::in_flight);
  EXPECT_TRUE(world_.manager().poll().empty());
  EXPECT_EQ(world_.manager().busy(std::vector<BlockId>{0, 1, 2, 3}), (std::vector<BlockId>{1, 2}));
  transfer.reset();
  EXPECT_EQ(world_.slots().quarantined, 2U);
  EXPECT_FALSE(world_.pool().try_acquire(31)) << "a quarantined block is not handed out";

  stall.open();
  EXPECT_TRUE(world_.manager().drain(10, {}));
  EXPECT_EQ(world_.slots().free, 32U);
  EXPECT_TRUE(world_.manager().busy(std::vector<BlockId>{0, 1, 2, 3}).empty());
  const auto reports = world_.manager().poll();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].state, TransferState::cancelled);
  EXPECT_EQ(reports[0].tag, Tag{5});
  EXPECT_EQ(world_.stats(Direction::to_host).cancelled, 1U);
}

TEST_F(TransferTest, ACancelledRestoreKeepsItsSourceUntilTheEndWasObserved) {
  auto copy = world_.stored(1, 5);
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto transfer =
      world_.restore({.blocks = {8}, .after = world_.after_stream(engine_.handle())}, *copy);
  EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  copy->release();
  EXPECT_EQ(world_.slots().quarantined, 1U);
  EXPECT_EQ(world_.manager().stats().restoration_slots, 1U);
  stall.open();
  EXPECT_THROW(transfer->wait(10), Cancelled);
  EXPECT_EQ(world_.slots().free, 32U);
  EXPECT_EQ(world_.manager().stats().restoration_slots, 0U);
}

TEST_F(TransferTest, CancelAfterTheEndChangesNothing) {
  const auto transfer = world_.offload({.blocks = {1}});
  transfer->wait(10);
  EXPECT_EQ(transfer->cancel(), CancelOutcome::already_done);
  EXPECT_EQ(transfer->state(), TransferState::done);
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, 1));
}

// Public failure 36: the tail of a transfer that was ended half-way was freed twice.
TEST(Cancel, BetweenSlicesDropsTheRest) {
  ManagerConfig config;
  config.window_bytes = smallest_window_bytes;
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
  World world(device, {.device_blocks = 100, .slots = 100, .config = config});
  std::vector<BlockId> all(100);
  std::iota(all.begin(), all.end(), BlockId{0});
  const auto transfer = world.offload({.blocks = all});
  EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  EXPECT_THROW(transfer->wait({}), Cancelled);  // the scripted clock would not wait for the reaper
  std::size_t bytes = 0;
  for (const Call& call : device->calls(CallKind::copy)) bytes += call.bytes;
  EXPECT_GT(bytes, 0U);
  EXPECT_LE(bytes, smallest_window_bytes);
  EXPECT_EQ(world.slots().free, 100U);
}

TEST(Cancel, WhoSeesTheEndFindsEverythingAtHome) {
  constexpr std::size_t many = 2000;  // so that bringing them home takes a moment
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.moves_bytes = false});
  World world(device, {.device_blocks = many, .slots = many, .config = without_reaper()});
  std::vector<BlockId> all(many);
  std::iota(all.begin(), all.end(), BlockId{0});
  for (int round = 0; round < 100; ++round) {
    const auto transfer = world.offload({.blocks = all});
    EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
    EXPECT_EQ(world.slots().quarantined, many);
    device->run_all();
    std::atomic<bool> watching{false};
    std::thread watcher([&] {
      watching = true;
      EXPECT_TRUE(comes_true([&] { return transfer->done(); }));
      EXPECT_EQ(world.slots().free, many);
      EXPECT_TRUE(world.manager().busy(all).empty());
      EXPECT_EQ(world.stats(Direction::to_host).queued_bytes, 0U);
    });
    while (!watching) std::this_thread::yield();
    static_cast<void>(world.manager().poll());
    watcher.join();
  }
}

TEST_F(TransferTest, ManyThreadsThatCancelAgreeOnOneEnd) {
  for (int round = 0; round < 50; ++round) {
    const auto transfer = world_.offload({.blocks = {1}, .tag = 1});
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        if (t == 0)
          static_cast<void>(world_.manager().drain(0.001, {}));
        else
          static_cast<void>(transfer->cancel());
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(world_.manager().drain(10, {}));
    EXPECT_EQ(world_.manager().poll().size(), 1U);
    EXPECT_TRUE(transfer->done());
  }
  EXPECT_EQ(world_.slots().free, 32U);
}

// ---- dropped handles ----

// Public failure 42: releasing a transfer in flight destroyed what its completion still pointed to.
TEST_F(TransferTest, ADroppedOffloadIsQuarantinedThenFree) {
  Stall stall(world_.device_ptr(), engine_.handle());
  world_.offload({.blocks = {1, 2}, .after = world_.after_stream(engine_.handle())});
  EXPECT_EQ(world_.slots().quarantined, 2U);
  stall.open();
  EXPECT_TRUE(world_.manager().drain(10, {}));
  EXPECT_EQ(world_.slots().free, 32U);
  EXPECT_EQ(world_.stats(Direction::to_host).done, 1U);
}

TEST_F(TransferTest, AnOffloadThatIsDroppedAfterItsEndFreesItsBlocksUnlessTheyWereAskedFor) {
  auto transfer = world_.offload({.blocks = {1}});
  transfer->wait(10);
  EXPECT_EQ(world_.slots().held, 1U);
  transfer.reset();
  EXPECT_EQ(world_.slots().free, 32U);
  transfer = world_.offload({.blocks = {1}});
  transfer->wait(10);
  const auto copy = transfer->result();
  transfer.reset();
  EXPECT_EQ(world_.slots().held, 1U);
}

// Public failure 42: releasing a transfer in flight destroyed what its completion still pointed to.
TEST_F(TransferTest, ADroppedRestoreStillArrives) {
  const auto copy = world_.stored(1, 99);
  world_.restore({.blocks = {7}}, *copy);
  EXPECT_TRUE(world_.manager().drain(10, {}));
  EXPECT_TRUE(world_.cache().holds(7, 99));
}

TEST_F(TransferTest, TransfersKeepTheirManagerAliveAndNothingElseDoes) {
  const std::weak_ptr<Manager> alive = world_.manager_ptr();
  const auto runtime = world_.manager().runtime();
  {
    Stall stall(world_.device_ptr(), engine_.handle());
    world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
    world_.manager_ptr().reset();
    EXPECT_FALSE(alive.expired());
  }
  EXPECT_TRUE(
      runtime->wait_until([&] { return alive.expired(); }, runtime->deadline_after(10), {}));
  EXPECT_EQ(world_.slots().free, 32U);
}

TEST(Cancel, BeforeSubmissionDoesNotKeepTheManagerAlive) {
  // Staged, so that it waits in kvmem until its stream is ready; and nobody calls again.
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.needs_pinned_host = true});
  World world(device, {.config = without_reaper(), .pin = Pin::never});
  const std::weak_ptr<Manager> alive = world.manager_ptr();
  const Stream engine(device);
  const Stall stall(device, engine.handle());
  auto transfer = world.offload({.blocks = {1}, .after = world.after_stream(engine.handle())});
  EXPECT_EQ(transfer->cancel(), CancelOutcome::not_submitted);
  transfer.reset();
  world.manager_ptr().reset();
  EXPECT_TRUE(alive.expired());
}

// ---- wakers ----

TEST_F(TransferTest, AWakerFiresOnceAtTheEndAndAtOnceBehindIt) {
  const auto list = std::make_shared<WakeList>();
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto transfer =
      world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
  transfer->wake(list, 10);
  transfer->wake(list, 11);
  transfer->unwake(list, 10);
  EXPECT_TRUE(list->drain().empty());
  stall.open();
  transfer->wait(10);
  EXPECT_EQ(list->drain(), std::vector<std::uint64_t>{11});
  transfer->wake(list, 12);
  EXPECT_EQ(list->drain(), std::vector<std::uint64_t>{12});
}

// ---- failures ----

class FailingTransferTest : public ::testing::Test {
 protected:
  std::shared_ptr<ScriptedDevice> device_ =
      std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
  World world_{device_, {.config = without_reaper()}};
};

// Public failure 105: a failed transfer was taken for a good one.
TEST_F(FailingTransferTest, AFailedCopyEndsFailedOnceItsGuardWasObservedAndTheManagerWorksOn) {
  device_->fail(CallKind::copy, 1, Failure::in_flight);
  const auto transfer = world_.offload({.blocks = {1}, .tag = "a"});
  EXPECT_EQ(transfer->state(), TransferState::in_flight);
  EXPECT_EQ(world_.manager().busy(std::vector<BlockId>{1}).size(), 1U);
  EXPECT_THROW(transfer->wait(10), CopyFailed);
  EXPECT_EQ(transfer->state(), TransferState::failed);
  EXPECT_THROW(static_cast<void>(transfer->result()), CopyFailed);
  EXPECT_EQ(transfer->cancel(), CancelOutcome::already_done);
  EXPECT_EQ(world_.slots().free, 32U);
  const auto reports = world_.manager().poll();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].state, TransferState::failed);
  EXPECT_NE(reports[0].error.find("scripted: copy"), std::string::npos);
  EXPECT_EQ(world_.stats(Direction::to_host).failed, 1U);
  EXPECT_EQ(world_.stored(3, 5)->size(), 1U);
}

// The lanes are kvmem's own, so there is a better way than to ask the same event for ever.
TEST_F(FailingTransferTest, AQueryThatFailsOnALaneIsFollowedByANewEventThere) {
  const auto transfer = world_.offload({.blocks = {1}});
  const std::size_t recorded = device_->calls(CallKind::record).size();
  device_->fail(CallKind::query, 1);
  static_cast<void>(world_.manager().poll());
  EXPECT_EQ(device_->calls(CallKind::record).size(), recorded + 1);
  transfer->wait(10);
}

TEST_F(FailingTransferTest, CancelOfAFailedOneThatDrainsEndsFailed) {
  device_->fail(CallKind::copy, 1, Failure::in_flight);
  const auto transfer = world_.offload({.blocks = {1}});
  EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  EXPECT_THROW(transfer->wait(10), CopyFailed);
}

TEST_F(FailingTransferTest, OnALostDeviceWhatWasInFlightIsPoisonedAndWhatWasObservedIsReadable) {
  const auto good = world_.stored(4, 44);
  const auto offload = world_.offload({.blocks = {1, 2}});
  const auto restore = world_.restore({.blocks = {6}}, *good);
  device_->lose();
  EXPECT_THROW(offload->wait(10), DeviceLost);
  EXPECT_THROW(restore->wait(10), DeviceLost);
  EXPECT_TRUE(CacheMemory::holds(good->blocks(), 0, 44));
  EXPECT_EQ(world_.slots().poisoned, 3U);  // the restore's source too: the copy may still read it
  EXPECT_EQ(world_.slots().free, 29U);
  EXPECT_THROW(world_.offload({.blocks = {9}}), DeviceLost);
  EXPECT_TRUE(world_.manager().drain(10, {}));
  EXPECT_TRUE(world_.manager().close(1, {}).quiet);
}

}  // namespace
}  // namespace kvmem::test
