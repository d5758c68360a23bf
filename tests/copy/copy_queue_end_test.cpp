// How jobs end: drops, errors at each device call, a lost device, staging.
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "queue_bench.hpp"

namespace kvmem::test {
namespace {

TEST(CopyQueue, ADropBeforeAnythingWasSubmittedFinishesTheJobAtOnce) {
  QueueBench bench;
  std::vector<std::unique_ptr<Stall>> stalls(CopyQueue::lanes);
  std::shared_ptr<CopyJob> waiting;
  for (auto& stall : stalls) waiting = bench.accept({.after = {bench.unreached(stall)}});
  bench.pump();
  EXPECT_EQ(bench.queue().drop(*waiting), CopyQueue::Dropped::finished);
  EXPECT_TRUE(waiting->cancelled());
  EXPECT_EQ(bench.queue().drop(*waiting), CopyQueue::Dropped::too_late);
  for (auto& stall : stalls) stall->open();
  bench.run_out();
  EXPECT_TRUE(bench.submitted_of(*waiting).empty());
  EXPECT_FALSE(bench.is_finished(*waiting)) << "it was finished by the drop";
  EXPECT_EQ(bench.queue().waiting(), 0U);
  EXPECT_EQ(bench.finished().size(), CopyQueue::lanes - 1);
}

TEST(CopyQueue, ADropBetweenSlicesSubmitsNoMoreAndEndsWithTheLastSlice) {
  QueueBench bench;
  const auto job = bench.accept({.blocks = 100});
  bench.pump();
  ASSERT_EQ(bench.in_flight(), 2U);
  EXPECT_EQ(bench.queue().drop(*job), CopyQueue::Dropped::draining);
  EXPECT_EQ(bench.queue().drop(*job), CopyQueue::Dropped::draining);
  EXPECT_TRUE(job->all_submitted());
  bench.device().run_one();
  bench.reap();
  EXPECT_FALSE(bench.is_finished(*job));
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*job));
  EXPECT_EQ(bench.submitted().size(), 2U);
  EXPECT_EQ(bench.queue().drop(*job), CopyQueue::Dropped::too_late);
}

TEST(CopyQueue, ADropWhileASliceIsBeingSubmittedWaitsForThatSlice) {
  QueueBench bench;
  const auto job = bench.accept({.blocks = 100});
  bench.device().before_next(CallKind::copy, [&] {
    EXPECT_EQ(bench.queue().drop(*job), CopyQueue::Dropped::draining);
    EXPECT_FALSE(job->all_submitted()) << "those behind it must not miss the slice's event";
  });
  bench.pump();
  EXPECT_TRUE(job->all_submitted());
  ASSERT_EQ(bench.in_flight(), 1U);
  EXPECT_FALSE(bench.is_finished(*job));
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*job));
}

TEST(CopyQueue, ADropOfAJobInALaneOfItsOwnFreesTheLaneOnlyAtTheEnd) {
  QueueBench bench;
  std::unique_ptr<Stall> stall;
  const auto job = bench.accept({.blocks = 2, .after = {bench.unreached(stall)}});
  bench.pump();
  EXPECT_EQ(bench.queue().drop(*job), CopyQueue::Dropped::draining);
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, 1U);
  stall->open();
  bench.run_out();
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, 0U);
}

TEST(CopyQueue, ADropOfAJobThatIsJustBeingGivenALaneFreesThatLane) {
  QueueBench bench;
  std::unique_ptr<Stall> stall;
  const auto job = bench.accept({.after = {bench.unreached(stall)}});
  bench.device().before_next(
      CallKind::query, [&] { EXPECT_EQ(bench.queue().drop(*job), CopyQueue::Dropped::finished); });
  bench.pump();
  EXPECT_TRUE(bench.submitted().empty());
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, 0U);
}

TEST(CopyQueue, AJobWhoseSlicesHaveAllEndedButThatIsNotWhollySubmittedIsNotFinished) {
  QueueBench bench;
  const auto job = bench.accept({.blocks = 9});
  bench.pump();
  bench.device().run_all();
  bench.reap();
  EXPECT_TRUE(bench.finished().empty());
  EXPECT_EQ(bench.queue().drop(*job), CopyQueue::Dropped::finished);
}

// ---- errors ----

struct Fault {
  CallKind kind;
  std::size_t nth;
  Failure how;
  std::string name;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class FaultInASubmission : public ::testing::TestWithParam<Fault> {};

// Public failure 110: one error left all further transfers pending.
TEST_P(FaultInASubmission, LeavesTheSliceGuardedAndTheQueueWorking) {
  QueueBench bench({.timing = true});
  std::unique_ptr<Stall> stall;
  const auto job = bench.accept({.blocks = 4, .after = {bench.unreached(stall)}});
  const auto other = bench.accept({.blocks = 4});
  bench.device().forget_calls();
  bench.device().fail(GetParam().kind, GetParam().nth, GetParam().how);
  bench.pump();
  ASSERT_EQ(bench.device().injected(), 1U);
  ASSERT_TRUE(CopyQueue::error(*job));
  EXPECT_THROW(std::rethrow_exception(CopyQueue::error(*job)), CopyFailed);
  EXPECT_FALSE(CopyQueue::error(*other));
  EXPECT_TRUE(job->all_submitted()) << "nothing more of it goes";
  EXPECT_EQ(bench.submitted_of(*job).size(), 1U);
  EXPECT_FALSE(bench.is_finished(*job)) << "the batch may be in flight";
  EXPECT_GT(bench.queue().in_flight().bytes, 0U);

  stall->open();
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*other));
  if (GetParam().kind == CallKind::create_event && GetParam().nth == 1) {
    ASSERT_EQ(bench.in_flight(), 1U) << "no event: whoever guards the slice records one";
    EXPECT_EQ(bench.slice(0).event, nullptr);
    bench.end(0);
  }
  EXPECT_EQ(bench.in_flight(), 0U);
  EXPECT_TRUE(bench.is_finished(*job));
  EXPECT_EQ(bench.queue().in_flight().bytes, 0U);
  EXPECT_EQ(bench.queue().in_flight().lanes_owned, 0U);
  EXPECT_EQ(bench.queue().settle(*job).started, -1) << "times of a failed copy mean nothing";
}

INSTANTIATE_TEST_SUITE_P(
    Calls, FaultInASubmission,
    ::testing::Values(Fault{CallKind::create_event, 1, Failure::refused, "NoEvent"},
                      Fault{CallKind::wait, 1, Failure::refused, "Wait"},
                      Fault{CallKind::wait, 1, Failure::in_flight, "WaitThatHappened"},
                      Fault{CallKind::copy, 1, Failure::refused, "Copy"},
                      Fault{CallKind::copy, 1, Failure::in_flight, "CopyThatHappened"},
                      Fault{CallKind::record, 2, Failure::refused, "Record"},
                      Fault{CallKind::record, 2, Failure::in_flight, "RecordThatHappened"}),
    [](const auto& fault) { return fault.param.name; });

class FaultInAMeasurement : public ::testing::TestWithParam<Fault> {};

TEST_P(FaultInAMeasurement, FailsNoTransfer) {
  QueueBench bench({.timing = true});
  std::unique_ptr<Stall> stall;
  const auto job = bench.accept({.blocks = 4, .after = {bench.unreached(stall)}});
  bench.device().fail(GetParam().kind, GetParam().nth, GetParam().how);
  bench.pump();
  ASSERT_EQ(bench.device().injected(), 1U);
  stall->open();
  bench.run_out();
  EXPECT_TRUE(bench.is_finished(*job));
  EXPECT_FALSE(CopyQueue::error(*job));
  EXPECT_EQ(bench.queue().settle(*job).started, -1);
}

INSTANTIATE_TEST_SUITE_P(
    Calls, FaultInAMeasurement,
    ::testing::Values(Fault{CallKind::create_event, 2, Failure::refused, "NoStartEvent"},
                      Fault{CallKind::create_event, 2, Failure::no_memory, "NoMemory"},
                      Fault{CallKind::record, 1, Failure::refused, "StartRecord"},
                      Fault{CallKind::record, 1, Failure::in_flight, "StartRecordThatHappened"}),
    [](const auto& fault) { return fault.param.name; });

TEST(CopyQueue, AFailedCopyThatIsInFlightAllTheSameIsGuardedByAnEventBehindIt) {
  QueueBench bench;
  bench.device().fail(CallKind::copy, 1, Failure::in_flight);
  const auto job = bench.accept({});
  bench.pump();
  bench.reap();
  ASSERT_EQ(bench.in_flight(), 1U);
  EXPECT_FALSE(bench.is_finished(*job)) << "the copy has not run";
  bench.device().run_all();
  bench.reap();
  EXPECT_TRUE(bench.is_finished(*job));
}

TEST(CopyQueue, TheFirstErrorOfAJobIsTheOneThatIsKept) {
  QueueBench bench;
  const auto job = bench.accept({.blocks = 8});
  bench.device().fail(CallKind::copy, 2);
  bench.pump();
  ASSERT_EQ(bench.in_flight(), 2U);
  bench.end(0, true);
  bench.end(0, true);
  EXPECT_THROW(std::rethrow_exception(CopyQueue::error(*job)), CopyFailed);
}

TEST(CopyQueue, ALostSliceEndsItsJobWithDeviceLost) {
  QueueBench bench;
  const auto job = bench.accept({.blocks = 100});
  bench.pump();
  bench.device().lose();
  while (bench.in_flight() > 0) bench.end(0, true);
  EXPECT_TRUE(bench.is_finished(*job));
  EXPECT_THROW(std::rethrow_exception(CopyQueue::error(*job)), DeviceLost);
  bench.pump();
  EXPECT_EQ(bench.queue().waiting(), 0U);
}

// Whether or not the device itself says so.
TEST(CopyQueue, AQueueThatSawItsDeviceLostGivesItNothingMore) {
  QueueBench bench;
  bench.accept({});
  bench.pump();
  bench.end(0, true);
  bench.device().forget_calls();
  const auto later = bench.accept({});
  bench.pump();
  EXPECT_TRUE(bench.device().calls(CallKind::copy).empty());
  ASSERT_EQ(bench.in_flight(), 1U);
  bench.end(0, true);
  EXPECT_THROW(std::rethrow_exception(CopyQueue::error(*later)), DeviceLost);
}

// A chain of transfers, each behind the one before, must not keep all of them.
TEST(CopyQueue, AJobThatEndedForgetsThoseItRanBehind) {
  QueueBench bench;
  auto first = bench.accept({});
  const auto second = bench.accept({.behind = {first}});
  const std::weak_ptr<CopyJob> seen = first;
  first.reset();
  bench.run_out();
  static_cast<void>(bench.queue().settle(*second));
  EXPECT_TRUE(second->behind().empty());
  static_cast<void>(bench.queue().take_gone());
  EXPECT_TRUE(seen.expired());
}

TEST(CopyQueue, TimesAreThoseOfTheFirstCopyAndTheLast) {
  QueueBench bench({.timing = true});
  std::unique_ptr<Stall> stall;
  const auto job = bench.accept({.blocks = 4, .after = {bench.unreached(stall)}});
  bench.pump();
  const Nanoseconds before = bench.device().now();
  stall->open();
  bench.run_out();
  const auto times = bench.queue().settle(*job);
  EXPECT_GT(times.started, before);  // not when it was queued behind the stall
  EXPECT_GT(times.completed, times.started);
  EXPECT_LT(times.completed, bench.device().now());
  EXPECT_GT(before, job->submitted_at());
}

// ---- staging ----

// Pageable memory on both sides of real copies.
class Staged : public ::testing::TestWithParam<Direction> {
 protected:
  static constexpr std::size_t blocks = 40;
  static constexpr std::size_t slot_bytes = block_bytes + 512;

  Staged()
      : bench_({.direction = GetParam(),
                .device = {.needs_pinned_host = true},
                .staging_pieces = 2,
                .staging_piece_bytes = 4096}) {
    for (std::size_t i = 0; i < cache_.size(); ++i)
      cache_[i] = static_cast<std::byte>(i * 7 + i / 251);
    for (std::size_t i = 0; i < host_.size(); ++i)
      host_[i] = static_cast<std::byte>(i * 5 + i / 239);
  }

  std::shared_ptr<CopyJob> accept(std::vector<BlockId> ids, bool staged,
                                  CopyJob::Events after = {}) {
    Region region;
    region.address = reinterpret_cast<std::uintptr_t>(cache_.data());
    region.stride_bytes = region.payload_bytes = block_bytes;
    region.block_count = blocks;
    std::vector<SlotIndex> slots(ids.begin(), ids.end());
    auto job = bench_.wrap(
        CopyBatch(KVLayout({region}), GetParam(), ids, slots, {host_.data(), slot_bytes},
                  bench_.queue().descriptor_bytes(), GetParam() == Direction::to_device),
        {.after = std::move(after), .staged = staged});
    bench_.queue().accept({job});
    return job;
  }

  bool moved(std::size_t block) const {
    return std::memcmp(&cache_[block * block_bytes], &host_[block * slot_bytes], block_bytes) == 0;
  }

  std::vector<std::byte> cache_ = std::vector<std::byte>(blocks * block_bytes);
  std::vector<std::byte> host_ = std::vector<std::byte>(blocks * slot_bytes);
  QueueBench bench_;
};

TEST_P(Staged, BytesGoThroughPinnedMemoryOnly) {
  std::vector<BlockId> ids(blocks);
  std::iota(ids.begin(), ids.end(), BlockId{0});
  const auto padding = host_[block_bytes];
  const auto job = accept(ids, true);
  bench_.run_out();
  ASSERT_TRUE(bench_.is_finished(*job));
  EXPECT_EQ(CopyQueue::error(*job), nullptr);
  EXPECT_EQ(bench_.device().unpinned_copies(), 0U);
  for (std::size_t block = 0; block < blocks; ++block) EXPECT_TRUE(moved(block)) << block;
  EXPECT_EQ(host_[block_bytes], padding);
}

// Public failure 164: an asynchronous copy blocked because its source was not pinned.
TEST_P(Staged, WithoutStagingTheDeviceRefusesPageableMemory) {
  const auto job = accept({0}, false);
  bench_.run_out();
  EXPECT_TRUE(bench_.is_finished(*job));
  EXPECT_THROW(std::rethrow_exception(CopyQueue::error(*job)), InvalidArgument);
  EXPECT_FALSE(moved(0));
}

// Public failure 3: a staging buffer was filled again while a copy still had to read it.
TEST_P(Staged, APieceIsRefilledOnlyAfterItsOwnSliceWasObservedToEnd) {
  const auto first = accept({0, 1, 2, 3}, true);
  const auto second = accept({4, 5, 6, 7}, true);
  const auto third = accept({8, 9, 10, 11}, true);
  bench_.pump();
  EXPECT_EQ(bench_.in_flight(), 2U);  // both pieces
  EXPECT_FALSE(third->begun());
  bench_.device().run_one();
  bench_.pump();
  EXPECT_FALSE(third->begun()) << "the end of the first slice was not observed yet";
  bench_.reap();
  bench_.pump();
  EXPECT_TRUE(third->begun());
  bench_.run_out();
  for (std::size_t block = 0; block < 12; ++block) EXPECT_TRUE(moved(block)) << block;
  EXPECT_TRUE(bench_.is_finished(*first) && bench_.is_finished(*second));
}

TEST_P(Staged, AFailedCopyLeavesItsTargetAsItWas) {
  accept({0}, true);
  bench_.run_out();  // the piece holds the bytes of another job now
  const auto cache = cache_;
  const auto host = host_;
  bench_.device().fail(CallKind::copy, 1);
  const auto failed = accept({1}, true);
  bench_.run_out();
  ASSERT_TRUE(bench_.is_finished(*failed));
  ASSERT_TRUE(CopyQueue::error(*failed));
  EXPECT_TRUE(cache_ == cache);
  EXPECT_TRUE(host_ == host);
}

TEST_P(Staged, AnUnreadyJobDoesNotKeepThePiecesFromReadyOnes) {
  std::vector<std::unique_ptr<Stall>> stalls(3);
  std::vector<std::shared_ptr<CopyJob>> unready;
  for (std::size_t i = 0; i < stalls.size(); ++i) {
    unready.push_back(accept({static_cast<BlockId>(i)}, true, {bench_.unreached(stalls[i])}));
  }
  const auto ready = accept({10}, true);
  bench_.run_out();
  EXPECT_TRUE(bench_.is_finished(*ready));
  for (const auto& job : unready) EXPECT_FALSE(job->begun());
  for (auto& stall : stalls) stall->open();
  bench_.run_out();
  for (const auto& job : unready) EXPECT_TRUE(bench_.is_finished(*job));
}

// Asking may go on failing; the device still knows.
TEST_P(Staged, AJobWhoseAfterCannotBeAskedWaitsOnTheDevice) {
  std::unique_ptr<Stall> stall;
  const auto job = accept({0}, true, {bench_.unreached(stall)});
  bench_.device().fail(CallKind::query, 1);
  bench_.pump();
  EXPECT_TRUE(job->begun());
  EXPECT_FALSE(bench_.device().run_one()) << "its stream waits";
  stall->open();
  bench_.run_out();
  EXPECT_TRUE(bench_.is_finished(*job));
  EXPECT_TRUE(moved(0));
}

TEST_P(Staged, AJobWhoseAfterIsLostWithTheDeviceEndsLost) {
  std::unique_ptr<Stall> stall;
  const auto job = accept({0}, true, {bench_.unreached(stall)});
  bench_.pump();
  EXPECT_FALSE(job->begun());
  bench_.device().lose();
  bench_.pump();
  ASSERT_EQ(bench_.in_flight(), 1U) << "it would wait for ever";
  bench_.end(0, true);
  EXPECT_TRUE(bench_.is_finished(*job));
  EXPECT_THROW(std::rethrow_exception(CopyQueue::error(*job)), DeviceLost);
}

TEST_P(Staged, AJobThatWaitsForAPieceOfALostDeviceEndsLost) {
  accept({0}, true);
  accept({1}, true);
  const auto job = accept({2}, true);
  bench_.pump();
  ASSERT_EQ(bench_.in_flight(), 2U);  // both pieces
  bench_.device().lose();
  bench_.end(0, true);
  bench_.end(0, true);
  bench_.pump();
  ASSERT_EQ(bench_.in_flight(), 1U) << "it would wait for ever: no piece comes back";
  bench_.end(0, true);
  EXPECT_TRUE(bench_.is_finished(*job));
  EXPECT_THROW(std::rethrow_exception(CopyQueue::error(*job)), DeviceLost);
}

TEST_P(Staged, AJobThatIsDroppedJustBeforeItGetsALaneAndThatFindsNoPieceKeepsNoLane) {
  accept({0}, true);
  accept({1}, true);
  bench_.pump();
  ASSERT_EQ(bench_.in_flight(), 2U);  // both pieces
  std::unique_ptr<Stall> stall;
  const auto job = accept({2}, true, {bench_.unreached(stall)});
  bench_.device().before_next(
      CallKind::query, [&] { EXPECT_EQ(bench_.queue().drop(*job), CopyQueue::Dropped::finished); });
  bench_.device().fail(CallKind::query, 1);  // so that it may wait on the device, in a lane
  bench_.pump();
  EXPECT_EQ(bench_.queue().in_flight().lanes_owned, 0U);
  stall->open();
  bench_.run_out();
  EXPECT_EQ(bench_.finished().size(), 2U);
}

TEST(StagedCopies, NoDescriptorIsLargerThanAPiece) {
  QueueBench bench({.window = {std::size_t{1} << 20, 1000, false},
                    .staging_pieces = 1,
                    .staging_piece_bytes = 4096});
  EXPECT_EQ(bench.queue().descriptor_bytes(), 4096U);
}

INSTANTIATE_TEST_SUITE_P(BothWays, Staged,
                         ::testing::Values(Direction::to_host, Direction::to_device),
                         [](const auto& way) {
                           return way.param == Direction::to_host ? "Offload" : "Restore";
                         });

}  // namespace
}  // namespace kvmem::test
