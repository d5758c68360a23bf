// Calls that a file system in memory refuses, cuts short or never answers: the tier says so, its
// workers live, and it is well again when the cause is gone.
#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "tier/disk_world.hpp"
#include "tier/file_gate.hpp"

namespace kvmem::test {
namespace {

using Call = MemoryFiles::Call;
constexpr std::chrono::seconds long_time(3600);

bool is(const Call& call, const char* what) { return std::strcmp(call.what, what) == 0; }

MemoryFiles::Plan refuse(const char* what, int error) {
  return [=](const Call& call) -> std::optional<std::int64_t> {
    if (is(call, what)) return -error;
    return std::nullopt;
  };
}

struct HealthTest : testing::Test {
  World world;
  DiskSubmit try_put(SlotIndex slot, DiskDone done = nullptr) {
    return world.tier->try_write(slot, record_of(key_of(slot), World::payload), world.buffer.data(),
                                 std::move(done));
  }
  DiskSubmit try_get(SlotIndex slot, std::uint64_t generation, DiskDone done = nullptr) {
    return try_get(slot, generation, std::move(done), world.buffer);
  }
  DiskSubmit try_get(SlotIndex slot, std::uint64_t generation, DiskDone done, Buffer& target) {
    return world.tier->try_read(slot, record_of(key_of(slot), World::payload), generation,
                                target.data(), std::move(done));
  }
};

struct FailingWrites : HealthTest, testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Each, FailingWrites, testing::Values(ENOSPC, EIO, EROFS, EDQUOT, ESTALE));

// Public failure 110: one error ended the thread.
TEST_P(FailingWrites, DegradeTheTierUntilOneSucceeds) {
  world.options.probe_after = long_time;
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(1).generation;
  world.files->set_plan(refuse("write", GetParam()));
  const DiskResult failed = world.put(2);
  EXPECT_EQ(failed.outcome, DiskOutcome::io_error);
  EXPECT_EQ(failed.error, GetParam());
  EXPECT_EQ(tier.stats().degraded, text("writing: ", std::strerror(GetParam())));
  EXPECT_EQ(try_put(3), DiskSubmit::degraded);  // at once, until the time of the next attempt
  EXPECT_EQ(world.get(1, generation).outcome, DiskOutcome::ok);

  world.options.probe_after = std::chrono::nanoseconds(0);
  world.files->set_plan(nullptr);
  world.open();
  world.files->set_plan(refuse("write", GetParam()));
  EXPECT_EQ(world.put(2).outcome, DiskOutcome::io_error);
  EXPECT_EQ(world.put(2).outcome, DiskOutcome::io_error);  // an attempt
  EXPECT_EQ(world.tier->stats().degradations, 1);
  world.files->set_plan(nullptr);
  const DiskResult healed = world.put(2);
  EXPECT_EQ(healed.outcome, DiskOutcome::ok);
  EXPECT_EQ(world.tier->stats().degraded, std::nullopt);
  EXPECT_EQ(world.get(2, healed.generation).outcome, DiskOutcome::ok);
  EXPECT_EQ(world.get(1, generation).outcome, DiskOutcome::ok);
}

TEST_F(HealthTest, AReadErrorDoesNotPutTheProbeOff) {
  world.options.probe_after = std::chrono::milliseconds(100);
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(1).generation;
  world.files->set_plan(refuse("read", ESTALE));
  Ended ended;
  ASSERT_TRUE(comes_true([&] {
    EXPECT_EQ(world.get(1, generation).error, ESTALE);
    return try_put(2, ended.done()) == DiskSubmit::accepted;
  }));
  EXPECT_EQ(ended.wait_for(1)[0].outcome, DiskOutcome::ok);
  EXPECT_EQ(tier.stats().degradations, 1);
  EXPECT_EQ(tier.stats().degraded, std::nullopt);
}

TEST_F(HealthTest, AProbeThatIsToBeMadeAfterAllTimeIsNeverMade) {
  world.options.probe_after = std::chrono::nanoseconds::max();
  world.open();
  world.files->set_plan(refuse("write", EIO));
  EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
  EXPECT_EQ(try_put(1), DiskSubmit::degraded);
}

TEST_F(HealthTest, OneAttemptAtATimeIsMadeWhileDegraded) {
  world.open();
  world.files->set_plan(refuse("write", EIO));
  EXPECT_EQ(world.put(0).outcome, DiskOutcome::io_error);
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  Ended ended;
  ASSERT_EQ(try_put(1, ended.done()), DiskSubmit::accepted);
  EXPECT_EQ(try_put(2), DiskSubmit::degraded);
  gate.open();
  EXPECT_EQ(ended.wait_for(1)[0].outcome, DiskOutcome::ok);
  EXPECT_EQ(world.put(2).outcome, DiskOutcome::ok);
}

// Public failure 110: the third of ten.
TEST_F(HealthTest, AFailedWriteIsTheOnlyOneThatFails) {
  DiskSlots& tier = world.open();
  world.files->set_plan([&](const Call& call) -> std::optional<std::int64_t> {
    if (is(call, "write") && call.at == World::offset_of(2)) return -EIO;
    return std::nullopt;
  });
  for (SlotIndex slot = 0; slot < 7; ++slot)
    EXPECT_EQ(world.put(slot).outcome, slot == 2 ? DiskOutcome::io_error : DiskOutcome::ok);
  world.files->set_plan(nullptr);
  EXPECT_EQ(tier.stats().writes.calls, 6);
  EXPECT_EQ(world.open().take_found().size(), 6);
}

TEST_F(HealthTest, AWriteThatBreaksInItsMiddleLeavesATornSlot) {
  world.open();
  ASSERT_EQ(world.put(2).outcome, DiskOutcome::ok);
  int calls = 0;
  world.files->set_plan([&](const Call& call) -> std::optional<std::int64_t> {
    if (!is(call, "write")) return std::nullopt;
    return ++calls == 1 ? std::int64_t{8192} : -ENOSPC;
  });
  EXPECT_EQ(world.put(2).outcome, DiskOutcome::io_error);
  world.files->set_plan(nullptr);
  EXPECT_TRUE(world.open().take_found().empty());
  EXPECT_EQ(world.tier->stats().scanned[static_cast<std::size_t>(DiskOutcome::torn)], 1);
}

TEST_F(HealthTest, WhatIsCutShortOrInterruptedGoesOn) {
  world.open();
  int calls = 0;
  world.files->set_plan([&](const Call& call) -> std::optional<std::int64_t> {
    if (!is(call, "write") && !is(call, "read")) return std::nullopt;
    if (++calls % 3 == 0) return -EINTR;
    return std::min<std::int64_t>(static_cast<std::int64_t>(call.bytes), 4096 + 700);
  });
  const DiskResult put = world.put(5);
  ASSERT_EQ(put.outcome, DiskOutcome::ok);
  EXPECT_EQ(world.get(5, put.generation).outcome, DiskOutcome::ok);
  EXPECT_GT(calls, 6);
}

TEST_F(HealthTest, AReadErrorRetiresTheSlotAndNothingElse) {
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(4).generation;
  world.files->set_plan(refuse("read", EIO));
  const DiskResult result = world.get(4, generation);
  EXPECT_EQ(result.outcome, DiskOutcome::io_error);
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(try_get(4, generation), DiskSubmit::retired);
  EXPECT_EQ(tier.stats().degraded, std::nullopt);
  world.files->set_plan(nullptr);
  EXPECT_EQ(world.put(5).outcome, DiskOutcome::ok);
}

// BLK_STS_MEDIUM, of a direct call.
TEST_F(HealthTest, WhatTheKernelCallsNoDataIsAnErrorOfTheMedium) {
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(4).generation;
  world.files->set_plan(refuse("read", ENODATA));
  const DiskResult got = world.get(4, generation);
  EXPECT_EQ(got.outcome, DiskOutcome::io_error);
  EXPECT_EQ(got.error, EIO);
  EXPECT_TRUE(tier.is_retired(4));
  EXPECT_EQ(tier.stats().degraded, std::nullopt);
  world.files->set_plan(refuse("write", ENODATA));
  EXPECT_EQ(world.put(5).error, EIO);
  EXPECT_EQ(tier.stats().degraded, text("writing: ", std::strerror(EIO)));
}

struct UnreadableHeaders : HealthTest, testing::WithParamInterface<int> {
  // With the header of one of seven slots that cannot be read.
  std::size_t found() {
    world.open();
    for (SlotIndex slot = 0; slot < 7; ++slot) EXPECT_EQ(world.put(slot).outcome, DiskOutcome::ok);
    world.tier.reset();
    world.files->set_plan([](const Call& call) -> std::optional<std::int64_t> {
      const std::uint64_t bad = World::offset_of(2);
      const bool covers =
          call.path.ends_with("slots-0000.kv") && call.at <= bad && bad < call.at + call.bytes;
      if (is(call, "read") && covers) return -GetParam();
      return std::nullopt;
    });
    return world.open().take_found().size();
  }
  [[nodiscard]] std::uint64_t scanned(DiskOutcome outcome) const {
    return world.tier->stats().scanned[static_cast<std::size_t>(outcome)];
  }
};
INSTANTIATE_TEST_SUITE_P(Each, UnreadableHeaders, testing::Values(EIO, ENODATA, EILSEQ, ENXIO));

TEST_P(UnreadableHeaders, RetireTheirSlotsAtTheStart) {
  EXPECT_EQ(found(), 6);
  EXPECT_TRUE(world.tier->is_retired(2));
  EXPECT_EQ(world.tier->stats().retired, 1);
  EXPECT_EQ(scanned(DiskOutcome::io_error), 1);
}

struct HeadersWithoutMemory : UnreadableHeaders {};
INSTANTIATE_TEST_SUITE_P(Each, HeadersWithoutMemory, testing::Values(ENOMEM, EAGAIN));

TEST_P(HeadersWithoutMemory, RetireNothingAtTheStart) {
  EXPECT_EQ(found(), 6);
  EXPECT_EQ(world.tier->stats().retired, 0);
  EXPECT_EQ(scanned(DiskOutcome::shortage), 1);
}

// Public failure 119: a shortage is no bad data.
TEST_F(HealthTest, AShortageIsTriedAgainAndRetiresAndDegradesNothing) {
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(4).generation;
  for (const int error : {EMFILE, ENFILE, ENOMEM, EAGAIN}) {
    world.files->set_plan(refuse("read", error));
    const DiskResult result = world.get(4, generation);
    EXPECT_EQ(result.outcome, DiskOutcome::shortage);
    EXPECT_EQ(result.error, error);
    world.files->set_plan(refuse("write", error));
    EXPECT_EQ(world.put(5).outcome, DiskOutcome::shortage);
    std::atomic<int> left{2};
    world.files->set_plan([&](const Call& call) -> std::optional<std::int64_t> {
      if (is(call, "read") && left-- > 0) return -error;
      return std::nullopt;
    });
    EXPECT_EQ(world.get(4, generation).outcome, DiskOutcome::ok);
  }
  EXPECT_EQ(tier.stats().retired, 0);
  EXPECT_EQ(tier.stats().degraded, std::nullopt);
}

// Public failure 108: direct I/O refused, when it is asked for or at the first call.
TEST_F(HealthTest, WhereDirectCallsAreRefusedItIsBufferedAndSaysSo) {
  EXPECT_TRUE(world.open().stats().direct);
  world.files->set_plan(refuse("direct", EINVAL));
  EXPECT_FALSE(world.open().stats().direct);
  EXPECT_NE(world.tier->stats().why_not_direct.find("refuses it"), std::string::npos);
  world.files->set_plan(nullptr);
  world.open();
  std::atomic<int> left{1};
  world.files->set_plan([&](const Call& call) -> std::optional<std::int64_t> {
    if (is(call, "write") && left-- > 0) return -EINVAL;
    return std::nullopt;
  });
  const DiskResult put = world.put(1);
  EXPECT_EQ(put.outcome, DiskOutcome::ok);
  EXPECT_FALSE(world.tier->stats().direct);
  EXPECT_NE(world.tier->stats().why_not_direct, "");
  EXPECT_EQ(world.get(1, put.generation).outcome, DiskOutcome::ok);
}

// Public failure 113: a file deleted behind its back.
TEST_F(HealthTest, AVanishedFileDegradesAndIsMadeAgain) {
  DiskSlots& tier = world.open();
  ASSERT_EQ(world.put(0).outcome, DiskOutcome::ok);
  const std::uint64_t other = world.put(8).generation;
  world.files->vanish("/tier/slots-0000.kv");
  EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
  EXPECT_NE(tier.stats().degraded, std::nullopt);
  const DiskResult put = world.put(1);
  EXPECT_EQ(put.outcome, DiskOutcome::ok);
  EXPECT_EQ(tier.stats().degraded, std::nullopt);
  EXPECT_EQ(tier.stats().remade, 1);
  EXPECT_EQ(world.get(1, put.generation).outcome, DiskOutcome::ok);
  EXPECT_EQ(world.get(0, 1).outcome, DiskOutcome::empty);
  EXPECT_EQ(world.get(8, other).outcome, DiskOutcome::ok);
}

TEST_F(HealthTest, AVanishedFolderDegradesUntilItCanBeMadeAgain) {
  DiskSlots& tier = world.open();
  const std::uint64_t old = world.put(0).generation;
  world.files->vanish("/tier");
  EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
  world.files->set_plan(refuse("make_folder", EACCES));
  EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
  EXPECT_NE(tier.stats().degraded->find("cannot make /tier"), std::string::npos);
  EXPECT_EQ(world.get(0, old).outcome, DiskOutcome::ok);  // from the file that is still open
  world.files->set_plan(nullptr);
  EXPECT_EQ(world.put(1).outcome, DiskOutcome::ok);
  EXPECT_EQ(world.get(0, old).outcome, DiskOutcome::empty);
  EXPECT_TRUE(world.files->has("/tier/superblock"));
}

// Public failure 114: a stalled mount.
TEST_F(HealthTest, AStalledMountHoldsUpNobody) {
  world.options.stall_after = std::chrono::nanoseconds(0);
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(1).generation;
  ASSERT_TRUE(comes_true([&] { return tier.stats().running == 0; }));
  FileGate gate;
  world.files->set_plan(gate.plan("read"));
  Ended first, second;
  ASSERT_EQ(try_get(1, generation, first.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  EXPECT_NE(tier.stats().degraded, std::nullopt);
  EXPECT_EQ(try_get(1, generation, second.done()), DiskSubmit::degraded);
  EXPECT_EQ(tier.close(std::chrono::nanoseconds(0)).running, 1);
  EXPECT_EQ(first.count(), 0);  // its buffer is not the caller's yet
  gate.open();
  EXPECT_EQ(first.wait_for(1)[0].outcome, DiskOutcome::ok);
  EXPECT_EQ(tier.close(long_time).running, 0);
}

TEST_F(HealthTest, WhatWaitsForTooLongIsTimedOut) {
  world.options.stall_after = std::chrono::milliseconds(100);
  Ended waiting;
  // Again where a slow machine let the first call stall before the second came.
  for (DiskSubmit answer = DiskSubmit::degraded; answer != DiskSubmit::accepted;) {
    world.files->set_plan(nullptr);
    world.open();
    FileGate gate;
    world.files->set_plan(gate.plan("write"));
    ASSERT_EQ(try_put(1), DiskSubmit::accepted);
    EXPECT_TRUE(gate.has_seen(1));
    answer = try_put(2, waiting.done());
    EXPECT_TRUE(answer != DiskSubmit::accepted ||
                comes_true([&] { return world.tier->expire() == 1; }));
    EXPECT_EQ(try_put(2), DiskSubmit::degraded);
    gate.open();
    world.tier->close(long_time);
  }
  EXPECT_EQ(waiting.wait_for(1)[0].outcome, DiskOutcome::timed_out);
  EXPECT_EQ(ended(world.tier->stats().writes, DiskOutcome::timed_out), 1);
}

// A worker leaked into a stalled call keeps what it needs.
TEST_F(HealthTest, ADestroyedTierWithAStalledCallLetsGoWhenItEnds) {
  world.options.close_within = std::chrono::nanoseconds(0);
  world.open();
  const auto gate = std::make_shared<FileGate>();
  world.files->set_plan(gate->plan("write"));
  const auto lent = std::make_shared<Buffer>(World::payload);
  const std::weak_ptr<Buffer> seen = lent;
  ASSERT_EQ(world.tier->try_write(3, record_of(key_of(3), World::payload), lent->data(),
                                  [lent](const DiskResult&) {}),
            DiskSubmit::accepted);
  ASSERT_TRUE(gate->has_seen(1));
  world.tier.reset();
  EXPECT_THROW(DiskSlots{world.options}, InvalidArgument);  // the folder is still its own
  gate->open();
  world.files->set_plan(nullptr);
  EXPECT_TRUE(comes_true([&] {
    try {
      DiskSlots again(world.options);
      return true;
    } catch (const InvalidArgument&) {
      return false;
    }
  }));
}

TEST_F(HealthTest, ClosingTellsWhatWaitsAndRefusesWhatComes) {
  DiskSlots& tier = world.open();
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  Ended running, waiting;
  ASSERT_EQ(try_put(0, running.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  for (SlotIndex slot = 1; slot < 4; ++slot)
    ASSERT_EQ(try_put(slot, waiting.done()), DiskSubmit::accepted);
  const DiskCloseReport report = tier.close(std::chrono::nanoseconds(0));
  EXPECT_EQ(report.dropped, 3);
  EXPECT_EQ(report.running, 1);
  for (const DiskResult& result : waiting.wait_for(3))
    EXPECT_EQ(result.outcome, DiskOutcome::closed);
  EXPECT_EQ(try_put(5), DiskSubmit::closed);
  gate.open();
  EXPECT_EQ(tier.close(long_time).running, 0);
  EXPECT_EQ(running.wait_for(1)[0].outcome, DiskOutcome::ok);
  EXPECT_EQ(tier.close(long_time).dropped, 0);
  EXPECT_EQ(tier.stats().slots, 20);
}

TEST_F(HealthTest, ClosingWaitsForACallThatItsCallerMakes) {
  world.options.workers = 0;
  DiskSlots& tier = world.open();
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  Ended ended;
  std::thread caller([&] { EXPECT_EQ(try_put(0, ended.done()), DiskSubmit::accepted); });
  ASSERT_TRUE(gate.has_seen(1));
  EXPECT_EQ(tier.close(std::chrono::nanoseconds(0)).running, 1);
  EXPECT_EQ(try_put(1), DiskSubmit::closed);
  std::thread closer([&] { EXPECT_EQ(tier.close(long_time).running, 0); });
  gate.open();
  closer.join();
  EXPECT_EQ(ended.wait_for(1)[0].outcome, DiskOutcome::ok);
  caller.join();
}

// The sanitizers tell what it would touch.
TEST_F(HealthTest, ACallThatItsCallerMakesOutlivesTheTier) {
  world.options.workers = 0;
  world.options.close_within = std::chrono::nanoseconds(0);
  world.open();
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  Ended ended;
  std::thread caller([&] { EXPECT_EQ(try_put(0, ended.done()), DiskSubmit::accepted); });
  ASSERT_TRUE(gate.has_seen(1));
  world.tier.reset();
  gate.open();
  caller.join();
  EXPECT_EQ(ended.wait_for(1)[0].outcome, DiskOutcome::ok);
}

// A completion that stands still until it is let go.
struct SlowDone {
  std::atomic<bool> came{false}, may_go{false};
  [[nodiscard]] DiskDone done() {
    return [this](const DiskResult&) {
      came = true;
      EXPECT_TRUE(comes_true([&] { return may_go.load(); }));
    };
  }
};

TEST_F(HealthTest, ClosingWaitsForACallThatAnotherCloseTells) {
  DiskSlots& tier = world.open();
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  SlowDone told;
  ASSERT_EQ(try_put(1), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  ASSERT_EQ(try_put(2, told.done()), DiskSubmit::accepted);
  std::thread closer([&] { EXPECT_EQ(tier.close(long_time).running, 0); });
  ASSERT_TRUE(comes_true([&] { return told.came.load(); }));
  EXPECT_EQ(tier.close(std::chrono::nanoseconds(0)).running, 2);
  gate.open();
  EXPECT_TRUE(comes_true([&] { return tier.close(std::chrono::nanoseconds(0)).running == 1; }));
  told.may_go = true;
  EXPECT_EQ(tier.close(long_time).running, 0);
  closer.join();
}

TEST_F(HealthTest, ClosingWaitsForACallThatExpireTells) {
  world.options.stall_after = std::chrono::milliseconds(100);
  // Again where a slow machine let the first call stall before the second came.
  for (DiskSubmit answer = DiskSubmit::degraded; answer != DiskSubmit::accepted;) {
    world.files->set_plan(nullptr);
    DiskSlots& tier = world.open();
    FileGate gate;
    world.files->set_plan(gate.plan("write"));
    SlowDone told;
    ASSERT_EQ(try_put(1), DiskSubmit::accepted);
    EXPECT_TRUE(gate.has_seen(1));
    answer = try_put(2, told.done());
    if (answer == DiskSubmit::accepted) {
      std::thread expirer([&] { EXPECT_TRUE(comes_true([&] { return tier.expire() == 1; })); });
      EXPECT_TRUE(comes_true([&] { return told.came.load(); }));
      EXPECT_EQ(tier.close(std::chrono::nanoseconds(0)).running, 2);
      told.may_go = true;
      expirer.join();
      EXPECT_EQ(tier.close(std::chrono::nanoseconds(0)).running, 1);
    }
    gate.open();
    EXPECT_EQ(tier.close(long_time).running, 0);
  }
}

TEST_F(HealthTest, TheQueueIsBoundedAndReadsGoFirst) {
  world.options.max_queued = 2;
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(9).generation;
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  std::mutex mutex;
  std::string order;
  const auto note = [&](char what) {
    return [&, what](const DiskResult&) {
      const std::lock_guard lock(mutex);
      order += what;
    };
  };
  ASSERT_EQ(try_put(0, note('a')), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  EXPECT_EQ(try_put(1, note('b')), DiskSubmit::accepted);
  EXPECT_EQ(try_put(2, note('c')), DiskSubmit::accepted);
  EXPECT_EQ(try_put(3), DiskSubmit::full);
  EXPECT_EQ(try_get(9, generation, note('r')), DiskSubmit::accepted);
  EXPECT_EQ(tier.stats().queued, 3);
  EXPECT_EQ(tier.stats().running, 1);
  gate.open();
  EXPECT_TRUE(comes_true([&] {
    const std::lock_guard lock(mutex);
    return order.size() == 4;
  }));
  EXPECT_EQ(order, "arbc");
  EXPECT_EQ(tier.stats().peak_queued, 3);
  EXPECT_EQ(tier.stats().refused, 1);
}

// Else a read in the middle of a write would look like damage.
TEST_F(HealthTest, ASlotIsNotReadWhileItIsWrittenNorWrittenWhileItIsRead) {
  world.options.workers = 2;
  DiskSlots& tier = world.open();
  FileGate writes;
  world.files->set_plan(writes.plan("write"));
  Ended ended;
  ASSERT_EQ(try_put(1, ended.done()), DiskSubmit::accepted);
  EXPECT_EQ(try_get(1, 1), DiskSubmit::busy);
  EXPECT_EQ(try_put(1), DiskSubmit::busy);
  EXPECT_EQ(tier.try_erase(1, nullptr), DiskSubmit::busy);
  writes.open();
  const std::uint64_t generation = ended.wait_for(1)[0].generation;
  FileGate reads;
  world.files->set_plan(reads.plan("read"));
  Ended read;
  Buffer other(World::payload);  // both run at once, and each verifies what it read
  ASSERT_EQ(try_get(1, generation, read.done()), DiskSubmit::accepted);
  EXPECT_EQ(try_get(1, generation, read.done(), other), DiskSubmit::accepted);
  EXPECT_EQ(try_put(1), DiskSubmit::busy);
  reads.open();
  EXPECT_EQ(read.wait_for(2)[1].outcome, DiskOutcome::ok);
  EXPECT_EQ(world.put(1).outcome, DiskOutcome::ok);
}

TEST_F(HealthTest, SyncIsDoneWhenThePolicySays) {
  std::atomic<int> syncs{0};
  const auto count = [&](DiskSync sync) {
    World one;
    one.options.sync = sync;
    one.open();
    one.files->set_plan([&](const Call& call) -> std::optional<std::int64_t> {
      syncs += is(call, "sync");
      return std::nullopt;
    });
    syncs = 0;
    EXPECT_EQ(one.put(0).outcome, DiskOutcome::ok);
    EXPECT_EQ(one.put(1).outcome, DiskOutcome::ok);
    const int before = syncs;
    EXPECT_EQ(one.tier->close(long_time).sync_error, 0);
    return std::pair(before, syncs - before);
  };
  EXPECT_EQ(count(DiskSync::never), std::pair(0, 0));
  EXPECT_EQ(count(DiskSync::on_close), std::pair(0, 3));  // of three files
  EXPECT_EQ(count(DiskSync::each_write), std::pair(2, 0));
}

TEST_F(HealthTest, ClosingWaitsForASyncNoLongerThanItMay) {
  world.options.sync = DiskSync::on_close;
  DiskSlots& tier = world.open();
  ASSERT_EQ(world.put(0).outcome, DiskOutcome::ok);
  FileGate gate;
  std::atomic<int> left{1};
  world.files->set_plan(
      [&, hold = gate.plan("sync")](const Call& call) -> std::optional<std::int64_t> {
        static_cast<void>(hold(call));
        if (is(call, "sync") && left-- > 0) return -EIO;
        return std::nullopt;
      });
  // What is told is over a moment later.
  EXPECT_TRUE(comes_true([&] { return tier.stats().running == 0; }));
  EXPECT_EQ(tier.close(std::chrono::nanoseconds(0)).running, 1);
  ASSERT_TRUE(gate.has_seen(1));
  EXPECT_EQ(tier.close(std::chrono::nanoseconds(0)).running, 1);
  EXPECT_THROW(DiskSlots{world.options}, InvalidArgument);  // the folder is still its own
  gate.open();
  const DiskCloseReport report = tier.close(long_time);
  EXPECT_EQ(report.running, 0);
  EXPECT_EQ(report.sync_error, EIO);
  EXPECT_NO_THROW(DiskSlots{world.options});
}

}  // namespace
}  // namespace kvmem::test
