// A volume opened while something fails, and one made anew beside calls on the former.
#include <cstring>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "tier/disk_world.hpp"
#include "tier/file_gate.hpp"

namespace kvmem::test {
namespace {

using Call = MemoryFiles::Call;

// Calls of a kind on one slot, or on one file; they stand at the gate first where there is one.
MemoryFiles::Plan refuse(const char* what, const std::string& path, std::uint64_t at, int error,
                         FileGate* gate = nullptr) {
  return [=, hold = gate == nullptr ? nullptr : gate->plan(what)](
             const Call& call) -> std::optional<std::int64_t> {
    if (std::strcmp(call.what, what) != 0 || call.path != path || call.at != at)
      return std::nullopt;
    if (hold) static_cast<void>(hold(call));
    return -error;
  };
}

// --- opening
// --------------------------------------------------------------------------------------

TEST(VolumeOpen, ASlotFileThatCannotBeLookedAtIsKept) {
  World world;
  world.open();
  for (const SlotIndex slot : {0U, 8U, 15U}) ASSERT_EQ(world.put(slot).outcome, DiskOutcome::ok);
  world.tier.reset();
  world.files->set_plan(refuse("bytes", "/tier/slots-0001.kv", 0, ETIMEDOUT));
  EXPECT_THROW(world.open(), Error);
  world.files->set_plan(nullptr);
  EXPECT_EQ(world.open().take_found().size(), 3);
}

TEST(VolumeOpen, ThatFailsRemovesOnlyWhatItMade) {
  World world;
  world.files->set_plan(refuse("reserve", "/tier/slots-0002.kv", 0, ENOSPC));
  EXPECT_THROW(world.open(), CapacityError);
  for (const char* name : {"/tier/slots-0000.kv", "/tier/slots-0001.kv", "/tier/slots-0002.kv"})
    EXPECT_FALSE(world.files->has(name)) << name;

  world.files->set_plan(nullptr);
  world.open();
  ASSERT_EQ(world.put(1).outcome, DiskOutcome::ok);
  world.tier.reset();
  world.file_of(8).clear();  // somebody's doing: it is there, and empty
  world.files->set_plan(refuse("reserve", "/tier/slots-0002.kv", 0, ENOSPC));
  EXPECT_THROW(world.open(), CapacityError);
  ASSERT_TRUE(world.files->has("/tier/slots-0001.kv"));
  EXPECT_TRUE(world.file_of(8).empty());
  world.files->set_plan(nullptr);
  EXPECT_EQ(world.open().take_found().size(), 1);
}

struct NoRoomForTheSuperblock : testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Each, NoRoomForTheSuperblock, testing::Values(ENOSPC, EDQUOT));

TEST_P(NoRoomForTheSuperblock, IsAShortageThatLeavesAllAsItWas) {
  World world;
  const MemoryFiles::Plan full = refuse("write", "/tier/superblock.new", 0, GetParam());
  world.files->set_plan(full);
  EXPECT_THROW(world.open(), CapacityError);
  EXPECT_FALSE(world.files->has("/tier/slots-0000.kv"));
  EXPECT_FALSE(world.files->has("/tier/superblock.new"));
  EXPECT_FALSE(world.files->has("/tier/superblock"));

  world.files->set_plan(nullptr);
  world.open();
  ASSERT_EQ(world.put(1).outcome, DiskOutcome::ok);
  world.tier.reset();
  world.files->set_plan(full);
  world.options.keep = false;
  EXPECT_THROW(world.open(), CapacityError);
  world.files->set_plan(nullptr);
  world.options.keep = true;
  EXPECT_EQ(world.open().take_found().size(), 1);
}

TEST(VolumeOpen, CountsThePageOfTheSuperblock) {
  World world;
  constexpr std::uint64_t slots_bytes = 20 * World::slot_bytes, id_bytes = 32;
  world.files->space_bytes = slots_bytes + id_bytes;
  try {
    world.open();
    FAIL();
  } catch (const CapacityError& error) {
    EXPECT_EQ(error.shortage.wanted, slots_bytes + disk_page_bytes);
  }
  EXPECT_FALSE(world.files->has("/tier/slots-0000.kv"));
  world.files->space_bytes += disk_page_bytes;
  EXPECT_NO_THROW(world.open());
}

// --- making anew
// ----------------------------------------------------------------------------------

// A call that comes back when the volume it ran on was remade.
struct LateCalls : testing::TestWithParam<int> {
  World world;
  FileGate gate;
  Ended late;
  Buffer other{World::payload};

  void SetUp() override {
    world.options.workers = 2;
    world.open();
  }
  [[nodiscard]] DiskStats after_remaking_beside_it() {
    EXPECT_TRUE(gate.has_seen(1));
    world.files->vanish("/tier");
    EXPECT_EQ(world.put(2).outcome, DiskOutcome::io_error);
    EXPECT_EQ(world.put(2).outcome, DiskOutcome::ok);
    gate.open();
    EXPECT_EQ(late.wait_for(1)[0].error, GetParam());
    return world.tier->stats();
  }
};
INSTANTIATE_TEST_SUITE_P(Each, LateCalls, testing::Values(EIO, ESTALE));

TEST_P(LateCalls, AReadOfTheFormerVolumeSaysNothingOfTheNewOne) {
  const std::uint64_t generation = world.put(1).generation;
  world.files->set_plan(
      refuse("read", "/tier/slots-0000.kv", World::offset_of(1), GetParam(), &gate));
  const DiskKey key = key_of(1);
  ASSERT_EQ(world.tier->try_read(1, record_of(key, World::payload), generation, other.data(),
                                 late.done()),
            DiskSubmit::accepted);
  const DiskStats stats = after_remaking_beside_it();
  EXPECT_EQ(stats.remade, 1);
  EXPECT_EQ(stats.retired, 0);
  EXPECT_EQ(stats.degraded, std::nullopt);
}

TEST_P(LateCalls, AWriteOfTheFormerVolumeSaysNothingOfTheNewOne) {
  world.files->set_plan(
      refuse("write", "/tier/slots-0000.kv", World::offset_of(1), GetParam(), &gate));
  const DiskKey key = key_of(1);
  ASSERT_EQ(world.tier->try_write(1, record_of(key, World::payload), other.data(), late.done()),
            DiskSubmit::accepted);
  const DiskStats stats = after_remaking_beside_it();
  EXPECT_EQ(stats.remade, 1);
  EXPECT_EQ(stats.degraded, std::nullopt);
}

// The same slot, key and generation, and other bytes.
TEST(VolumeRemake, OnATierThatSomebodyElseMadeThereBeginsEmpty) {
  World ours;
  ours.open();
  const std::uint64_t generation = ours.put(1).generation;
  ours.files->vanish("/tier");
  World theirs;
  theirs.options.files = theirs.files = ours.files;
  theirs.open();
  ASSERT_EQ(theirs.put(1).generation, generation);
  for (int i = 0; i < 9; ++i) ASSERT_EQ(theirs.put(3).outcome, DiskOutcome::ok);
  theirs.tier.reset();
  EXPECT_EQ(ours.put(5).outcome, DiskOutcome::io_error);
  EXPECT_EQ(ours.put(5).outcome, DiskOutcome::ok);
  EXPECT_EQ(ours.tier->stats().why_empty, "another tier was made there");
  EXPECT_EQ(ours.get(1, generation).outcome, DiskOutcome::foreign_tier);
  const std::vector<FoundSlot> found = ours.open().take_found();
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].slot, 5);
}

TEST(VolumeRemake, UsesTheSpaceOfTheFilesThatWereDeleted) {
  World world;
  world.files->space_bytes = 30 * World::slot_bytes;
  world.open();
  const std::uint64_t old = world.put(1).generation;
  world.files->vanish("/tier");
  EXPECT_EQ(world.put(2).outcome, DiskOutcome::io_error);
  EXPECT_EQ(world.get(1, old).outcome, DiskOutcome::ok);
  EXPECT_EQ(world.put(2).outcome, DiskOutcome::ok);
  EXPECT_EQ(world.get(1, old).outcome, DiskOutcome::empty);
  EXPECT_EQ(world.tier->stats().degraded, std::nullopt);
}

}  // namespace
}  // namespace kvmem::test
