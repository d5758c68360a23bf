// Whatever happens to the bytes on disk: a miss with a reason, never a wrong block.
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "support/sanitizers.hpp"
#include "tier/disk_world.hpp"

namespace kvmem::test {
namespace {

constexpr SlotIndex slots = 20;

struct CorruptionTest : testing::Test {
  World world;
  std::vector<std::uint64_t> generations;

  void SetUp() override {
    world.open();
    ASSERT_EQ(world.tier->capacity(), slots);
    for (SlotIndex slot = 0; slot < slots; ++slot) {
      generations.push_back(world.put(slot).generation);
      ASSERT_EQ(world.get(slot, generations[slot]).outcome, DiskOutcome::ok);
    }
  }

  // Of each slot one bit of what lies there, in a tier opened anew: how reading each of them ends.
  std::vector<DiskOutcome> with_flipped(const std::function<std::size_t(SlotIndex)>& bit_of) {
    const auto flip = [&] {
      for (SlotIndex slot = 0; slot < slots; ++slot) {
        const std::size_t bit = bit_of(slot);
        world.file_of(slot)[World::offset_of(slot) + bit / 8] ^= std::byte{1} << bit % 8;
      }
    };
    world.tier.reset();
    flip();
    DiskSlots& tier = world.open();
    std::vector<DiskOutcome> outcomes(slots, DiskOutcome::closed);
    std::vector<Buffer> targets(slots, Buffer(World::payload));
    std::atomic<SlotIndex> left{slots};
    for (SlotIndex slot = 0; slot < slots; ++slot) {
      const DiskKey key = key_of(slot);
      EXPECT_EQ(tier.try_read(slot, record_of(key, World::payload), generations[slot],
                              targets[slot].data(),
                              [&, slot](const DiskResult& result) {
                                outcomes[slot] = result.outcome;
                                --left;
                              }),
                DiskSubmit::accepted);
    }
    EXPECT_TRUE(comes_true([&] { return left == 0; }));
    std::uint64_t counted = 0;
    for (std::size_t i = 1; i < disk_outcomes; ++i) counted += tier.stats().reads.ended[i];
    EXPECT_EQ(counted, static_cast<std::uint64_t>(
                           std::count_if(outcomes.begin(), outcomes.end(),
                                         [](DiskOutcome o) { return o != DiskOutcome::ok; })));
    world.tier.reset();
    flip();
    return outcomes;
  }
};

TEST_F(CorruptionTest, EveryFlippedBitOfAHeaderIsAMissWithAReason) {
  std::set<DiskOutcome> seen;
  for (std::size_t bit = 0; bit < (140 + 4) * 8; bit += sanitized ? 11 : 1) {
    const std::size_t at = bit < 140 * 8 ? bit : bit + (4092 - 140) * 8;
    for (const DiskOutcome outcome : with_flipped([&](SlotIndex) { return at; })) {
      ASSERT_NE(outcome, DiskOutcome::ok) << "bit " << at;
      seen.insert(outcome);
    }
  }
  EXPECT_EQ(seen, (std::set{DiskOutcome::bad_magic, DiskOutcome::bad_version,
                            DiskOutcome::bad_header_sum}));
}

// Public failure 104: wrong bytes of the right length.
TEST_F(CorruptionTest, FlippedBitsOfDataAreMisses) {
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    for (const DiskOutcome outcome : with_flipped([&, seed = random()](SlotIndex slot) {
           return disk_page_bytes * 8 + std::mt19937(seed + slot)() % (World::payload * 8);
         }))
      ASSERT_EQ(outcome, DiskOutcome::bad_data_sum);
  }
}

TEST_F(CorruptionTest, WithoutDamageEverySlotIsRead) {
  world.open();
  EXPECT_EQ(world.tier->take_found().size(), slots);
  for (SlotIndex slot = 0; slot < slots; ++slot)
    EXPECT_EQ(world.get(slot, generations[slot]).outcome, DiskOutcome::ok);
}

// Public failure 104: a page of zeros.
TEST_F(CorruptionTest, APageOfZerosIsAMiss) {
  auto& bytes = world.file_of(3);
  std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(World::offset_of(3) + 2 * 4096), 4096,
              std::byte{0});
  EXPECT_EQ(world.get(3, generations[3]).outcome, DiskOutcome::bad_data_sum);
  EXPECT_EQ(ended(world.tier->stats().reads, DiskOutcome::bad_data_sum), 1);
}

// Public failure 104: two files of equal length, one over the other.
TEST_F(CorruptionTest, ASlotCopiedOverAnotherIsAMiss) {
  auto& bytes = world.file_of(1);
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(World::offset_of(1)), World::slot_bytes,
              bytes.begin() + static_cast<std::ptrdiff_t>(World::offset_of(2)));
  EXPECT_EQ(world.get(2, generations[2]).outcome, DiskOutcome::misplaced);
  EXPECT_EQ(world.get(1, generations[1]).outcome, DiskOutcome::ok);
  world.open();
  EXPECT_EQ(world.tier->take_found().size(), slots - 1);
  EXPECT_EQ(world.tier->stats().scanned[static_cast<std::size_t>(DiskOutcome::misplaced)], 1);
}

TEST_F(CorruptionTest, ThePayloadOfAnotherSlotIsAMiss) {
  auto& bytes = world.file_of(1);
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(World::offset_of(1) + 4096),
              World::payload,
              bytes.begin() + static_cast<std::ptrdiff_t>(World::offset_of(2) + 4096));
  EXPECT_EQ(world.get(2, generations[2]).outcome, DiskOutcome::bad_data_sum);
}

TEST_F(CorruptionTest, AFileThatWasCutShortLosesOnlyWhatIsBehindTheCut) {
  world.file_of(0).resize(World::offset_of(3) + 4096 + 100);
  EXPECT_EQ(world.get(2, generations[2]).outcome, DiskOutcome::ok);
  for (const SlotIndex slot : {3U, 4U, 6U})
    EXPECT_EQ(world.get(slot, generations[slot]).outcome, DiskOutcome::truncated);
  EXPECT_EQ(world.get(7, generations[7]).outcome, DiskOutcome::ok);
  // It is as large as ever when it is opened again, and what is lost can be written again.
  world.open();
  EXPECT_EQ(world.tier->take_found().size(), slots - 4);  // what was half there is torn
  EXPECT_EQ(world.get(3, generations[3]).outcome, DiskOutcome::bad_data_sum);
  EXPECT_EQ(world.put(4).outcome, DiskOutcome::ok);
}

TEST_F(CorruptionTest, TheFileOfAnotherTierIsForeign) {
  World other;
  other.open();
  for (SlotIndex slot = 0; slot < slots; ++slot)
    ASSERT_EQ(other.put(slot).outcome, DiskOutcome::ok);
  world.tier.reset();
  world.file_of(0) = other.file_of(0);
  world.open();
  EXPECT_EQ(world.tier->take_found().size(), slots - 7);
  EXPECT_EQ(world.tier->stats().scanned[static_cast<std::size_t>(DiskOutcome::foreign_tier)], 7);
  EXPECT_EQ(world.get(0, generations[0]).outcome, DiskOutcome::foreign_tier);
  EXPECT_EQ(world.get(7, generations[7]).outcome, DiskOutcome::ok);
}

TEST_F(CorruptionTest, AnotherKeyGroupManifestGenerationOrSizeIsAMiss) {
  const auto outcome = [&](const DiskKey& key, std::uint32_t group, std::uint64_t generation,
                           std::size_t bytes) {
    return read(*world.tier, 5, record_of(key, bytes, group), generation, world.buffer.data())
        .outcome;
  };
  EXPECT_EQ(outcome(key_of(6), 0, generations[5], World::payload), DiskOutcome::other_key);
  EXPECT_EQ(outcome(key_of(5), 1, generations[5], World::payload), DiskOutcome::other_key);
  EXPECT_EQ(outcome(key_of(5), 0, generations[4], World::payload), DiskOutcome::other_generation);
  EXPECT_EQ(outcome(key_of(5), 0, generations[5], 4096), DiskOutcome::other_size);
  EXPECT_EQ(outcome(key_of(5), 0, generations[5], World::payload), DiskOutcome::ok);
  world.options.manifest.fill(std::byte{7});
  world.open();
  const std::vector<FoundSlot> found = world.tier->take_found();
  ASSERT_EQ(found.size(), slots);
  EXPECT_EQ(found[0].manifest, Digest16{});  // the owner sees that it is another one
  EXPECT_EQ(world.get(5, generations[5]).outcome, DiskOutcome::other_manifest);
}

// Version 1 had one header a slot, written twice.
TEST_F(CorruptionTest, AnotherVersionOrGeometryBeginsEmptyAndSaysSo) {
  world.tier.reset();
  world.files->contents("/tier/superblock")[8] = std::byte{1};
  world.open();
  EXPECT_TRUE(world.tier->take_found().empty());
  EXPECT_EQ(world.tier->stats().why_empty, "its format has version 1, this is version 2");
  EXPECT_EQ(world.get(5, generations[5]).outcome, DiskOutcome::foreign_tier);
  ASSERT_EQ(world.put(5).outcome, DiskOutcome::ok);

  world.options.block_bytes = 4096;
  world.open();
  EXPECT_TRUE(world.tier->take_found().empty());
  EXPECT_NE(world.tier->stats().why_empty.find("blocks of 8192 bytes"), std::string::npos);
}

TEST_F(CorruptionTest, ADamagedSuperblockBeginsEmptyWhicheverBitItIs) {
  for (std::size_t byte = 0; byte < 48; ++byte) {
    if (byte >= 12 && byte < 16) continue;  // nothing reads them; the sum covers them
    world.tier.reset();
    world.files->contents("/tier/superblock")[byte] ^= std::byte{4};
    world.open();
    EXPECT_TRUE(world.tier->take_found().empty()) << byte;
    EXPECT_FALSE(world.tier->stats().why_empty.empty()) << byte;
    ASSERT_EQ(world.put(1).outcome, DiskOutcome::ok);
  }
}

// Public failure 113: tried again for ever.
TEST_F(CorruptionTest, ASlotWithDamageIsReadOnceAndThenRetired) {
  world.file_of(4)[World::offset_of(4) + 5000] ^= std::byte{1};
  EXPECT_EQ(world.get(4, generations[4]).outcome, DiskOutcome::bad_data_sum);
  EXPECT_TRUE(world.tier->is_retired(4));
  EXPECT_EQ(world.tier->stats().retired, 1);
  const DiskKey key = key_of(4);
  EXPECT_EQ(world.tier->try_read(4, record_of(key, World::payload), generations[4],
                                 world.buffer.data(), nullptr),
            DiskSubmit::retired);
  EXPECT_EQ(world.tier->try_write(4, record_of(key, World::payload), world.buffer.data(), nullptr),
            DiskSubmit::retired);
  world.open();
  EXPECT_EQ(world.put(4).outcome, DiskOutcome::ok);
}

}  // namespace
}  // namespace kvmem::test
