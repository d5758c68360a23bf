// The process is killed, or the power fails: what is read after that is right, and every slot is
// still there to be used.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "support/sanitizers.hpp"
#include "tier/disk_world.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t payload = 8192;

struct Tally {
  std::uint64_t right = 0, missed = 0, torn = 0;
};

// Reads all that was found. Bytes follow from key and generation, the key is that of number
// `slot` or more: see writers below.
void read_all(DiskSlots& tier, Tally& tally) {
  Buffer target(payload);
  std::vector<bool> seen(tier.capacity());
  for (const FoundSlot& found : tier.take_found()) {
    ASSERT_FALSE(seen.at(found.slot));
    seen[found.slot] = true;
    std::uint64_t number = 0;
    std::memcpy(&number, found.key.bytes.data(), sizeof number);
    target.fill(1, 2, payload);
    const DiskResult result =
        read(tier, found.slot, record_of(found.key, payload), found.generation, target.data());
    if (result.outcome == DiskOutcome::ok) {
      ASSERT_TRUE(target.holds(number, found.generation, payload));
      ++tally.right;
    } else {
      ASSERT_EQ(result.outcome, DiskOutcome::bad_data_sum);
      ++tally.missed;
    }
  }
  tally.torn += tier.stats().scanned[static_cast<std::size_t>(DiskOutcome::torn)];
}

// By the block bytes of the tier. Of small slots a start reads all, of large ones both ends, and
// what is smaller than its slot does not reach to the end.
struct PowerCutTest : testing::TestWithParam<std::size_t> {
  static constexpr std::size_t slots = 10;
  struct Written {
    SlotIndex slot;
    std::uint64_t key, generation;
    std::size_t begun, done;  // steps
  };
  World world;
  std::vector<Written> written;

  void run(DiskSync sync) {
    world.options.block_bytes = GetParam();
    world.options.capacity_bytes = slots * (GetParam() + 2 * disk_page_bytes);
    world.options.sync = sync;
    DiskSlots& tier = world.open();
    std::mt19937 random(4);
    for (std::uint64_t generation = 1; generation <= 100; ++generation) {
      const auto slot = static_cast<SlotIndex>(random() % slots);
      const std::uint64_t key = slot + slots * (random() % 3);
      world.buffer.fill(key, generation, payload);
      const std::size_t begun = world.files->steps();
      const DiskResult result =
          write(tier, slot, record_of(key_of(key), payload), world.buffer.data());
      ASSERT_EQ(result.outcome, DiskOutcome::ok);
      ASSERT_EQ(result.generation, generation);
      written.push_back({slot, key, generation, begun, world.files->steps()});
    }
  }

  // Opens what a power cut leaves.
  void cut_after(std::size_t steps, unsigned seed, unsigned of, World& cut) const {
    cut.options = world.options;
    cut.options.files = cut.files = world.files->after_power_cut(steps, seed, of);
    cut.open();
  }

  static void every_slot_can_be_used(World& cut) {
    DiskSlots& tier = cut.open();
    ASSERT_EQ(tier.capacity(), slots);
    for (SlotIndex slot = 0; slot < slots; ++slot) {
      const DiskResult put = cut.put(slot);
      ASSERT_EQ(put.outcome, DiskOutcome::ok);
      ASSERT_EQ(cut.get(slot, put.generation).outcome, DiskOutcome::ok);
    }
  }
};

TEST_P(PowerCutTest, LeavesNoWrongBytesWhateverWasLostOrReordered) {
  run(DiskSync::never);
  Tally tally;
  unsigned points = 0;
  for (std::size_t steps = 0; steps <= world.files->steps(); steps += sanitized ? 7 : 1) {
    for (const unsigned one_of : {2U, 8U, 100U}) {
      World cut;
      cut_after(steps, ++points, one_of, cut);
      ASSERT_NO_FATAL_FAILURE(read_all(*cut.tier, tally)) << steps << " of " << one_of;
      if (points % 10 != 0) continue;
      ASSERT_NO_FATAL_FAILURE(every_slot_can_be_used(cut));
    }
  }
  EXPECT_GE(points, sanitized ? 150U : 1000U);
  // The cuts do bite: headers without their data, and writes that never ended.
  EXPECT_GT(tally.right, points);
  EXPECT_GT(tally.missed, points);
  EXPECT_GT(tally.torn, points);
}

TEST_P(PowerCutTest, LosesNothingThatWasSyncedWithItsWrite) {
  run(DiskSync::each_write);
  for (std::size_t steps = written[0].begun; steps <= world.files->steps();
       steps += thread_sanitized ? 7 : 1) {
    World cut;
    cut_after(steps, static_cast<unsigned>(steps), 2, cut);
    DiskSlots& tier = *cut.tier;
    std::vector<const Written*> safe(slots);
    for (const Written& one : written) {
      if (one.begun < steps) safe[one.slot] = one.done <= steps ? &one : nullptr;
    }
    for (const Written* one : safe) {
      if (one == nullptr) continue;
      ASSERT_EQ(read(tier, one->slot, record_of(key_of(one->key), payload), one->generation,
                     cut.buffer.data())
                    .outcome,
                DiskOutcome::ok);
      ASSERT_TRUE(cut.buffer.holds(one->key, one->generation, payload));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(SlotsReadWholeAndAtBothEnds, PowerCutTest,
                         testing::Values(payload, std::size_t{48} << 10));

// --- SIGKILL
// --------------------------------------------------------------------------------------

DiskOptions real_options(const Folder& folder) {
  return {.path = folder.tier(),
          .block_bytes = payload,
          .capacity_bytes = 16 * World::slot_bytes,
          .workers = 2};
}

// Writes until it is killed; tells through the pipe that it has begun.
[[noreturn]] void write_for_ever(const DiskOptions& options, int pipe, unsigned seed) {
  DiskSlots tier(options);
  std::mt19937 random(seed);
  std::vector<Buffer> buffers(tier.capacity(), Buffer(payload));
  std::atomic<std::uint64_t> erased{0};
  if (tier.try_erase(0, [&](const DiskResult& r) { erased = r.generation; }) !=
      DiskSubmit::accepted)
    _exit(1);
  while (erased == 0) {
  }
  if (::write(pipe, "x", 1) != 1) _exit(1);
  for (std::uint64_t generation = erased + 1;; ++generation) {
    for (;;) {
      const auto slot = static_cast<SlotIndex>(random() % tier.capacity());
      const std::uint64_t key = slot + tier.capacity() * (random() % 2);
      Buffer fresh(payload);
      fresh.fill(key, generation, payload);
      const auto lent = std::make_shared<Buffer>(std::move(fresh));
      if (tier.try_write(slot, record_of(key_of(key), payload), lent->data(),
                         [lent](const DiskResult&) {}) == DiskSubmit::accepted)
        break;
    }
  }
}

TEST(Crash, AWriterKilledAtAnyMomentLeavesNoWrongBytes) {
  if (thread_sanitized) GTEST_SKIP() << "a forked child starts threads";
  const Folder folder;
  const DiskOptions options = real_options(folder);
  std::mt19937 random(11);
  Tally tally;
  for (unsigned round = 0; round < (sanitized ? 60 : 300); ++round) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t writer = fork();
    if (writer == 0) write_for_ever(options, ends[1], round);
    close(ends[1]);
    char begun = 0;
    ASSERT_EQ(::read(ends[0], &begun, 1), 1) << "the writer could not begin";
    close(ends[0]);
    usleep(static_cast<useconds_t>(random() % 3000));
    ASSERT_EQ(kill(writer, SIGKILL), 0);
    ASSERT_EQ(waitpid(writer, nullptr, 0), writer);
    DiskSlots tier(options);
    ASSERT_EQ(tier.stats().why_empty, round == 0 ? tier.stats().why_empty : "");
    ASSERT_NO_FATAL_FAILURE(read_all(tier, tally));
    // Killed, not cut off from power: what is incomplete is known to be.
    ASSERT_EQ(ended(tier.stats().reads, DiskOutcome::bad_data_sum), 0);
  }
  EXPECT_GT(tally.right, 60U);
  std::uintmax_t bytes = 0;  // Public failure 117: nothing piles up
  for (const auto& entry : std::filesystem::directory_iterator(options.path))
    if (entry.path().extension() == ".kv") bytes += entry.file_size();
  EXPECT_EQ(bytes, options.capacity_bytes);
}

}  // namespace
}  // namespace kvmem::test
