// Who goes next, on which lane, how much at a time.
#include "copy/copy_queue.hpp"

#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "queue_bench.hpp"

namespace kvmem::test {
namespace {

// Public failure 167: submission itself blocked once about a thousand copies were on a stream.
TEST(CopyQueue, NeverHandsTheDeviceMoreThanTheWindow) {
  QueueBench bench;
  const auto job = bench.accept({.blocks = 100});
  std::size_t most = 0;
  while (!bench.is_finished(*job)) {
    bench.pump();
    most = std::max(most, bench.queue().in_flight().bytes);
    ASSERT_EQ(bench.queue().in_flight().descriptors * block_bytes, bench.queue().in_flight().bytes);
    ASSERT_TRUE(bench.device().run_one());
    bench.reap();
  }
  EXPECT_EQ(most, 8 * block_bytes);  // half of the window is lane 0's, and it was used
  EXPECT_EQ(bench.queue().in_flight().bytes, 0U);
  EXPECT_EQ(bench.queue().waiting(), 0U);
}

TEST(CopyQueue, AllLanesTogetherStayWithinTheWindow) {
  QueueBench bench;
  std::vector<std::unique_ptr<Stall>> stalls(CopyQueue::lanes - 1);
  for (auto& stall : stalls) bench.accept({.blocks = 100, .after = {bench.unreached(stall)}});
  bench.accept({.blocks = 100});
  bench.pump();
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, CopyQueue::lanes - 1);
  EXPECT_EQ(bench.queue().in_flight().bytes, 16 * block_bytes);
  for (auto& stall : stalls) stall->open();
  bench.run_out();
  EXPECT_EQ(bench.finished().size(), 5U);
}

// Else the thread that submits would wait in the driver, and with it what is ready.
TEST(CopyQueue, AStreamThatWaitsGetsNoMoreCopiesThanItsDeviceTakes) {
  QueueBench bench({.window = {1 << 20, 1000, false},
                    .device = {.moves_bytes = false, .most_waiting_copies = 6}});
  std::unique_ptr<Stall> stall;
  bench.accept({.blocks = 100, .after = {bench.unreached(stall)}});
  bench.pump();
  EXPECT_EQ(bench.queue().in_flight().descriptors, 6U);
  bench.accept({.blocks = 100});  // one that need not wait
  bench.pump();
  EXPECT_EQ(bench.queue().in_flight().descriptors, 106U);
  stall->open();
  bench.run_out();
  EXPECT_EQ(bench.finished().size(), 2U);
}

// Public failure 91: a buffer was sized by tokens and filled with blocks.
TEST(CopyQueue, TheWindowBoundsDescriptorsToo) {
  QueueBench bench({.window = {1 << 20, 8, false}});
  const auto job = bench.accept({.blocks = 100});
  bench.pump();
  EXPECT_EQ(bench.queue().in_flight().descriptors, 4U);  // lane 0's half
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*job));
}

// Public failure 91: a buffer was sized by tokens and filled with blocks.
TEST(CopyQueue, NoSubmissionExceedsTheDevicesDescriptors) {
  QueueBench bench({.device = {.moves_bytes = false, .max_descriptors = 2}});
  const auto job = bench.accept({.blocks = 9});
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*job));
  EXPECT_EQ(bench.submitted().size(), 5U);
}

TEST(CopyQueue, DemandOvertakesAllBackgroundThatIsNotSubmitted) {
  QueueBench bench;
  const auto first = bench.accept({.blocks = 100});
  const auto second = bench.accept({.blocks = 100});
  bench.pump();
  const std::size_t ahead = bench.submitted().size();
  std::size_t ahead_bytes = 0;
  for (const auto& slice : bench.submitted()) ahead_bytes += slice.bytes;
  EXPECT_LE(ahead_bytes, 16 * block_bytes);  // one window

  const auto demand = bench.accept({.blocks = 4, .priority = Priority::demand});
  while (bench.submitted_of(*demand).empty()) {
    ASSERT_TRUE(bench.device().run_one());
    bench.reap();
    bench.pump();
  }
  EXPECT_EQ(bench.submitted()[ahead].job, demand.get());
  bench.run_out();
  EXPECT_EQ(bench.finished(),
            (std::vector<const CopyJob*>{demand.get(), first.get(), second.get()}));
}

TEST(CopyQueue, RoomThatDemandWaitsForIsNotGivenToBackground) {
  QueueBench bench;
  bench.accept({.blocks = 8, .priority = Priority::demand});
  bench.pump();
  ASSERT_EQ(bench.queue().in_flight().bytes, 8 * block_bytes);
  const auto demand = bench.accept({.blocks = 8, .priority = Priority::demand});  // slices of 4
  const auto small = bench.accept({.blocks = 1});
  ASSERT_TRUE(bench.device().run_one());
  bench.reap();
  bench.pump();
  EXPECT_EQ(bench.submitted_of(*demand).size(), 1U);
  EXPECT_TRUE(bench.submitted_of(*small).empty());
  bench.run_out();
}

TEST(CopyQueue, BackgroundYieldsToReadyDemandInWhateverLane) {
  QueueBench bench;
  std::unique_ptr<Stall> stall;
  const auto demand =
      bench.accept({.blocks = 20, .priority = Priority::demand, .after = {bench.unreached(stall)}});
  bench.pump();
  stall->open();  // ready now, in a lane of its own that is full
  const auto background = bench.accept({});
  bench.pump();
  EXPECT_FALSE(background->begun());
  while (!demand->all_submitted()) {
    EXPECT_FALSE(background->begun());
    ASSERT_TRUE(bench.device().run_one());
    bench.reap();
    bench.pump();
  }
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*background));
}

TEST(CopyQueue, AReadyJobWithoutRoomInItsOwnLaneHoldsNoneOfItsClassBackInLane0) {
  QueueBench bench;
  std::unique_ptr<Stall> stall;
  const auto first = bench.accept({.blocks = 20, .after = {bench.unreached(stall)}});
  bench.pump();
  stall->open();  // ready now, in a lane of its own that is full
  const auto second = bench.accept({});
  bench.pump();
  EXPECT_FALSE(first->all_submitted());
  EXPECT_TRUE(second->begun());
  bench.run_out();
}

TEST(CopyQueue, NoDescriptorIsLargerThanASliceOfAnyLane) {
  QueueBench bench;
  EXPECT_EQ(bench.queue().descriptor_bytes(), block_bytes) << "half of what such a lane has";
}

TEST(CopyQueue, RoomThatAJobWaitsForIsNotGivenToSmallerOnesBehindIt) {
  QueueBench bench;
  bench.accept({.blocks = 1});
  bench.accept({.blocks = 8});
  bench.pump();  // slices of 1 and 4 blocks; the next of 4 has to wait
  ASSERT_EQ(bench.queue().in_flight().bytes, 5 * block_bytes);
  const auto small = bench.accept({.blocks = 1});
  bench.pump();
  EXPECT_FALSE(small->begun());
  ASSERT_TRUE(bench.device().run_one());
  bench.reap();
  bench.pump();
  EXPECT_EQ(bench.queue().in_flight().bytes, 8 * block_bytes);
  EXPECT_FALSE(small->begun());
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*small));
}

TEST(CopyQueue, JobsOfOneClassGoInTheOrderOfTheirAcceptance) {
  QueueBench bench;
  std::vector<const CopyJob*> expected;
  for (int i = 0; i < 10; ++i) expected.push_back(bench.accept({.blocks = 3}).get());
  bench.run_out();
  EXPECT_EQ(bench.finished(), expected);
}

TEST(CopyQueue, SlicesOfOneJobStayInOneLaneInStageOrder) {
  for (const bool ready : {true, false}) {
    QueueBench bench({.direction = Direction::to_device});
    std::unique_ptr<Stall> stall;
    CopyJob::Events after;
    if (!ready) after.push_back(bench.unreached(stall));
    const auto job = bench.accept({.blocks = 40, .after = after, .stages = 4});
    const auto other = bench.accept({.blocks = 40, .stages = 4});
    bench.pump();
    if (stall) stall->open();
    bench.run_out();
    ASSERT_TRUE(bench.is_finished(*job));
    std::size_t next = 0;
    std::set<StreamHandle> lanes;
    const auto stages = job->batch().stage_ends();
    for (const auto& slice : bench.submitted_of(*job)) {
      EXPECT_EQ(slice.begin, next);
      next = slice.end;
      lanes.insert(slice.lane);
      EXPECT_EQ(std::ranges::upper_bound(stages, slice.begin),
                std::ranges::lower_bound(stages, slice.end))
          << "a slice spans two stages";
    }
    EXPECT_EQ(next, job->batch().count());
    EXPECT_EQ(lanes.size(), 1U);
    EXPECT_EQ(*lanes.begin() == bench.lanes().front(), ready);
    EXPECT_TRUE(bench.is_finished(*other));
  }
}

TEST(CopyQueue, AStagesEventIsTheOneBehindItsLastSlice) {
  QueueBench bench({.direction = Direction::to_device});
  const auto job = bench.accept({.blocks = 16, .stages = 2});  // 8 KiB a stage: two slices each
  EXPECT_FALSE(CopyQueue::stage_point(*job, 0).submitted);
  bench.pump();  // lane 0 holds 8 KiB
  const auto first = CopyQueue::stage_point(*job, 0);
  ASSERT_TRUE(first.submitted);
  EXPECT_EQ(first.event, bench.slice(1).event);
  EXPECT_FALSE(CopyQueue::stage_point(*job, 1).submitted);
  bench.device().run_one();
  EXPECT_EQ(first.event->query(), EventState::pending);
  bench.device().run_one();
  EXPECT_EQ(first.event->query(), EventState::done);
  bench.run_out();
  EXPECT_TRUE(CopyQueue::stage_point(*job, 1).submitted);
  EXPECT_EQ(CopyQueue::stage_point(*job, 1).event, nullptr)
      << "of a finished job nothing is awaited";
}

TEST(CopyQueue, SourcesOfOffloadsAreReadInStreamOrderThoseOfRestoresAtAnyTime) {
  for (const Direction direction : {Direction::to_host, Direction::to_device}) {
    QueueBench bench({.direction = direction});
    bench.accept({.blocks = 3});
    bench.run_out();
    for (const Call& call : bench.device().calls(CallKind::copy)) {
      EXPECT_EQ(call.access,
                direction == Direction::to_host ? SourceAccess::stream_order : SourceAccess::any);
    }
  }
}

// ---- readiness ----

TEST(CopyQueue, ReadyJobNeverStandsBehindAnUnreadyOne) {
  QueueBench bench;
  std::unique_ptr<Stall> stall;
  const auto unready =
      bench.accept({.blocks = 4, .priority = Priority::demand, .after = {bench.unreached(stall)}});
  const auto demand = bench.accept({.blocks = 4, .priority = Priority::demand});
  const auto background = bench.accept({.blocks = 4});
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*demand));
  EXPECT_TRUE(bench.is_finished(*background));
  EXPECT_FALSE(bench.is_finished(*unready));
  EXPECT_TRUE(unready->begun()) << "it waits on the device, in a lane of its own";
  EXPECT_NE(bench.submitted_of(*unready).front().lane, bench.lanes().front());
  EXPECT_EQ(bench.submitted_of(*demand).front().lane, bench.lanes().front());
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, 1U);
  stall->open();
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*unready));
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, 0U);
}

TEST(CopyQueue, MoreUnreadyJobsThanLanesWaitHereAndDelayNoReadyOne) {
  QueueBench bench;
  constexpr std::size_t many = 10;
  std::vector<std::unique_ptr<Stall>> stalls(many);
  std::vector<std::shared_ptr<CopyJob>> unready;
  for (std::size_t i = 0; i < many; ++i) {
    const Priority priority = i % 2 == 0 ? Priority::demand : Priority::background;
    unready.push_back(
        bench.accept({.blocks = 4, .priority = priority, .after = {bench.unreached(stalls[i])}}));
  }
  const auto demand = bench.accept({.blocks = 20, .priority = Priority::demand});
  const auto background = bench.accept({.blocks = 20});
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*demand));
  EXPECT_TRUE(bench.is_finished(*background));
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, CopyQueue::lanes - 1);
  EXPECT_EQ(std::ranges::count_if(unready, [](const auto& job) { return job->begun(); }), 4);
  EXPECT_EQ(bench.queue().waiting(), many) << "none is wholly submitted: each has two slices";
  for (auto& stall : stalls) stall->open();
  bench.run_out();
  EXPECT_EQ(bench.finished().size(), many + 2);
  EXPECT_EQ(bench.lanes().size(), CopyQueue::lanes);
}

TEST(CopyQueue, AnUnreadyJobThatBecomesReadyWhileItWaitsNeedsNoLaneOfItsOwn) {
  QueueBench bench;
  std::vector<std::unique_ptr<Stall>> stalls(CopyQueue::lanes);
  std::shared_ptr<CopyJob> last;
  for (auto& stall : stalls) last = bench.accept({.after = {bench.unreached(stall)}});
  bench.pump();
  EXPECT_FALSE(last->begun());
  stalls.back()->open();
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*last));
  EXPECT_EQ(bench.submitted_of(*last).front().lane, bench.lanes().front());
}

TEST(CopyQueue, AnUnreadyJobRunsOnTheDeviceOnlyWhenAllOfItsEventsAreReached) {
  QueueBench bench;
  std::unique_ptr<Stall> first, second;
  const auto job = bench.accept({.after = {bench.unreached(first), bench.unreached(second)}});
  bench.pump();
  EXPECT_FALSE(bench.device().run_one());
  second->open();
  EXPECT_FALSE(bench.device().run_one());
  first->open();
  EXPECT_TRUE(bench.device().run_one());
  bench.reap();
  EXPECT_TRUE(bench.is_finished(*job));
}

TEST(CopyQueue, AJobBehindAnotherIsOrderedBehindItsLastSliceOnTheDevice) {
  QueueBench bench;
  const auto first = bench.accept({.blocks = 8});  // two slices, one window of lane 0
  const auto second = bench.accept({.priority = Priority::demand, .behind = {first}});
  bench.pump();
  ASSERT_EQ(bench.submitted().size(), 3U);
  const auto waits = bench.device().calls(CallKind::wait);
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_EQ(waits[0].event, bench.slice(1).event->handle());
  EXPECT_EQ(waits[0].stream, bench.submitted_of(*second).front().lane);
  const StreamHandle lane = bench.submitted_of(*second).front().lane;
  bench.device().run_one();
  EXPECT_FALSE(bench.device().run(lane));
  bench.device().run_one();
  EXPECT_TRUE(bench.device().run(lane));
}

TEST(CopyQueue, AJobWaitsHereUntilThoseBeforeItAreWhollySubmitted) {
  QueueBench bench;
  const auto first = bench.accept({.blocks = 100});
  const auto second = bench.accept({.priority = Priority::demand, .behind = {first}});
  bench.pump();
  EXPECT_FALSE(second->begun());
  while (!first->all_submitted()) {
    EXPECT_FALSE(second->begun());
    ASSERT_TRUE(bench.device().run_one());
    bench.reap();
    bench.pump();
  }
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*second));
  EXPECT_EQ(bench.finished().front(), first.get());
}

TEST(CopyQueue, AJobBehindAFinishedOneIsReady) {
  QueueBench bench;
  const auto first = bench.accept({});
  bench.run_out();
  const auto second = bench.accept({.behind = {first}});
  bench.pump();
  EXPECT_EQ(bench.submitted_of(*second).front().lane, bench.lanes().front());
  EXPECT_TRUE(bench.device().calls(CallKind::wait).empty());
}

TEST(CopyQueue, AJobBehindAFailedOneIsOrderedBehindItsGuard) {
  QueueBench bench;
  bench.device().fail(CallKind::copy, 1, Failure::in_flight);
  const auto first = bench.accept({});
  const auto second = bench.accept({.behind = {first}});
  bench.pump();
  ASSERT_TRUE(CopyQueue::error(*first));
  ASSERT_TRUE(second->begun());
  const StreamHandle lane = bench.submitted_of(*second).front().lane;
  EXPECT_FALSE(bench.device().run(lane)) << "the failed copy may still run";
  bench.device().run_one();
  EXPECT_TRUE(bench.device().run(lane));
}

TEST(CopyQueue, AJobBehindAnUnguardedOneWaitsUntilItsEndWasObserved) {
  QueueBench bench;
  bench.device().fail(CallKind::record, 1);  // behind the slice
  bench.device().fail(CallKind::record, 2);  // and the second try
  const auto first = bench.accept({});
  const auto second = bench.accept({.behind = {first}});
  bench.pump();
  ASSERT_EQ(bench.in_flight(), 1U);
  ASSERT_FALSE(bench.slice(0).event->recorded());
  EXPECT_TRUE(first->all_submitted());
  bench.device().run_all();
  bench.pump();
  EXPECT_FALSE(second->begun()) << "nothing on the device tells the end of the first";
  bench.end(0);
  bench.pump();
  EXPECT_TRUE(second->begun());
}

TEST(CopyQueue, AUrgentUnreadyJobOpensAFurtherLaneUpToTheLimit) {
  QueueBench bench;
  constexpr std::size_t many = CopyQueue::most_lanes + 3;
  std::vector<std::unique_ptr<Stall>> stalls(many);
  std::vector<std::shared_ptr<CopyJob>> jobs;
  for (auto& stall : stalls) {
    jobs.push_back(bench.accept({.after = {bench.unreached(stall)}}));
    CopyQueue::hurry(*jobs.back());
  }
  const auto ready = bench.accept({});
  bench.run_out();
  EXPECT_EQ(bench.lanes().size(), CopyQueue::most_lanes);
  EXPECT_EQ(std::ranges::count_if(jobs, [](const auto& job) { return job->begun(); }),
            static_cast<std::ptrdiff_t>(CopyQueue::most_lanes - 1));
  EXPECT_TRUE(bench.is_finished(*ready));
  for (auto& stall : stalls) stall->open();
  bench.run_out();
  EXPECT_EQ(bench.finished().size(), many + 1);
}

TEST(CopyQueue, ALaneThatCannotBeOpenedDelaysNoReadyJob) {
  QueueBench bench;
  std::vector<std::unique_ptr<Stall>> stalls(CopyQueue::lanes);
  std::shared_ptr<CopyJob> urgent;
  for (auto& stall : stalls) {
    urgent = bench.accept({.priority = Priority::demand, .after = {bench.unreached(stall)}});
  }
  CopyQueue::hurry(*urgent);
  bench.device().heal();
  bench.device().fail_always(CallKind::create_stream);
  const auto demand = bench.accept({.priority = Priority::demand});
  const auto background = bench.accept({});
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*demand));
  EXPECT_TRUE(bench.is_finished(*background));
  EXPECT_FALSE(urgent->begun());
  bench.device().heal();
  bench.pump();
  EXPECT_TRUE(urgent->begun()) << "a later call tries again";
  for (auto& stall : stalls) stall->open();
  bench.run_out();
}

// ---- urgency ----

TEST(CopyQueue, NoWindowHoldsBackAnUrgentJob) {
  QueueBench bench;
  const auto before = bench.accept({.blocks = 8});
  bench.pump();
  const auto demand = bench.accept({.blocks = 100, .priority = Priority::demand});
  const auto urgent = bench.accept({.blocks = 20});
  bench.pump();
  EXPECT_FALSE(urgent->begun());
  CopyQueue::hurry(*urgent);
  bench.pump();
  EXPECT_TRUE(urgent->all_submitted());
  EXPECT_FALSE(demand->begun()) << "the room it waits for is still its own";
  EXPECT_EQ(bench.queue().in_flight().bytes, 28 * block_bytes);
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*before));
  EXPECT_TRUE(bench.is_finished(*demand));
}

TEST(CopyQueue, UrgencyReachesThoseThatTheJobRunsBehind) {
  QueueBench bench;
  const auto deepest = bench.accept({.blocks = 100});
  const auto middle = bench.accept({.blocks = 100, .behind = {deepest}});
  const auto urgent = bench.accept({.blocks = 1, .behind = {middle}});
  bench.pump();
  EXPECT_FALSE(middle->begun());
  CopyQueue::hurry(*urgent);
  bench.pump();
  EXPECT_TRUE(deepest->all_submitted());
  EXPECT_TRUE(middle->all_submitted());
  EXPECT_TRUE(urgent->all_submitted());
}

TEST(CopyQueue, AnEagerQueueSubmitsAllThatCanGo) {
  QueueBench bench({.window = {16 * block_bytes, 4, true}});
  std::vector<std::shared_ptr<CopyJob>> jobs;
  for (int i = 0; i < 5; ++i) jobs.push_back(bench.accept({.blocks = 50}));
  bench.pump();
  for (const auto& job : jobs) EXPECT_TRUE(job->all_submitted());
  EXPECT_EQ(bench.queue().in_flight().bytes, 250 * block_bytes);
}

}  // namespace
}  // namespace kvmem::test
