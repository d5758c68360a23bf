// Large blocks: their sums are taken beside the calls on the disk, which may stand still meanwhile.
#include <mutex>
#include <string_view>
#include <thread>

#include <gtest/gtest.h>

#include "base/crc32c.hpp"
#include "tier/disk_world.hpp"
#include "tier/file_gate.hpp"

namespace kvmem::test {
namespace {

struct LargeBlocks : testing::Test {
  static constexpr std::size_t payload = std::size_t{512} << 10;
  static constexpr std::size_t slot_bytes = payload + 2 * disk_page_bytes;
  static constexpr SlotIndex slots = 6;
  World world;
  Buffer source{payload};
  FileGate gate;

  void SetUp() override {
    world.options.block_bytes = payload;
    world.options.capacity_bytes = slots * slot_bytes;
    world.options.file_bytes = slots * slot_bytes;
    source.fill(7, 7, payload);
  }
  [[nodiscard]] DiskSubmit try_put(SlotIndex slot, DiskDone done,
                                   std::optional<std::uint32_t> sum = std::nullopt) {
    const DiskKey key = key_of(slot);
    DiskRecord record = record_of(key, payload);
    record.payload_sum = sum;
    return world.tier->try_write(slot, record, source.data(), std::move(done));
  }
  std::uint64_t put(SlotIndex slot) {
    Ended ended;
    EXPECT_EQ(try_put(slot, ended.done()), DiskSubmit::accepted);
    const DiskResult result = ended.wait_for(1).at(0);
    EXPECT_EQ(result.outcome, DiskOutcome::ok);
    return result.generation;
  }
  [[nodiscard]] DiskSubmit try_get(SlotIndex slot, std::uint64_t generation, Buffer& target,
                                   DiskDone done) {
    const DiskKey key = key_of(slot);
    return world.tier->try_read(slot, record_of(key, payload), generation, target.data(),
                                std::move(done));
  }
};

// With no worker each step is taken by the calling thread.
struct LargeBlocksBy : LargeBlocks, testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Workers, LargeBlocksBy, testing::Values(0, 1, 4, 8));

TEST_P(LargeBlocksBy, ComeBackWithTheirSumAndDamageIsFound) {
  world.options.workers = GetParam();
  world.open();
  std::array<std::uint64_t, slots> generations{};
  for (SlotIndex slot = 0; slot < slots; ++slot) generations[slot] = put(slot);
  world.file_of(2)[2 * slot_bytes + disk_page_bytes + payload - 1] ^= std::byte{1};
  for (SlotIndex slot = 0; slot < slots; ++slot) {
    Buffer target(payload);
    Ended ended;
    ASSERT_EQ(try_get(slot, generations[slot], target, ended.done()), DiskSubmit::accepted);
    const DiskResult result = ended.wait_for(1).at(0);
    EXPECT_EQ(result.generation, generations[slot]);
    EXPECT_EQ(world.tier->is_retired(slot), slot == 2);
    if (slot == 2) {
      EXPECT_EQ(result.outcome, DiskOutcome::bad_data_sum);
    } else {
      EXPECT_EQ(result.outcome, DiskOutcome::ok);
      EXPECT_EQ(result.payload_sum, crc32c(0, source.data(), payload));
      EXPECT_TRUE(target.holds(7, 7, payload));
    }
  }
  EXPECT_EQ(world.tier->stats().reads.calls, slots - 1);
}

TEST_P(LargeBlocksBy, TheCallsOfOneBlockAreInOrder) {
  world.options.workers = GetParam();
  DiskSlots& tier = world.open();
  for (SlotIndex round = 0; round < 20; ++round) {
    const SlotIndex slot = round % slots;
    const std::uint64_t generation = put(slot);
    Buffer target(payload);
    Ended ended;
    ASSERT_EQ(try_get(slot, generation, target, ended.done()), DiskSubmit::accepted);
    EXPECT_EQ(ended.wait_for(1).at(0).outcome, DiskOutcome::ok);
    ASSERT_EQ(tier.try_erase(slot, ended.done()), DiskSubmit::accepted);
    EXPECT_EQ(ended.wait_for(2).at(1).outcome, DiskOutcome::ok);
    ASSERT_EQ(try_get(slot, generation, target, ended.done()), DiskSubmit::accepted);
    EXPECT_EQ(ended.wait_for(3).at(2).outcome, DiskOutcome::empty);
  }
}

TEST_F(LargeBlocks, WhatIsToBeWrittenIsSummedWhileTheDiskStandsStill) {
  world.options.workers = 2;
  DiskSlots& tier = world.open();
  world.files->set_plan(gate.plan("write"));
  Ended still, wrong, late;
  for (SlotIndex slot = 0; slot < 2; ++slot)
    ASSERT_EQ(try_put(slot, still.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(2));
  ASSERT_EQ(try_put(2, late.done()), DiskSubmit::accepted);
  const std::uint32_t sum = crc32c(0, source.data(), payload);
  ASSERT_EQ(try_put(3, wrong.done(), sum + 1), DiskSubmit::accepted);
  EXPECT_EQ(wrong.wait_for(1).at(0).outcome, DiskOutcome::bad_data_sum);
  EXPECT_EQ(still.count() + late.count(), 0);
  EXPECT_TRUE(comes_true([&] { return tier.stats().running == 2; }));
  EXPECT_EQ(tier.stats().queued, 1) << "summed, and waits for its turn";
  gate.open();
  for (const DiskResult& result : still.wait_for(2)) EXPECT_EQ(result.outcome, DiskOutcome::ok);
  EXPECT_EQ(late.wait_for(1).at(0).outcome, DiskOutcome::ok);
}

TEST_F(LargeBlocks, NoMoreIsSummedThanTheDiskIsAboutToTake) {
  DiskSlots& tier = world.open();
  world.files->set_plan(gate.plan("write"));
  Ended ended, wrong;
  for (SlotIndex slot = 0; slot < 3; ++slot) {
    ASSERT_EQ(try_put(slot, ended.done()), DiskSubmit::accepted);
    ASSERT_TRUE(gate.has_seen(1));
  }
  ASSERT_EQ(try_put(3, wrong.done(), 1), DiskSubmit::accepted);
  // A sum takes a fraction of a millisecond.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(wrong.count(), 0);
  EXPECT_EQ(tier.stats().queued, 3);
  gate.open();
  EXPECT_EQ(wrong.wait_for(1).at(0).outcome, DiskOutcome::bad_data_sum);
  for (const DiskResult& result : ended.wait_for(3)) EXPECT_EQ(result.outcome, DiskOutcome::ok);
}

// Small ones are not summed apart, and wait in another list.
TEST_F(LargeBlocks, SmallAndLargeOnesAreWrittenInTheOrderInWhichTheyCame) {
  DiskSlots& tier = world.open();
  std::mutex mutex;
  std::vector<std::uint64_t> order;
  world.files->set_plan([&, held = gate.plan("write")](const MemoryFiles::Call& call) {
    if (std::string_view(call.what) == "write") {
      const std::lock_guard lock(mutex);
      order.push_back(call.at / slot_bytes);
    }
    return held(call);
  });
  Ended ended, wrong;
  ASSERT_EQ(try_put(0, ended.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  ASSERT_EQ(try_put(1, ended.done()), DiskSubmit::accepted);
  ASSERT_EQ(tier.try_erase(5, ended.done()), DiskSubmit::accepted);
  ASSERT_EQ(try_put(4, wrong.done(), 1), DiskSubmit::accepted);
  EXPECT_EQ(wrong.wait_for(1).at(0).outcome, DiskOutcome::bad_data_sum);  // so 1 is summed
  ASSERT_EQ(try_put(2, ended.done()), DiskSubmit::accepted);
  ASSERT_EQ(tier.try_erase(3, ended.done()), DiskSubmit::accepted);
  gate.open();
  for (const DiskResult& result : ended.wait_for(5)) EXPECT_EQ(result.outcome, DiskOutcome::ok);
  world.files->set_plan(nullptr);
  ASSERT_EQ(order.size(), 5U);
  // The third may be summed too late to be before the last.
  EXPECT_EQ(std::vector(order.begin(), order.begin() + 3), (std::vector<std::uint64_t>{0, 1, 5}));
}

TEST_F(LargeBlocks, WhatWasReadIsVerifiedWhileTheDiskStandsStill) {
  world.options.workers = 1;
  world.open();
  const std::uint64_t first = put(0), second = put(1);
  Buffer one(payload), other(payload);
  Ended soon, late;
  world.files->set_plan(gate.plan("read", 1));
  ASSERT_EQ(try_get(0, first, one, soon.done()), DiskSubmit::accepted);
  ASSERT_EQ(try_get(1, second, other, late.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(2));
  EXPECT_EQ(soon.wait_for(1).at(0).outcome, DiskOutcome::ok);
  EXPECT_TRUE(one.holds(7, 7, payload));
  EXPECT_EQ(late.count(), 0);
  gate.open();
  EXPECT_EQ(late.wait_for(1).at(0).outcome, DiskOutcome::ok);
}

TEST_F(LargeBlocks, WhatIsSummedAndWaitsForItsTurnIsInTheQueue) {
  world.options.max_queued = 2;
  DiskSlots& tier = world.open();
  world.files->set_plan(gate.plan("write"));
  Ended ended, wrong;
  ASSERT_EQ(try_put(0, ended.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  ASSERT_EQ(try_put(1, ended.done()), DiskSubmit::accepted);
  ASSERT_EQ(try_put(2, wrong.done(), 1), DiskSubmit::accepted);
  EXPECT_EQ(wrong.wait_for(1).at(0).outcome, DiskOutcome::bad_data_sum);  // so 1 is summed
  EXPECT_EQ(tier.stats().queued, 1);
  ASSERT_EQ(try_put(3, ended.done()), DiskSubmit::accepted);
  EXPECT_EQ(try_put(4, ended.done()), DiskSubmit::full);
  EXPECT_EQ(tier.stats().queued, 2);
  EXPECT_EQ(tier.stats().peak_queued, 2);
  gate.open();
  for (const DiskResult& result : ended.wait_for(3)) EXPECT_EQ(result.outcome, DiskOutcome::ok);
}

// Summed or not: the disk has not been asked for it.
TEST_F(LargeBlocks, WhatWaitsForItsTurnIsTimedOut) {
  world.options.stall_after = std::chrono::milliseconds(200);
  Ended waiting;
  // Again where a slow machine let the first call stall before the second came.
  for (DiskSubmit answer = DiskSubmit::degraded; answer != DiskSubmit::accepted;) {
    FileGate calls;
    world.files->set_plan(nullptr);
    world.open();
    world.files->set_plan(calls.plan("write"));
    ASSERT_EQ(try_put(1, nullptr), DiskSubmit::accepted);
    EXPECT_TRUE(calls.has_seen(1));
    answer = try_put(2, waiting.done());
    EXPECT_TRUE(answer != DiskSubmit::accepted ||
                comes_true([&] { return world.tier->expire() == 1; }));
    calls.open();
    world.tier->close(std::chrono::hours(1));
  }
  EXPECT_EQ(waiting.wait_for(1).at(0).outcome, DiskOutcome::timed_out);
}

TEST_F(LargeBlocks, ClosingTellsWhatIsSummedAndWaitsForItsTurn) {
  DiskSlots& tier = world.open();
  const std::uint64_t generation = put(5);
  world.files->set_plan(gate.plan("write"));
  Ended running, waiting, read;
  Buffer target(payload);
  ASSERT_EQ(try_put(0, running.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  ASSERT_EQ(try_put(1, waiting.done()), DiskSubmit::accepted);
  Ended wrong;
  ASSERT_EQ(try_put(4, wrong.done(), 1), DiskSubmit::accepted);
  EXPECT_EQ(wrong.wait_for(1).at(0).outcome, DiskOutcome::bad_data_sum);  // so 1 is summed
  ASSERT_EQ(try_get(5, generation, target, read.done()), DiskSubmit::accepted);
  ASSERT_TRUE(comes_true([&] { return tier.stats().running == 1; }));
  const DiskCloseReport report = tier.close(std::chrono::nanoseconds(0));
  EXPECT_EQ(report.dropped, 2);
  EXPECT_EQ(report.running, 1);
  EXPECT_EQ(waiting.wait_for(1).at(0).outcome, DiskOutcome::closed);
  EXPECT_EQ(read.wait_for(1).at(0).outcome, DiskOutcome::closed);
  gate.open();
  EXPECT_EQ(tier.close(std::chrono::hours(1)).running, 0);
  EXPECT_EQ(running.wait_for(1).at(0).outcome, DiskOutcome::ok);
}

TEST_F(LargeBlocks, ClosingTellsWhatIsNotSummedYetOrJustNow) {
  DiskSlots& tier = world.open();
  world.files->set_plan(gate.plan("write"));
  Ended running, waiting;
  ASSERT_EQ(try_put(0, running.done()), DiskSubmit::accepted);
  ASSERT_TRUE(gate.has_seen(1));
  for (SlotIndex slot = 1; slot < 5; ++slot)
    ASSERT_EQ(try_put(slot, waiting.done()), DiskSubmit::accepted);
  const DiskCloseReport report = tier.close(std::chrono::nanoseconds(0));
  EXPECT_GE(report.dropped, 3);  // at most one is just being summed
  EXPECT_LE(report.dropped, 4);
  EXPECT_GE(report.running, 1);
  for (const DiskResult& result : waiting.wait_for(4))
    EXPECT_EQ(result.outcome, DiskOutcome::closed);
  gate.open();
  EXPECT_EQ(tier.close(std::chrono::hours(1)).running, 0);
  EXPECT_EQ(running.wait_for(1).at(0).outcome, DiskOutcome::ok);
}

}  // namespace
}  // namespace kvmem::test
