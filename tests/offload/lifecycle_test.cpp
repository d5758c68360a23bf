// The manager as a whole: drain, rebind, close, with and without a reaper, staged pools, the
// timeline.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/host_device.hpp"
#include "support/offload_world.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

class LifecycleTest : public ::testing::Test {
 protected:
  World world_{still_device(), {.config = without_reaper()}};
  Stream engine_{world_.device_ptr()};
};

TEST_F(LifecycleTest, DrainWaitsForQuietAndClosesNothing) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto transfer =
      world_.offload({.blocks = {1}, .after = world_.after_stream(engine_.handle())});
  EXPECT_FALSE(world_.manager().drain(0, {}));
  EXPECT_FALSE(world_.manager().drain(0.001, {}));
  stall.open();
  EXPECT_TRUE(world_.manager().drain(std::nullopt, {}));
  EXPECT_TRUE(transfer->done());
  EXPECT_FALSE(world_.manager().closed());
  world_.offload({.blocks = {2}})->wait(10);
}

// ---- rebind ----

TEST_F(LifecycleTest, RebindMovesTheCacheToOtherAddresses) {
  const auto before = world_.stored(1, 100);
  CacheMemory moved(32, 24);
  moved.fill(5, 200);
  world_.manager().rebind(moved.layout());
  const auto after = world_.offload({.blocks = {5}});
  after->wait(10);
  EXPECT_TRUE(CacheMemory::holds(after->result()->blocks(), 0, 200));
  world_.restore({.blocks = {7}}, *before)->wait(10);  // of the old addresses, equal geometry
  EXPECT_TRUE(moved.holds(7, 100));
  EXPECT_TRUE(world_.cache().holds(7, 7)) << "the old addresses are left alone";
}

TEST_F(LifecycleTest, RebindToAnotherGeometryIsRefusedWithTheFields) {
  const CacheMemory larger(33);
  try {
    world_.manager().rebind(larger.layout());
    FAIL();
  } catch (const Incompatible& error) {
    EXPECT_EQ(error.fields, std::vector<std::string>{"block_count: 32 and 33"});
  }
  world_.offload({.blocks = {1}})->wait(10);
}

TEST_F(LifecycleTest, RebindOfAManagerThatIsNotDrainedIsRefused) {
  const CacheMemory moved(32);
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto transfer =
      world_.offload({.blocks = {4}, .after = world_.after_stream(engine_.handle())});
  try {
    world_.manager().rebind(moved.layout());
    FAIL();
  } catch (const Busy& error) {
    EXPECT_EQ(error.block, 4);
    EXPECT_EQ(error.transfer, transfer->job()->id);
  }
  stall.open();
  EXPECT_TRUE(world_.manager().drain(10, {}));
  EXPECT_NO_THROW(world_.manager().rebind(moved.layout()));
}

// Public failure 95: what another geometry had written was read.
TEST_F(LifecycleTest, ACopyOfAnotherGeometryIsNotRestored) {
  Region region;
  const CacheMemory memory(16);
  region.address = memory.layout().segments()[0].address;
  region.stride_bytes = region.payload_bytes = CacheMemory::block_bytes();
  region.block_count = 8;
  auto blocks = world_.pool().try_acquire(1);
  const HostCopy copy(std::make_shared<const KVLayout>(KVLayout({region})), std::move(*blocks));
  try {
    static_cast<void>(world_.restore({.blocks = {1}}, copy));
    FAIL();
  } catch (const Incompatible& error) {
    EXPECT_GE(error.fields.size(), 2U);
  }
  EXPECT_EQ(world_.stats(Direction::to_device).queued_bytes, 0U);
}

// ---- close ----

TEST_F(LifecycleTest, CloseOfAQuietManagerReportsThatAndRefusesNewWork) {
  const auto transfer = world_.offload({.blocks = {1}});
  const CloseReport report = world_.manager().close(10, {});
  EXPECT_TRUE(report.quiet);
  EXPECT_EQ(report.cancelled, 0U);
  EXPECT_EQ(report.in_flight, 0U);
  EXPECT_EQ(transfer->state(), TransferState::done) << "close waits for the old";
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, 1));
  EXPECT_THROW(static_cast<void>(world_.try_offload({.blocks = {1}})), Closed);
  EXPECT_THROW(world_.manager().rebind(world_.cache().layout()), Closed);
  EXPECT_TRUE(world_.manager().close(0, {}).quiet) << "twice is fine";
  EXPECT_TRUE(world_.manager().poll().empty());
}

TEST_F(LifecycleTest, CloseWakesWhoWaitsForAdmission) {
  ManagerConfig config = without_reaper();
  config.max_queued_bytes = CacheMemory::block_bytes();
  World world(still_device(), {.config = config});
  const Stream engine(world.device_ptr());
  Stall stall(world.device_ptr(), engine.handle());
  world.offload({.blocks = {1}, .after = world.after_stream(engine.handle())});
  TransferRequest request;
  request.blocks = {2};
  Admission waiting = world.manager().admit(TransferKind::offload, request, true);
  EXPECT_FALSE(waiting.granted());
  EXPECT_FALSE(world.manager().close(0, {}).quiet);
  EXPECT_THROW(static_cast<void>(waiting.granted()), Closed);
}

TEST_F(LifecycleTest, CloseWithStalledWorkCancelsItSaysSoAndLeavesItGuarded) {
  const std::uint64_t leaked_before = leaked_region_bytes();
  Stall stall(world_.device_ptr(), engine_.handle());
  auto transfer =
      world_.offload({.blocks = {1, 2}, .after = world_.after_stream(engine_.handle()), .tag = 1});
  const CloseReport report = world_.manager().close(0.001, {});
  EXPECT_FALSE(report.quiet);
  EXPECT_EQ(report.cancelled, 1U);
  EXPECT_EQ(report.in_flight, 1U);
  EXPECT_EQ(report.slots.quarantined, 2U) << "a cancelled offload has no owner any more";
  transfer.reset();
  EXPECT_EQ(world_.slots().quarantined, 2U);
  EXPECT_EQ(leaked_region_bytes(), leaked_before) << "nothing is leaked while its guard is watched";
  stall.open();
  const CloseReport later = world_.manager().close(10, {});
  EXPECT_TRUE(later.quiet);
  EXPECT_EQ(later.slots.free, 32U);
  EXPECT_EQ(world_.manager().poll().size(), 1U);
}

TEST(Close, APoolWithPoisonedBlocksLeaksItsRegionRatherThanUnmapIt) {
  const std::uint64_t leaked_before = leaked_region_bytes();
  std::byte* slot = nullptr;
  {
    const auto device = std::make_shared<ScriptedDevice>();
    World world(device, {.config = without_reaper()});
    const auto transfer = world.offload({.blocks = {1}});
    slot = transfer->job()->guarded.data(0);
    device->lose();
    EXPECT_THROW(transfer->wait(10), DeviceLost);
    const CloseReport report = world.manager().close(1, {});
    EXPECT_TRUE(report.quiet);
    EXPECT_EQ(report.slots.poisoned, 1U);
  }
  EXPECT_GT(leaked_region_bytes(), leaked_before);
  *slot = std::byte{1};  // still mapped: the copy may still write it
}

TEST(Close, DoesNotTakeTheResultOfATransferThatEndsMeanwhile) {
  // While the close cancels the others, this one ends done: its blocks are the caller's.
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.needs_pinned_host = true});
  World world(device, {.config = without_reaper(), .pin = Pin::never});
  const Stream engine(device);
  const Stall stall(device, engine.handle());
  const auto ending = world.offload({.blocks = {1}});
  std::vector<std::shared_ptr<Transfer>> never;  // staged, so they wait in kvmem: cancelled at once
  for (BlockId block = 2; block < 20; ++block) {
    never.push_back(
        world.offload({.blocks = {block}, .after = world.after_stream(engine.handle())}));
  }
  device->before_each_look_at_the_clock([&] {
    const bool cancelling =
        std::ranges::any_of(never, [](const auto& each) { return each->job()->cancelled(); });
    if (!cancelling) return;
    device->before_each_look_at_the_clock({});
    device->run_all();
    static_cast<void>(world.runtime().advance());
  });
  EXPECT_FALSE(world.manager().close(0.001, {}).quiet);
  for (const auto& transfer : never) EXPECT_EQ(transfer->state(), TransferState::cancelled);
  ASSERT_EQ(ending->state(), TransferState::done);
  ASSERT_FALSE(ending->result()->released());
  EXPECT_TRUE(CacheMemory::holds(ending->result()->blocks(), 0, 1));
}

TEST_F(LifecycleTest, WhoSawALaterEndMayAskForAnEarlierResult) {
  // The later one is on a lane that is asked first. Between the two ends another thread, which saw
  // that one, asks for the result of the earlier one.
  const auto device = std::make_shared<ScriptedDevice>();
  World world(device, {.config = without_reaper()});
  const auto earlier = world.offload({.blocks = {1}});
  const auto later = world.offload({.blocks = {2}, .after = world.after_transfer(*earlier)});
  device->run_all();
  std::atomic<int> refused{0};
  std::atomic<bool> asked{false};
  std::thread asking;
  device->before_each_look_at_the_clock([&] {
    if (!later->done() || earlier->done() || asking.joinable()) return;
    asking = std::thread([&] {
      asked = true;
      try {
        static_cast<void>(earlier->result());
      } catch (const NotDone&) {
        ++refused;
      }
    });
    // Long enough to be refused, were it not to wait for its turn.
    static_cast<void>(comes_true([&] { return asked.load(); }));
    for (int i = 0; i < 1000 && refused == 0; ++i) std::this_thread::yield();
  });
  static_cast<void>(world.manager().poll());
  device->before_each_look_at_the_clock({});
  ASSERT_TRUE(asking.joinable()) << "the later end did not come first";
  asking.join();
  EXPECT_EQ(refused, 0);
}

// ---- without and with a reaper ----

TEST_F(LifecycleTest, WithoutAReaperWhatIsAcceptedIsSubmittedInsideTheCall) {
  World world(std::make_shared<ScriptedDevice>(),
              {.device_blocks = 200, .slots = 200, .config = without_reaper()});
  std::vector<BlockId> all(200);
  std::iota(all.begin(), all.end(), BlockId{0});
  const auto transfer = world.offload({.blocks = all});
  EXPECT_TRUE(transfer->job()->all_submitted());
  EXPECT_EQ(world.stats(Direction::to_host).waiting, 0U);
  static_cast<ScriptedDevice&>(world.device()).run_all();
  EXPECT_FALSE(transfer->done()) << "nobody has looked yet";
  static_cast<void>(world.manager().poll());
  EXPECT_TRUE(transfer->done());
}

TEST(Lifecycle, AReaperEndsTransfersWithoutAnybodysHelp) {
  World world(make_host_device({.workers = 1}), {.config = {}});
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (BlockId block = 0; block < 20; ++block)
    transfers.push_back(world.offload({.blocks = {block}}));
  for (const auto& transfer : transfers) {
    ASSERT_TRUE(comes_true([&] { return transfer->done(); }));
    EXPECT_EQ(transfer->state(), TransferState::done);
  }
}

TEST(Lifecycle, AReaperSubmitsWhatWaitsForTheWindow) {
  ManagerConfig config;
  config.window_bytes = smallest_window_bytes;
  World world(make_host_device({.workers = 1}),
              {.device_blocks = 128, .slots = 128, .config = config});
  std::vector<BlockId> all(100);
  std::iota(all.begin(), all.end(), BlockId{0});
  const auto transfer = world.offload({.blocks = all});
  EXPECT_TRUE(comes_true([&] { return transfer->done(); }));
  for (std::size_t i = 0; i < 100; ++i) {
    EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), i, i));
  }
}

TEST(Lifecycle, ManagersOfOneDeviceShareOneReaperAndCloseInAnyOrder) {
  const auto device = make_host_device({.workers = 1});
  const auto runtime = Runtime::make(device);
  const CacheMemory one(8), two(8);
  PoolOptions options;
  options.block_bytes = CacheMemory::block_bytes();
  options.capacity_bytes = 1 << 20;
  const auto pool = std::make_shared<BlockPool>(device, options);
  auto first = Manager::make(runtime, one.layout(), pool, {});
  auto second = Manager::make(runtime, two.layout(), pool, {});
  const auto offload = [](Manager& manager) {
    TransferRequest request;
    request.blocks = {1};
    Admission admission = manager.admit(TransferKind::offload, request, true);
    EXPECT_TRUE(admission.try_take());
    return manager.offload(request, std::move(admission));
  };
  const auto a = offload(*first);
  EXPECT_TRUE(first->close(10, {}).quiet);
  const auto b = offload(*second);
  EXPECT_TRUE(comes_true([&] { return b->done(); })) << "the other one's lease keeps the reaper";
  EXPECT_TRUE(second->close(10, {}).quiet);
  EXPECT_EQ(pool->stats().slots.held, 2U);
}

// ---- staged ----

// Public failure 59: pinning failed and there was no way to go on without.
// Public failure 164: an asynchronous copy blocked because its source was not pinned.
TEST(Staging, APoolThatIsNotPinnedGoesThroughPinnedPiecesBothWays) {
  const auto device = std::make_shared<ScriptedDevice>(
      ScriptedOptions{.needs_pinned_host = true, .runs_in_sleep = true});
  ManagerConfig config = without_reaper();
  config.staging_pieces = 2;
  config.staging_piece_bytes = 8192;
  World world(device, {.config = config, .pin = Pin::never});
  std::vector<BlockId> blocks{0, 3, 1, 7, 9, 11, 2};
  const auto offload = world.offload({.blocks = blocks});
  EXPECT_TRUE(offload->job()->staged());
  offload->wait(10);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_TRUE(
        CacheMemory::holds(offload->result()->blocks(), i, static_cast<std::uint64_t>(blocks[i])));
  }
  std::vector<BlockId> targets{20, 21, 22, 23, 24, 25, 26};
  world.restore({.blocks = targets}, *offload->result())->wait(10);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_TRUE(world.cache().holds(targets[i], static_cast<std::uint64_t>(blocks[i])));
  }
  EXPECT_EQ(device->unpinned_copies(), 0U);
  EXPECT_EQ(world.stats(Direction::to_host).bytes_staged, 7 * CacheMemory::block_bytes());
  EXPECT_TRUE(world.cache().padding_is_untouched());
}

TEST(Staging, APinnedPoolIsNotStaged) {
  const auto device = std::make_shared<ScriptedDevice>(
      ScriptedOptions{.needs_pinned_host = true, .runs_in_sleep = true});
  World world(device, {.config = without_reaper()});
  const auto copy = world.stored(1, 9);
  EXPECT_EQ(world.stats(Direction::to_host).bytes_staged, 0U);
  EXPECT_EQ(device->unpinned_copies(), 0U);
}

// ---- the timeline ----

class TimelineTest : public ::testing::Test {
 protected:
  static ManagerConfig measured() {
    ManagerConfig config = without_reaper();
    config.timeline = true;
    config.timeline_records = 8;
    return config;
  }
  World world_{still_device(), {.config = measured()}};
  Stream engine_{world_.device_ptr()};

  TimelineRecord record_of(const Transfer& transfer) {
    for (const TimelineRecord& record : world_.manager().timeline()) {
      if (record.id == transfer.job()->id) return record;
    }
    ADD_FAILURE() << "no record of the transfer";
    return {};
  }
};

TEST(Timeline, AMeasurementThatFailsFailsNoTransferAndNoWait) {
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
  ManagerConfig config = without_reaper();
  config.timeline = true;
  World world(device, {.config = config});
  const Stream engine(device);
  device->fail(CallKind::record, 1);  // before the copy
  const auto transfer = world.offload({.blocks = {1}});
  transfer->wait(10);
  device->fail(CallKind::record, 1);  // behind the wait
  transfer->wait_on(engine.handle(), std::nullopt);
  EXPECT_EQ(device->injected(), 2U);
  const auto records = world.manager().timeline();
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].state, TransferState::done);
  EXPECT_EQ(records[0].started, -1);
  EXPECT_EQ(records[0].first_use, -1);
}

TEST_F(TimelineTest, StagesComeInOrder) {
  const Nanoseconds before = world_.device().now();
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto offload =
      world_.offload({.blocks = {1, 2}, .after = world_.after_stream(engine_.handle())});
  const Nanoseconds opened = world_.device().now();
  stall.open();
  offload->wait(10);
  const TimelineRecord record = record_of(*offload);
  EXPECT_LE(before, record.requested);
  EXPECT_LE(record.requested, record.submitted);
  EXPECT_LE(record.submitted, opened);
  EXPECT_LE(opened, record.started) << "not before its stream was ready";
  EXPECT_LE(record.started, record.completed);
  EXPECT_LE(record.completed, record.observed);
  EXPECT_LE(record.observed, world_.device().now());
  EXPECT_EQ(record.first_use, -1);
  EXPECT_EQ(record.blocks, 2U);
  EXPECT_EQ(record.bytes, 2 * CacheMemory::block_bytes());
  EXPECT_EQ(record.state, TransferState::done);
}

TEST_F(TimelineTest, FirstUseIsBehindTheCopyAndOnlyTheFirstConsumerCounts) {
  const auto copy = world_.stored(9, 1);
  const Stream consumer(world_.device_ptr());
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto restore =
      world_.restore({.blocks = {1}, .after = world_.after_stream(engine_.handle())}, *copy);
  restore->wait_on(consumer.handle(), std::nullopt);
  stall.open();
  restore->wait(10);
  const Nanoseconds first_use = record_of(*restore).first_use;
  EXPECT_GE(first_use, record_of(*restore).completed);
  restore->wait_on(consumer.handle(), std::nullopt);
  EXPECT_EQ(record_of(*restore).first_use, first_use);
}

TEST_F(TimelineTest, AConsumerThatComesAfterTheEndIsCounted) {
  const auto offload = world_.offload({.blocks = {1}});
  offload->wait(10);
  EXPECT_EQ(record_of(*offload).first_use, -1);
  Stall stall(world_.device_ptr(), engine_.handle());
  offload->wait_on(engine_.handle(), std::nullopt);
  EXPECT_EQ(record_of(*offload).first_use, -1) << "its stream has not come there yet";
  stall.open();
  EXPECT_GE(record_of(*offload).first_use, record_of(*offload).observed);
}

TEST_F(TimelineTest, OneThatWasNeverSubmittedHasNoTimesButItsRequestAndItsEnd) {
  Stall stall(world_.device_ptr(), engine_.handle());
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (BlockId block = 0; block < 5; ++block) {
    transfers.push_back(
        world_.offload({.blocks = {block}, .after = world_.after_stream(engine_.handle())}));
  }
  ASSERT_EQ(transfers.back()->cancel(), CancelOutcome::not_submitted);
  const TimelineRecord record = record_of(*transfers.back());
  EXPECT_EQ(record.state, TransferState::cancelled);
  EXPECT_EQ(record.submitted, -1);
  EXPECT_EQ(record.started, -1);
  EXPECT_EQ(record.completed, -1);
  EXPECT_GE(record.observed, record.requested);
}

TEST_F(TimelineTest, TheLastRecordsAreKept) {
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 20; ++i) {
    const auto transfer = world_.offload({.blocks = {1}});
    transfer->wait(10);
    ids.push_back(transfer->job()->id);
  }
  std::vector<std::uint64_t> kept;
  for (const TimelineRecord& record : world_.manager().timeline()) kept.push_back(record.id);
  EXPECT_EQ(kept, std::vector(ids.end() - 8, ids.end()));
}

TEST_F(LifecycleTest, WithoutTheTimelineRequestSubmissionAndObservationAreKept) {
  const auto transfer = world_.offload({.blocks = {1}});
  transfer->wait(10);
  const auto records = world_.manager().timeline();
  ASSERT_EQ(records.size(), 1U);
  EXPECT_GE(records[0].requested, 0);
  EXPECT_GE(records[0].submitted, records[0].requested);
  EXPECT_GE(records[0].observed, records[0].submitted);
  EXPECT_EQ(records[0].started, -1);
  EXPECT_EQ(records[0].completed, -1);
  EXPECT_EQ(records[0].first_use, -1);
}

}  // namespace
}  // namespace kvmem::test
