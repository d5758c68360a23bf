// Everything that can grow has a bound: slots, queue bytes, report places. And who is served next.
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/offload_world.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t block_bytes() { return 1500 + 700 + 2048; }

class BoundsTest : public ::testing::Test {
 protected:
  static ManagerConfig small() {
    ManagerConfig config = without_reaper();
    config.max_queued_bytes = 3 * block_bytes();
    config.max_reports = 4;
    return config;
  }

  TransferRequest request(std::vector<BlockId> blocks, std::optional<Tag> tag = std::nullopt) {
    TransferRequest made;
    made.blocks = std::move(blocks);
    made.after = world_.after_stream(engine_.handle());
    made.tag = std::move(tag);
    return made;
  }
  Admission admission(std::vector<BlockId> blocks, std::optional<Tag> tag = std::nullopt) {
    return world_.manager().admit(TransferKind::offload, request(std::move(blocks), std::move(tag)),
                                  true);
  }

  World world_{still_device(), {.slots = 8, .config = small()}};
  Stream engine_{world_.device_ptr()};
};

// Public failure 57: stores that waited for a slow sink piled up without a limit.
// Public failure 150: nothing but the GIL held a producer back.
TEST_F(BoundsTest, QueueBytesBoundWhatIsAcceptedUntilItEnds) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const After after = world_.after_stream(engine_.handle());
  ASSERT_TRUE(world_.try_offload({.blocks = {0, 1}, .after = after}));
  EXPECT_FALSE(world_.try_offload({.blocks = {2, 3}, .after = after}));
  EXPECT_EQ(world_.slots().free, 6U) << "a refusal keeps no slots";
  ASSERT_TRUE(world_.try_offload({.blocks = {2}, .after = after}));
  EXPECT_FALSE(world_.try_offload({.blocks = {3}, .after = after}));
  EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 3 * block_bytes());
  stall.open();
  EXPECT_TRUE(world_.manager().drain(10, {}));
  EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 0U);
  EXPECT_TRUE(world_.try_offload({.blocks = {3, 4, 5}}));
}

TEST(Bounds, TransfersAreCountedUntilTheyEndWhateverTheirSize) {
  ManagerConfig config = without_reaper();
  config.max_transfers = 2;
  World world(still_device(), {.config = config});
  const Stream engine(world.device_ptr());
  Stall stall(world.device_ptr(), engine.handle());
  const After after = world.after_stream(engine.handle());
  ASSERT_TRUE(world.try_offload({.blocks = {0}, .after = after}));
  ASSERT_TRUE(world.try_offload({.blocks = {1}, .after = after}));
  EXPECT_FALSE(world.try_offload({.blocks = {2}, .after = after}));
  EXPECT_EQ(world.stats(Direction::to_host).queued_bytes, 2 * block_bytes());
  stall.open();
  EXPECT_TRUE(world.manager().drain(10, {}));
  EXPECT_TRUE(world.try_offload({.blocks = {2}}));
}

TEST(Bounds, ACancelledTransferGivesBackWhatItTook) {
  ManagerConfig config = without_reaper();
  config.max_transfers = CopyQueue::lanes;  // one more than can be submitted behind a stall
  World world(still_device(), {.config = config});
  const Stream engine(world.device_ptr());
  Stall stall(world.device_ptr(), engine.handle());
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (BlockId block = 0; block < static_cast<BlockId>(CopyQueue::lanes); ++block) {
    transfers.push_back(
        world.offload({.blocks = {block}, .after = world.after_stream(engine.handle())}));
  }
  EXPECT_EQ(transfers.back()->cancel(), CancelOutcome::not_submitted);
  transfers.pop_back();
  EXPECT_EQ(world.stats(Direction::to_host).queued_bytes, transfers.size() * block_bytes());
  for (const auto& transfer : transfers) EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  EXPECT_EQ(world.stats(Direction::to_host).queued_bytes, transfers.size() * block_bytes());
  stall.open();
  EXPECT_TRUE(world.manager().drain(10, {}));
  EXPECT_EQ(world.stats(Direction::to_host).queued_bytes, 0U);
  for (BlockId block = 0; block < static_cast<BlockId>(CopyQueue::lanes); ++block) {
    EXPECT_TRUE(world.try_offload({.blocks = {block}})) << "its place was given back as well";
  }
}

TEST_F(BoundsTest, EachDirectionHasQueueBytesOfItsOwn) {
  const auto copy = world_.stored(9, 1);
  Stall stall(world_.device_ptr(), engine_.handle());
  const After after = world_.after_stream(engine_.handle());
  ASSERT_TRUE(world_.try_offload({.blocks = {0, 1, 2}, .after = after}));
  EXPECT_TRUE(world_.try_restore({.blocks = {5}, .after = after}, *copy));
}

TEST_F(BoundsTest, WhatCanNeverBeAcceptedIsRefusedAtOnceWithTheNumbers) {
  try {
    static_cast<void>(admission({0, 1, 2, 3}));
    FAIL();
  } catch (const CapacityError& error) {
    EXPECT_EQ(error.shortage.bound, "max_queued_bytes");
    EXPECT_EQ(error.shortage.wanted, 4 * block_bytes());
    EXPECT_EQ(error.shortage.largest, 3 * block_bytes());
  }
}

TEST(Bounds, MoreSlotsThanThePoolCanEverGiveAreRefusedAtOnce) {
  World world(still_device(), {.slots = 2, .config = without_reaper()});
  TransferRequest request;
  request.blocks = {0, 1, 2};
  EXPECT_THROW(static_cast<void>(world.manager().admit(TransferKind::offload, request, true)),
               CapacityError);
}

// What slots wait for may never come: nothing that copies free is to be kept meanwhile.
TEST_F(BoundsTest, WhoWaitsForSlotsHoldsNothingElse) {
  const auto all = world_.pool().try_acquire(8);
  Admission waiting = admission({0}, Tag(std::int64_t{1}));
  EXPECT_FALSE(waiting.granted());
  EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 0U);
  EXPECT_EQ(world_.manager().stats().reports_taken, 0U);
}

TEST_F(BoundsTest, ABoundOfAClosedManagerTakesNoMoreWaiters) {
  const auto copy = world_.stored(0, 1);
  TransferRequest request;
  request.blocks = {1};
  Admission late = world_.manager().admit(TransferKind::restore, request, false);
  static_cast<void>(world_.manager().close(10, {}));
  EXPECT_THROW(static_cast<void>(late.granted()), Closed);
}

TEST_F(BoundsTest, ReportPlacesAreTakenFromAcceptanceUntilTheReportIsPolled) {
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(world_.try_offload({.blocks = {1}, .tag = i}));
    ASSERT_TRUE(world_.manager().drain(10, {}));
  }
  EXPECT_EQ(world_.manager().stats().reports_waiting, 4U);
  EXPECT_EQ(world_.manager().stats().reports_taken, 4U);
  EXPECT_FALSE(world_.try_offload({.blocks = {1}, .tag = 5}));
  EXPECT_TRUE(world_.try_offload({.blocks = {1}})) << "without a tag no place is needed";
  const auto reports = world_.manager().poll();
  EXPECT_EQ(reports.size(), 4U);
  EXPECT_EQ(world_.manager().stats().reports_taken, 0U);
  EXPECT_TRUE(world_.try_offload({.blocks = {1}, .tag = 5}));
}

TEST_F(BoundsTest, PollListsEachTaggedTransferOnceAlsoWhenItsHandleWasDropped) {
  const auto copy = world_.stored(9, 1);
  Stall stall(world_.device_ptr(), engine_.handle());
  const After after = world_.after_stream(engine_.handle());
  world_.offload({.blocks = {1}, .after = after, .tag = "dropped"});
  const auto kept = world_.restore({.blocks = {2}, .after = after, .tag = 7}, *copy);
  const auto untagged = world_.offload({.blocks = {3}, .after = after});
  EXPECT_TRUE(world_.manager().poll().empty());
  stall.open();
  EXPECT_TRUE(world_.manager().drain(10, {}));
  auto reports = world_.manager().poll();
  ASSERT_EQ(reports.size(), 2U);
  std::ranges::sort(reports, {}, &Report::id);
  EXPECT_EQ(reports[0].tag, Tag{"dropped"});
  EXPECT_EQ(reports[0].kind, TransferKind::offload);
  EXPECT_EQ(reports[0].state, TransferState::done);
  EXPECT_EQ(reports[0].error, "");
  EXPECT_EQ(reports[1].tag, Tag{7});
  EXPECT_EQ(reports[1].kind, TransferKind::restore);
  EXPECT_EQ(reports[1].id, kept->job()->id);
  EXPECT_TRUE(world_.manager().poll().empty());
  EXPECT_EQ(world_.slots().held, 2U) << "the dropped one's blocks went home: a report holds none";
}

// Public failure 51: requests took memory for all that was queued and were stuck.
TEST_F(BoundsTest, AWaiterIsServedBeforeThoseWhoCameLater) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto running =
      world_.offload({.blocks = {0, 1}, .after = world_.after_stream(engine_.handle())});
  Admission large = admission({2, 3});
  EXPECT_FALSE(large.granted());
  EXPECT_EQ(world_.manager().stats().waiters, 1U);
  Admission small = admission({4});
  EXPECT_FALSE(small.try_take()) << "there is room for one block, and it is not its turn";
  EXPECT_FALSE(small.granted());
  EXPECT_FALSE(world_.try_offload({.blocks = {5}}));
  stall.open();
  running->wait(10);
  EXPECT_TRUE(large.granted());
  EXPECT_TRUE(small.granted());
  const auto transfer = world_.manager().offload(request({2, 3}), std::move(large));
  transfer->wait(10);
}

TEST_F(BoundsTest, AWaiterThatGivesUpLetsTheNextOneIn) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto running =
      world_.offload({.blocks = {0, 1}, .after = world_.after_stream(engine_.handle())});
  Admission small = admission({4});
  {
    Admission large = admission({2, 3});
    EXPECT_FALSE(large.granted());
    EXPECT_FALSE(small.granted());
  }
  EXPECT_TRUE(small.granted());
  EXPECT_EQ(world_.manager().stats().waiters, 0U);
}

TEST(Bounds, EachOfThemCountsItsWaitersAndTellsThemOfTheClose) {
  ManagerConfig bytes = without_reaper(), transfers = bytes, reports = bytes;
  bytes.max_queued_bytes = block_bytes();
  transfers.max_transfers = 1;
  reports.max_reports = 1;
  for (const ManagerConfig& config : {bytes, transfers, reports}) {
    World world(still_device(), {.config = config});
    const Stream engine(world.device_ptr());
    Stall stall(world.device_ptr(), engine.handle());
    const auto first = world.offload(
        {.blocks = {0}, .after = world.after_stream(engine.handle()), .tag = Tag(std::int64_t{1})});
    TransferRequest request;
    request.blocks = {1};
    request.tag = Tag(std::int64_t{2});
    Admission waiting = world.manager().admit(TransferKind::offload, request, true);
    const auto list = std::make_shared<WakeList>();
    ASSERT_FALSE(waiting.granted(list, 7));
    EXPECT_EQ(world.manager().stats().waiters, 1U);
    static_cast<void>(list->drain());  // it has its slots
    static_cast<void>(world.manager().close(0, {}));
    EXPECT_FALSE(list->drain().empty());
    EXPECT_THROW(static_cast<void>(waiting.granted(list, 7)), Closed);
    stall.open();
  }
}

TEST_F(BoundsTest, AnAdmissionThatIsDroppedGivesEverythingBack) {
  {
    Admission taken = admission({0, 1}, 3);
    ASSERT_TRUE(taken.try_take());
    EXPECT_EQ(world_.slots().held, 2U);
    EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 2 * block_bytes());
    EXPECT_EQ(world_.manager().stats().reports_taken, 1U);
  }
  EXPECT_EQ(world_.slots().free, 8U);
  EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 0U);
  EXPECT_EQ(world_.manager().stats().reports_taken, 0U);
}

// Public failure 51: requests took memory for all that was queued and were stuck.
TEST_F(BoundsTest, ATryThatFailsAtOneBoundKeepsNothingOfTheOthers) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto running =
      world_.offload({.blocks = {0, 1}, .after = world_.after_stream(engine_.handle())});
  Admission large = admission({2, 3}, 3);
  EXPECT_FALSE(large.try_take());
  EXPECT_EQ(world_.slots().free, 6U);
  EXPECT_EQ(world_.manager().stats().reports_taken, 0U);
  EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 2 * block_bytes());
  stall.open();
  running->wait(10);
  EXPECT_TRUE(large.try_take());
  EXPECT_EQ(world_.slots().held, 4U);
}

TEST_F(BoundsTest, AWaitForAdmissionTimesOutWithWhatIsMissing) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto running =
      world_.offload({.blocks = {0, 1, 2}, .after = world_.after_stream(engine_.handle())});
  Admission bytes = admission({3});
  EXPECT_FALSE(world_.manager().wait_for(bytes, 0.001, {}));
  try {
    bytes.throw_timed_out();
  } catch (const TimedOut& error) {
    EXPECT_EQ(error.shortage.bound, "max_queued_bytes");
    EXPECT_EQ(error.shortage.wanted, block_bytes());
    EXPECT_EQ(error.shortage.free, 0U);
  }
  const auto all = world_.pool().try_acquire(world_.slots().free - 1);  // `bytes` holds one already
  Admission slots = admission({3, 4});
  EXPECT_FALSE(world_.manager().wait_for(slots, 0.001, {}));
  EXPECT_THROW(slots.throw_timed_out(), PoolExhausted);
}

TEST_F(BoundsTest, AWaitForAdmissionEndsWhenWhatItWaitsForEnds) {
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto running =
      world_.offload({.blocks = {0, 1, 2}, .after = world_.after_stream(engine_.handle())});
  Admission next = admission({3});
  EXPECT_FALSE(next.granted());
  stall.open();
  EXPECT_TRUE(world_.manager().wait_for(next, 10, {}));  // its own wait copies and reaps
  world_.manager().offload(request({3}), std::move(next))->wait(10);
}

TEST_F(BoundsTest, WhatServesAWaiterMovesTheDevicesProgress) {
  std::optional<Admission> taken(admission({0, 1, 2}));
  ASSERT_TRUE(taken->try_take());
  Admission waiting = admission({3});
  EXPECT_FALSE(waiting.granted());
  const std::uint64_t seen = world_.device().progress().value();
  taken.reset();
  EXPECT_NE(world_.device().progress().value(), seen) << "or who waits sleeps on";
  EXPECT_TRUE(waiting.granted());
}

TEST_F(BoundsTest, ABusyRefusalGivesTheAdmissionBack) {
  const auto copy = world_.stored(9, 1);
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto writer =
      world_.restore({.blocks = {5}, .after = world_.after_stream(engine_.handle())}, *copy);
  EXPECT_THROW(static_cast<void>(world_.try_offload({.blocks = {5}, .tag = 1})), Busy);
  EXPECT_EQ(world_.slots().held, 1U);
  EXPECT_EQ(world_.stats(Direction::to_host).queued_bytes, 0U);
  EXPECT_EQ(world_.manager().stats().reports_taken, 0U);
}

TEST(ManagerConfig, BoundsOutOfRangeAreRefusedByName) {
  const auto device = still_device();
  const auto refusal = [&](auto&& change) -> std::string {
    ManagerConfig config = without_reaper();
    change(config);
    try {
      const World world(device, {.config = config});
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_EQ(refusal([](ManagerConfig&) {}), "");
  EXPECT_NE(
      refusal([](auto& c) { c.max_queued_bytes = block_bytes() - 1; }).find("max_queued_bytes"),
      std::string::npos);
  EXPECT_NE(
      refusal([](auto& c) { c.window_bytes = smallest_window_bytes - 1; }).find("window_bytes"),
      std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.window_descriptors = 0; }).find("window_descriptors"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.max_reports = 0; }).find("max_reports"), std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.staging_pieces = 0; }).find("staging_pieces"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.staging_piece_bytes = 4095; }).find("staging_piece_bytes"),
            std::string::npos);
}

// A close may come between two looks of who begins to wait.
TEST(Bounds, WhoBeginsToWatchAClosedBoundHearsOfItAtOnce) {
  Progress progress;
  Bound bound("bound", 1, progress);
  bound.close();
  EXPECT_THROW(bound.watch(std::make_shared<WakeList>(), 7), Closed);
}

TEST(Manager, RefusesALayoutOrAPoolThatDoesNotFit) {
  const auto device = still_device();
  World world(device, {.config = without_reaper()});
  const CacheMemory memory(32);
  const auto runtime = world.manager().runtime();
  EXPECT_THROW(static_cast<void>(Manager::make(runtime, memory.layout("cuda:0"), world.pool_ptr(),
                                               without_reaper())),
               InvalidArgument);
  World other(still_device(), {.config = without_reaper()});
  EXPECT_THROW(static_cast<void>(
                   Manager::make(runtime, memory.layout(), other.pool_ptr(), without_reaper())),
               InvalidArgument);
  PoolOptions options;
  options.block_bytes = CacheMemory::block_bytes() + 1;
  options.capacity_bytes = 1 << 20;
  EXPECT_THROW(static_cast<void>(Manager::make(runtime, memory.layout(),
                                               std::make_shared<BlockPool>(device, options),
                                               without_reaper())),
               InvalidArgument);
}

}  // namespace
}  // namespace kvmem::test
