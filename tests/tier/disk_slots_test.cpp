#include "tier/disk_slots.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <set>
#include <tuple>
#include <unordered_map>

#include <gtest/gtest.h>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "support/child_process.hpp"
#include "support/sanitizers.hpp"
#include "tier/disk_world.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t block_bytes = 100 * 1000;  // no whole number of pages

struct RealFiles : testing::TestWithParam<bool> {
  Folder folder;
  DiskOptions options{.path = folder.tier(),
                      .block_bytes = block_bytes,
                      .capacity_bytes = std::size_t{4} << 20,
                      .key_bytes = key_bytes,
                      .direct = GetParam()};
};
INSTANTIATE_TEST_SUITE_P(DirectAndBuffered, RealFiles, testing::Bool(),
                         [](const auto& one) { return one.param ? "Direct" : "Buffered"; });

std::size_t open_descriptors() {
  const auto all = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

// Public failure 121: the folder did not exist. Public failure 120: it shows what it wrote.
TEST_P(RealFiles, WhatWasWrittenIsReadNowAndAfterAStart) {
  std::vector<std::uint64_t> generations;
  {
    DiskSlots tier(options);
    EXPECT_EQ(tier.stats().why_empty, "it is new");
    EXPECT_EQ(tier.stats().direct || !tier.stats().why_not_direct.empty(), true);
    Buffer buffer(block_bytes);
    for (SlotIndex slot = 0; slot < tier.capacity(); ++slot) {
      buffer.fill(slot, 0, block_bytes);
      const DiskResult result =
          write(tier, slot, record_of(key_of(slot), block_bytes, slot % 3), buffer.data());
      ASSERT_EQ(result.outcome, DiskOutcome::ok);
      generations.push_back(result.generation);
    }
    EXPECT_EQ(tier.stats().writes.bytes, tier.capacity() * block_bytes);
  }
  DiskSlots tier(options);
  const std::vector<FoundSlot> found = tier.take_found();
  ASSERT_EQ(found.size(), tier.capacity());
  EXPECT_EQ(tier.stats().recovered, tier.capacity());
  EXPECT_TRUE(tier.take_found().empty());
  Buffer buffer(block_bytes);
  for (SlotIndex slot = 0; slot < tier.capacity(); ++slot) {  // oldest first
    EXPECT_EQ(found[slot].slot, slot);
    EXPECT_EQ(found[slot].key, key_of(slot));
    EXPECT_EQ(found[slot].group, slot % 3);
    EXPECT_EQ(found[slot].generation, generations[slot]);
    ASSERT_EQ(read(tier, slot, record_of(found[slot].key, block_bytes, slot % 3),
                   found[slot].generation, buffer.data())
                  .outcome,
              DiskOutcome::ok);
    EXPECT_TRUE(buffer.holds(slot, 0, block_bytes));
  }
  EXPECT_GT(write(tier, 0, record_of(key_of(0), block_bytes), buffer.data()).generation,
            generations.back());
}

// Public failure 109: it fills the disk. Public failure 111: descriptors leak.
TEST_P(RealFiles, FilesAndDescriptorsStayAsTheyWereMade) {
  DiskSlots tier(options);
  const auto bytes = [&] {
    std::uintmax_t sum = 0;
    for (const auto& entry : std::filesystem::directory_iterator(options.path))
      sum += entry.file_size();
    return sum;
  };
  const auto bytes_before = bytes();
  const auto descriptors_before = open_descriptors();
  EXPECT_LE(bytes_before, options.capacity_bytes + 2 * disk_page_bytes);
  Buffer buffer(block_bytes);
  for (unsigned i = 0; i < 200; ++i)
    ASSERT_EQ(
        write(tier, i % tier.capacity(), record_of(key_of(i), block_bytes), buffer.data()).outcome,
        DiskOutcome::ok);
  EXPECT_EQ(bytes(), bytes_before);
  EXPECT_EQ(open_descriptors(), descriptors_before);
}

// Public failure 119: too many open files.
TEST_P(RealFiles, AShortageOfDescriptorsHurtsNoRead) {
  if (sanitized && !thread_sanitized)
    GTEST_SKIP() << "UBSan opens a pipe to look at an object, and takes a refusal for a bad one";
  EXPECT_TRUE(true_in_child([&] {
    DiskSlots tier(options);
    Buffer buffer(block_bytes);
    const DiskResult put = write(tier, 3, record_of(key_of(3), block_bytes), buffer.data());
    const rlimit none{3, 3};
    if (setrlimit(RLIMIT_NOFILE, &none) != 0 || dup(0) >= 0) return false;
    for (int i = 0; i < 200; ++i)
      if (read(tier, 3, record_of(key_of(3), block_bytes), put.generation, buffer.data()).outcome !=
          DiskOutcome::ok)
        return false;
    return true;
  }));
}

TEST_P(RealFiles, OneTierAtATimeHasTheFolder) {
  const auto refused = [&](const std::string& by) {
    try {
      DiskSlots second(options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what()).find("in use by process " + by) != std::string::npos;
    }
    return false;
  };
  {
    DiskSlots tier(options);
    const std::string us = std::to_string(getpid());
    EXPECT_TRUE(refused(us));
    EXPECT_TRUE(true_in_child([&] { return refused(us); }));
  }
  EXPECT_NO_THROW(DiskSlots{options});
}

TEST_P(RealFiles, AForkedChildCannotUseItAndHarmsNothing) {
  DiskSlots tier(options);
  Buffer buffer(block_bytes);
  EXPECT_TRUE(true_in_child([&] {
    try {
      static_cast<void>(tier.stats());
      return false;
    } catch (const Forked&) {
    }
    tier.~DiskSlots();
    return true;
  }));
  EXPECT_EQ(write(tier, 0, record_of(key_of(0), block_bytes), buffer.data()).outcome,
            DiskOutcome::ok);
}

TEST_P(RealFiles, ATierOfAnotherCapacityKeepsWhatStillFits) {
  options.file_bytes = 1 << 20;  // several files
  const std::size_t whole = options.capacity_bytes;
  Buffer buffer(block_bytes);
  {
    DiskSlots tier(options);
    for (SlotIndex slot = 0; slot < tier.capacity(); ++slot)
      ASSERT_EQ(write(tier, slot, record_of(key_of(slot), block_bytes), buffer.data()).outcome,
                DiskOutcome::ok);
  }
  options.capacity_bytes = whole / 3;
  std::size_t kept = 0;
  {
    DiskSlots tier(options);
    kept = tier.capacity();
    EXPECT_EQ(tier.take_found().size(), kept);
    EXPECT_FALSE(std::filesystem::exists(options.path + "/slots-0003.kv"));
  }
  options.capacity_bytes = whole;
  DiskSlots tier(options);
  EXPECT_GT(tier.capacity(), kept);
  EXPECT_EQ(tier.take_found().size(), kept);
}

// Public failure 121: whatever is wrong with the path is said when it is opened.
TEST_P(RealFiles, APathThatCannotBeATierIsRefused) {
  const auto refuses = [&](const std::string& path) {
    options.path = path;
    try {
      DiskSlots tier(options);
    } catch (const InvalidArgument&) {
      return true;
    }
    return false;
  };
  std::ofstream(folder.path() + "/file") << "text";
  EXPECT_TRUE(refuses(folder.path() + "/file"));
  EXPECT_TRUE(refuses(folder.path() + "/file/below"));
  EXPECT_TRUE(refuses(folder.path()));  // holds a file that is none of ours
  EXPECT_TRUE(refuses(""));
  if (geteuid() == 0) {
    const std::string theirs = folder.path() + "/theirs";
    std::filesystem::create_directory(theirs);
    ASSERT_EQ(chown(theirs.c_str(), 12345, 12345), 0);
    EXPECT_TRUE(refuses(theirs));
  }
  EXPECT_FALSE(refuses(folder.path() + "/made/in/between/"));
}

TEST_P(RealFiles, MoreThanTheFileSystemHasIsRefusedBeforeItIsFilled) {
  options.block_bytes = std::size_t{1} << 20;
  options.capacity_bytes = std::size_t{1} << 46;
  options.file_bytes = std::size_t{1} << 43;
  try {
    DiskSlots tier(options);
    FAIL();
  } catch (const CapacityError& error) {
    EXPECT_GT(error.shortage.wanted, error.shortage.free);
    EXPECT_GT(error.shortage.free, 0U);
  }
  EXPECT_FALSE(std::filesystem::exists(options.path + "/slots-0000.kv"));
}

TEST(DiskSlotsOptions, AreRefusedByName) {
  World world;
  const auto refusal = [&](auto change) {
    DiskOptions options = world.options;
    change(options);
    try {
      DiskSlots tier(options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("taken");
  };
  using O = DiskOptions;
  EXPECT_NE(refusal([](O& o) { o.block_bytes = 0; }).find("block_bytes is 0"), std::string::npos);
  EXPECT_NE(refusal([](O& o) { o.key_bytes = 65; }).find("key_bytes is 65"), std::string::npos);
  EXPECT_NE(refusal([](O& o) { o.key_bytes = 0; }).find("key_bytes is 0"), std::string::npos);
  EXPECT_NE(refusal([](O& o) { o.workers = -1; }).find("workers is -1"), std::string::npos);
  EXPECT_NE(refusal([](O& o) { o.max_queued = 0; }).find("max_queued"), std::string::npos);
  EXPECT_EQ(refusal([](O&) {}), "taken");
  world.options.capacity_bytes = World::slot_bytes - 1;
  try {
    world.open();
    FAIL();
  } catch (const CapacityError& error) {
    EXPECT_EQ(error.shortage.wanted, World::slot_bytes);
  }
}

TEST(DiskSlotsCalls, ThatCannotBeRightAreRefusedAndChangeNothing) {
  World world;
  DiskSlots& tier = world.open();
  const DiskKey key = key_of(1);
  const DiskRecord good = record_of(key, World::payload);
  std::byte* const data = world.buffer.data();
  EXPECT_THROW((void)tier.try_write(20, good, data, nullptr), InvalidArgument);
  EXPECT_THROW((void)tier.try_erase(20, nullptr), InvalidArgument);
  EXPECT_THROW((void)tier.try_write(0, record_of(key, World::payload + 1), data, nullptr),
               InvalidArgument);
  EXPECT_THROW((void)tier.try_write(0, record_of(key, 0), data, nullptr), InvalidArgument);
  EXPECT_THROW(
      (void)tier.try_write(0, {.key = std::span(key.bytes), .payload_bytes = 8}, data, nullptr),
      InvalidArgument);
  // Public failure 108: less aligned than it must be.
  EXPECT_THROW((void)tier.try_write(0, good, data + 64, nullptr), InvalidArgument);
  EXPECT_THROW((void)tier.try_read(0, good, 1, data + 64, nullptr), InvalidArgument);
  EXPECT_THROW((void)tier.try_read(0, good, 1, nullptr, nullptr), InvalidArgument);
  EXPECT_EQ(tier.stats().writes.calls, 0);
  EXPECT_EQ(world.put(0).generation, 1);
}

TEST(DiskSlotsCalls, ReadFromASlotThatWasNeverWrittenMiss) {
  World world;
  world.open();
  EXPECT_EQ(world.get(0, 1).outcome, DiskOutcome::empty);
}

TEST(DiskSlotsCalls, AnErasedSlotIsEmptyNowAndAfterAStart) {
  World world;
  DiskSlots& tier = world.open();
  const std::uint64_t generation = world.put(2).generation;
  Ended ended;
  ASSERT_EQ(tier.try_erase(2, ended.done()), DiskSubmit::accepted);
  EXPECT_EQ(ended.wait_for(1)[0].outcome, DiskOutcome::ok);
  EXPECT_EQ(world.get(2, generation).outcome, DiskOutcome::empty);
  EXPECT_TRUE(world.open().take_found().empty());
}

TEST(DiskSlotsCalls, NoGenerationIsGivenTwiceAfterAnErasureAndAStart) {
  World world;
  DiskSlots& tier = world.open();
  ASSERT_EQ(world.put(2).outcome, DiskOutcome::ok);
  Ended ended;
  ASSERT_EQ(tier.try_erase(2, ended.done()), DiskSubmit::accepted);
  const std::uint64_t erased = ended.wait_for(1)[0].generation;
  world.open();
  EXPECT_GT(world.put(1).generation, erased);
}

// Public failure 118: one key, stored twice.
TEST(DiskSlotsRecovery, OfAKeyInTwoSlotsOnlyTheLatestIsFound) {
  World world;
  DiskSlots& tier = world.open();
  const DiskKey key = key_of(1);
  for (const SlotIndex slot : {8U, 3U, 5U, 0U})
    ASSERT_EQ(
        write(tier, slot, record_of(key, World::payload, slot == 0), world.buffer.data()).outcome,
        DiskOutcome::ok);
  const std::vector<FoundSlot> found = world.open().take_found();
  ASSERT_EQ(found.size(), 2);
  EXPECT_EQ(found[0].slot, 5);
  EXPECT_EQ(found[1].slot, 0);  // of another group
  EXPECT_EQ(world.tier->stats().superseded, 2);
}

// The scan sorts by a sum of 32 bits.
TEST(DiskSlotsRecovery, KeysWithEqualSumsAreToldApart) {
  const auto sum_of = [](std::uint64_t number) {
    return crc32c(0, key_of(number).bytes.data(), disk_key_bytes_max);
  };
  std::unordered_map<std::uint32_t, std::uint64_t> seen;
  std::uint64_t one = 0, other = 0;
  for (std::uint64_t at = 1; other == 0; ++at) {
    const std::uint64_t number = at * 0x9E3779B97F4A7C15U;
    const auto [place, is_new] = seen.try_emplace(sum_of(number), number);
    if (!is_new) std::tie(one, other) = std::pair(place->second, number);
  }
  World world;
  DiskSlots& tier = world.open();
  for (const SlotIndex slot : {4U, 1U, 9U, 6U})  // the newest of each is in 9 or 6
    ASSERT_EQ(write(tier, slot, record_of(key_of(slot % 2 == 0 ? one : other), World::payload),
                    world.buffer.data())
                  .outcome,
              DiskOutcome::ok);
  const std::vector<FoundSlot> found = world.open().take_found();
  ASSERT_EQ(found.size(), 2);
  EXPECT_EQ(found[0].slot, 9);
  EXPECT_EQ(found[0].key, key_of(other));
  EXPECT_EQ(found[1].slot, 6);
  EXPECT_EQ(found[1].key, key_of(one));
}

// Public failure 117: begin empty, and nothing of what was is there.
TEST(DiskSlotsRecovery, IsSkippedOnRequest) {
  World world;
  world.open();
  const std::uint64_t generation = world.put(1).generation;
  world.options.keep = false;
  EXPECT_TRUE(world.open().take_found().empty());
  EXPECT_EQ(world.tier->stats().why_empty, "asked for");
  EXPECT_EQ(world.get(1, generation).outcome, DiskOutcome::foreign_tier);
}

TEST(DiskSlotsRecovery, ReportsProgressAndIsCancelled) {
  World world;
  std::vector<std::size_t> seen;
  world.options.progress = [&](std::size_t done, std::size_t total) {
    EXPECT_EQ(total, 20);
    seen.push_back(done);
    return true;
  };
  world.open();
  EXPECT_FALSE(seen.empty());
  world.options.progress = [](std::size_t, std::size_t) { return false; };
  EXPECT_THROW(world.open(), Cancelled);
  world.options.progress = [](std::size_t, std::size_t) -> bool { throw NotDone("a signal"); };
  world.options.capacity_bytes = 2000 * World::slot_bytes;  // several threads
  EXPECT_THROW(world.open(), NotDone);
  world.options.progress = nullptr;
  EXPECT_NO_THROW(world.open());
}

TEST(DiskSlotsRecovery, OfManySmallSlotsFindsEachOfThem) {
  World world;
  world.options.block_bytes = 4096;
  world.options.capacity_bytes = 3000 * 12288;
  world.options.file_bytes = 1000 * 12288 - 4096;  // pieces end in the middle of files
  DiskSlots& tier = world.open();
  ASSERT_EQ(tier.capacity(), 3000);
  for (SlotIndex slot = 0; slot < 3000; slot += 7)
    ASSERT_EQ(write(tier, slot, record_of(key_of(slot), 4096), world.buffer.data()).outcome,
              DiskOutcome::ok);
  const std::vector<FoundSlot> found = world.open().take_found();
  ASSERT_EQ(found.size(), 3000 / 7 + 1);
  for (const FoundSlot& one : found) EXPECT_EQ(one.key, key_of(one.slot));
}

// It has more threads than that, for the sums.
TEST(DiskSlots, MakesNoMoreCallsAtATimeThanItWasAllowed) {
  World world;
  world.options.workers = 4;
  DiskSlots& tier = world.open();
  std::atomic<int> inside{0}, most{0};
  std::atomic<bool> open{false};
  world.files->set_plan([&](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
    if (std::string(call.what) != "write") return std::nullopt;
    const int now = ++inside;
    for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {
    }
    open.wait(false);
    --inside;
    return std::nullopt;
  });
  Ended ended;
  for (SlotIndex slot = 0; slot < tier.capacity(); ++slot) {
    const DiskKey key = key_of(slot);
    ASSERT_EQ(
        tier.try_write(slot, record_of(key, World::payload), world.buffer.data(), ended.done()),
        DiskSubmit::accepted);
  }
  EXPECT_TRUE(comes_true([&] { return inside == 4 && tier.stats().running == 4; }));
  open = true;
  open.notify_all();
  for (const DiskResult& each : ended.wait_for(tier.capacity()))
    EXPECT_EQ(each.outcome, DiskOutcome::ok);
  world.files->set_plan(nullptr);
  EXPECT_EQ(most, 4);
}

TEST(DiskSlots, WhatNoLongerHasItsSumIsNotWritten) {
  World world;
  DiskSlots& tier = world.open();
  const DiskResult before = world.put(2);
  world.buffer.fill(2, 5, World::payload);
  const DiskKey key = key_of(2);
  DiskRecord record = record_of(key, World::payload);
  record.payload_sum = crc32c(0, world.buffer.data(), World::payload) + 1;
  EXPECT_EQ(write(tier, 2, record, world.buffer.data()).outcome, DiskOutcome::bad_data_sum);
  EXPECT_EQ(tier.stats().degraded, std::nullopt);
  EXPECT_EQ(ended(tier.stats().writes, DiskOutcome::bad_data_sum), 1);
  EXPECT_FALSE(tier.is_retired(2));
  EXPECT_EQ(world.get(2, before.generation).outcome, DiskOutcome::ok) << "as it was";

  world.buffer.fill(2, 0, World::payload);
  record.payload_sum = crc32c(0, world.buffer.data(), World::payload);
  const DiskResult after = write(tier, 2, record, world.buffer.data());
  EXPECT_EQ(after.outcome, DiskOutcome::ok);
  const DiskResult got = world.get(2, after.generation);
  EXPECT_EQ(got.outcome, DiskOutcome::ok);
  EXPECT_EQ(got.payload_sum, record.payload_sum);
}

// Of large slots the scan reads the two ends, and the end of one together with the beginning of the
// next: what cannot be read or is torn must cost that slot only.
struct LargeSlots : testing::Test {
  static constexpr std::size_t block = std::size_t{64} << 10, slot_bytes = block + 8192;
  static constexpr SlotIndex slots = 30;
  World world;
  std::set<SlotIndex> expected;

  void SetUp() override {
    world.options.block_bytes = block;
    world.options.capacity_bytes = slots * slot_bytes;
    world.options.file_bytes = 10 * slot_bytes;
    world.buffer = Buffer(block);
    DiskSlots& tier = world.open();
    for (SlotIndex slot = 0; slot < slots; ++slot) {
      ASSERT_EQ(
          write(tier, slot, record_of(key_of(slot), bytes_of(slot)), world.buffer.data()).outcome,
          DiskOutcome::ok);
      expected.insert(slot);
    }
    world.tier.reset();
  }
  static std::size_t bytes_of(SlotIndex slot) { return slot % 4 == 1 ? 5000 : block; }
  static std::string path_of(SlotIndex slot) {
    return "/tier/slots-000" + std::to_string(slot / 10) + ".kv";
  }
  static std::size_t offset_of(SlotIndex slot) { return slot % 10 * slot_bytes; }
  // Of the header behind the payload.
  static std::size_t last_page_of(SlotIndex slot) {
    return offset_of(slot) + 4096 + round_up(bytes_of(slot), 4096);
  }
  void flip(SlotIndex slot, std::size_t offset) {
    world.files->contents(path_of(slot))[offset] ^= std::byte{1};
  }
  void is_found(DiskOutcome outcome, SlotIndex of) {
    std::set<SlotIndex> found;
    for (const FoundSlot& one : world.open().take_found()) {
      EXPECT_EQ(one.key, key_of(one.slot));
      EXPECT_EQ(one.payload_bytes, bytes_of(one.slot));
      found.insert(one.slot);
    }
    EXPECT_EQ(found, expected);
    EXPECT_EQ(world.tier->stats().scanned[static_cast<std::size_t>(outcome)], of);
  }
  // With that page of it unreadable.
  void is_retired_alone(SlotIndex slot, std::size_t page) {
    world.files->set_plan([=](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
      const bool there =
          call.path == path_of(slot) && call.at <= page && page < call.at + call.bytes;
      return there && std::string(call.what) == "read" ? std::optional(-EIO) : std::nullopt;
    });
    expected.erase(slot);
    is_found(DiskOutcome::io_error, 1);
    EXPECT_TRUE(world.tier->is_retired(slot));
    EXPECT_EQ(world.tier->stats().retired, 1);
    expected.insert(slot);
  }
};

TEST_F(LargeSlots, AreAllFound) { is_found(DiskOutcome::ok, slots); }

TEST_F(LargeSlots, WithoutTheSameHeaderBehindThePayloadAreTorn) {
  for (const SlotIndex slot : {0U, 1U, 9U, 13U, 14U, 29U}) {
    flip(slot, last_page_of(slot) + 3000);
    expected.erase(slot);
  }
  is_found(DiskOutcome::torn, 6);
}

TEST_F(LargeSlots, WhoseEndCannotBeReadAreRetiredAlone) {
  for (const SlotIndex slot : {4U, 5U, 9U}) is_retired_alone(slot, last_page_of(slot));
}

TEST_F(LargeSlots, WhoseBeginningCannotBeReadAreRetiredAlone) {
  for (const SlotIndex slot : {0U, 6U, 10U, 29U}) is_retired_alone(slot, offset_of(slot));
}

}  // namespace
}  // namespace kvmem::test
