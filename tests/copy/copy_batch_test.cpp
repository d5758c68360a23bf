#include "copy/copy_batch.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace kvmem {
namespace {

constexpr std::size_t unbounded = std::size_t{1} << 40;

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }
std::uint64_t number(const std::byte* address) { return reinterpret_cast<std::uint64_t>(address); }

// Which device byte goes with which host byte, stage by stage.
using Bytes = std::map<std::uint64_t, std::uint64_t>;

Bytes bytes_of(const CopyBatch& batch, std::size_t begin, std::size_t end) {
  Bytes bytes;
  const CopyDescriptors some = batch.descriptors(begin, end);
  const bool offload = batch.direction() == Direction::to_host;
  for (std::size_t i = 0; i < some.count; ++i) {
    for (std::size_t k = 0; k < some.sizes[i]; ++k) {
      const std::uint64_t source = number(some.sources[i]) + k;
      const std::uint64_t target = number(some.targets[i]) + k;
      const bool is_new =
          bytes.emplace(offload ? source : target, offload ? target : source).second;
      EXPECT_TRUE(is_new) << "a device byte is copied twice";
    }
  }
  return bytes;
}

// What a person would write: for each block, each region, each byte.
Bytes naive(const KVLayout& layout, const std::vector<BlockId>& blocks,
            const std::vector<SlotIndex>& slots, const SlotArena& arena,
            std::optional<std::int64_t> stage) {
  Bytes bytes;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::uint64_t host = number(arena.base) + std::uint64_t{slots[i]} * arena.slot_bytes;
    for (const Region& region : layout.regions()) {
      for (std::uint64_t k = 0; k < region.payload_bytes; ++k, ++host) {
        if (stage && region.stage != *stage) continue;
        bytes[region.address + static_cast<std::uint64_t>(blocks[i]) * region.stride_bytes + k] =
            host;
      }
    }
  }
  return bytes;
}

class RandomBatches : public ::testing::TestWithParam<unsigned> {
 protected:
  std::size_t pick(std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>(low, high)(random_);
  }

  KVLayout some_layout(std::uint64_t base) {
    const std::size_t count = pick(1, 12);
    std::vector<Region> regions;
    for (std::size_t i = pick(1, 5); i > 0; --i) {
      Region region;
      region.payload_bytes = pick(1, 40);
      region.stride_bytes = region.payload_bytes + (pick(0, 1) == 0 ? 0 : pick(1, 20));
      region.block_count = count;
      region.stage = static_cast<std::int64_t>(pick(0, 3));
      region.address = base;
      base += count * region.stride_bytes + (pick(0, 1) == 0 ? 0 : pick(1, 50));
      regions.push_back(region);
    }
    std::ranges::shuffle(regions, random_);
    return KVLayout(std::move(regions));
  }

  template <class Index>
  std::vector<Index> some_indices(std::size_t count, std::size_t below) {
    std::vector<Index> all(below);
    std::iota(all.begin(), all.end(), Index{0});
    if (pick(0, 1) == 0) std::ranges::shuffle(all, random_);  // else neighbours, which merge
    all.resize(count);
    return all;
  }

  std::mt19937 random_{GetParam()};
};

TEST_P(RandomBatches, EveryByteGoesWhereANaiveLoopWouldCopyIt) {
  constexpr std::uint64_t bases[] = {0x1000, (std::uint64_t{1} << 31) - 300,
                                     (std::uint64_t{1} << 32) - 300, std::uint64_t{1} << 40};
  for (int round = 0; round < 100; ++round) {
    const KVLayout layout = some_layout(bases[pick(0, 3)]);
    const std::size_t count = pick(1, layout.block_count());
    const auto blocks = some_indices<BlockId>(count, layout.block_count());
    const auto slots = some_indices<SlotIndex>(count, 20);
    const std::size_t padding = pick(0, 1) == 0 ? 0 : pick(1, 64);
    const SlotArena arena{at(bases[pick(0, 3)] + (std::uint64_t{1} << 44)),
                          layout.block_bytes() + padding};
    const std::size_t cap = pick(0, 1) == 0 ? unbounded : pick(1, 50);
    for (const Direction direction : {Direction::to_host, Direction::to_device}) {
      for (const bool by_stage : {false, true}) {
        const CopyBatch batch(layout, direction, blocks, slots, arena, cap, by_stage);
        ASSERT_EQ(batch.bytes(), count * layout.block_bytes());
        ASSERT_EQ(batch.stage_ends().size(), by_stage ? layout.stages().size() : 1);
        ASSERT_EQ(batch.stage_ends().back(), batch.count());
        std::size_t begin = 0;
        for (std::size_t s = 0; s < batch.stage_ends().size(); ++s) {
          const std::size_t end = batch.stage_ends()[s];
          const auto stage = by_stage ? std::optional(layout.stages()[s]) : std::nullopt;
          ASSERT_EQ(bytes_of(batch, begin, end), naive(layout, blocks, slots, arena, stage));
          begin = end;
        }
        for (std::size_t i = 0; i < batch.count(); ++i) {
          ASSERT_GT(batch.size(i), 0U);
          ASSERT_LE(batch.size(i), cap);
        }
      }
    }
  }
}

TEST_P(RandomBatches, NeighboursThatTouchOnBothSidesAreAlwaysMerged) {
  for (int round = 0; round < 100; ++round) {
    const KVLayout layout = some_layout(0x1000);
    const std::size_t count = pick(1, layout.block_count());
    const auto blocks = some_indices<BlockId>(count, layout.block_count());
    const auto slots = some_indices<SlotIndex>(count, 20);
    const SlotArena arena{at(0x100000), layout.block_bytes()};
    const CopyBatch batch(layout, Direction::to_host, blocks, slots, arena, unbounded, false);
    const CopyDescriptors all = batch.descriptors(0, batch.count());
    for (std::size_t i = 1; i < all.count; ++i) {
      ASSERT_FALSE(all.sources[i - 1] + all.sizes[i - 1] == all.sources[i] &&
                   all.targets[i - 1] + all.sizes[i - 1] == all.targets[i]);
    }
  }
}

TEST_P(RandomBatches, CutsCoverABatchOnceWithinStageBytesAndDescriptors) {
  for (int round = 0; round < 100; ++round) {
    const KVLayout layout = some_layout(0x1000);
    const std::size_t count = pick(1, layout.block_count());
    const CopyBatch batch(layout, Direction::to_device, some_indices<BlockId>(count, count),
                          some_indices<SlotIndex>(count, count), {at(0x100000), 4096}, pick(5, 60),
                          true);
    const std::size_t most_bytes = pick(0, 200);
    const std::size_t most_descriptors = pick(0, 8);
    std::size_t bytes = 0;
    for (std::size_t begin = 0; begin < batch.count();) {
      const CopyBatch::Cut cut = batch.cut(begin, most_bytes, most_descriptors);
      ASSERT_GT(cut.end, begin);
      ASSERT_LE(cut.end - begin, std::max<std::size_t>(most_descriptors, 1));
      ASSERT_TRUE(cut.bytes <= most_bytes || cut.end == begin + 1);
      const std::size_t stage_end = *std::ranges::upper_bound(batch.stage_ends(), begin);
      ASSERT_LE(cut.end, stage_end);
      // It is the longest such cut.
      const bool could_be_longer = cut.end < stage_end &&
                                   cut.end - begin < std::max<std::size_t>(most_descriptors, 1) &&
                                   cut.bytes + batch.size(cut.end) <= most_bytes;
      ASSERT_FALSE(could_be_longer);
      std::size_t sum = 0;
      for (std::size_t i = begin; i < cut.end; ++i) sum += batch.size(i);
      ASSERT_EQ(cut.bytes, sum);
      bytes += sum;
      begin = cut.end;
    }
    ASSERT_EQ(bytes, batch.bytes());
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomBatches, ::testing::Range(0U, 8U));

KVLayout one_region(std::uint64_t address, std::uint64_t stride, std::uint64_t payload,
                    std::uint64_t count) {
  Region region;
  region.address = address;
  region.stride_bytes = stride;
  region.payload_bytes = payload;
  region.block_count = count;
  return KVLayout({region});
}

TEST(CopyBatch, ContiguousBlocksInContiguousSlotsAreOneDescriptor) {
  const KVLayout layout = one_region(0x1000, 64, 64, 8);
  const std::vector<BlockId> blocks{2, 3, 4, 5};
  const std::vector<SlotIndex> slots{7, 8, 9, 10};
  const SlotArena arena{at(0x100000), 64};
  const CopyBatch batch(layout, Direction::to_host, blocks, slots, arena, unbounded, false);
  ASSERT_EQ(batch.count(), 1U);
  EXPECT_EQ(batch.size(0), 256U);
  EXPECT_EQ(batch.descriptors(0, 1).sources[0], at(0x1000 + 2 * 64));
  EXPECT_EQ(batch.descriptors(0, 1).targets[0], at(0x100000 + 7 * 64));

  const SlotArena padded{at(0x100000), 128};
  EXPECT_EQ(CopyBatch(layout, Direction::to_host, blocks, slots, padded, unbounded, false).count(),
            4U);
  const std::vector<SlotIndex> backwards{10, 9, 8, 7};
  EXPECT_EQ(
      CopyBatch(layout, Direction::to_host, blocks, backwards, arena, unbounded, false).count(),
      4U);
}

TEST(CopyBatch, NothingIsMergedAcrossTheEndOfAStage) {
  std::vector<Region> regions;
  for (int i = 0; i < 3; ++i) {  // one block: the three segments touch on both sides
    Region region;
    region.address = 0x1000 + 64 * static_cast<std::uint64_t>(i);
    region.stride_bytes = region.payload_bytes = 64;
    region.block_count = 1;
    region.stage = i;
    regions.push_back(region);
  }
  const KVLayout layout(regions);
  const std::vector<BlockId> blocks{0};
  const std::vector<SlotIndex> slots{0};
  const SlotArena arena{at(0x100000), 4096};
  const CopyBatch staged(layout, Direction::to_device, blocks, slots, arena, unbounded, true);
  EXPECT_EQ(std::vector(staged.stage_ends().begin(), staged.stage_ends().end()),
            (std::vector<std::size_t>{1, 2, 3}));
  const CopyBatch whole(layout, Direction::to_host, blocks, slots, arena, unbounded, false);
  EXPECT_EQ(whole.count(), 1U);
}

// Public failure 63: memory was registered in one piece that was too large.
TEST(CopyBatch, NothingIsMergedAcrossTwoPinnedChunks) {
  const KVLayout layout = one_region(0x1000, 64, 64, 8);
  std::vector<BlockId> blocks(8);
  std::iota(blocks.begin(), blocks.end(), BlockId{0});
  std::vector<SlotIndex> slots(8);
  std::iota(slots.begin(), slots.end(), SlotIndex{1});  // slots 4 and 8 begin a chunk
  const SlotArena arena{at(0x100000), 64, 4 * 64};
  for (const Direction direction : {Direction::to_host, Direction::to_device}) {
    const CopyBatch batch(layout, direction, blocks, slots, arena, unbounded, true);
    ASSERT_EQ(batch.count(), 3U);
    EXPECT_EQ(batch.size(0), 3 * 64U);
    EXPECT_EQ(batch.size(1), 4 * 64U);
    EXPECT_EQ(batch.size(2), 64U);
  }
}

TEST(CopyBatch, LargeSegmentsAreCutIntoDescriptorsOfTheCap) {
  const KVLayout layout = one_region(0x1000, 1000, 1000, 2);
  const std::vector<BlockId> blocks{0, 1};
  const std::vector<SlotIndex> slots{0, 1};
  const CopyBatch batch(layout, Direction::to_host, blocks, slots, {at(0x100000), 1000}, 300,
                        false);
  // 2000 contiguous bytes: a merge fills the last descriptor up to the cap.
  ASSERT_EQ(batch.count(), 7U);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(batch.size(i), 300U);
  EXPECT_EQ(batch.size(6), 200U);
}

// Public failure 170: offsets were narrowed to 32 bits.
TEST(CopyBatch, AddressesAndIndicesAreCountedInSixtyFourBits) {
  for (const int bits : {31, 32, 40}) {
    const std::uint64_t far = std::uint64_t{1} << bits;
    const KVLayout layout = one_region(far, far, 64, 9);
    const std::vector<BlockId> blocks{8};
    const std::vector<SlotIndex> slots{0xFFFFFFFE};
    const SlotArena arena{at(far), 1 << 20};
    const CopyBatch batch(layout, Direction::to_host, blocks, slots, arena, unbounded, false);
    ASSERT_EQ(batch.count(), 1U);
    EXPECT_EQ(batch.descriptors(0, 1).sources[0], at(far + 8 * far));
    EXPECT_EQ(batch.descriptors(0, 1).targets[0], at(far + (std::uint64_t{0xFFFFFFFE} << 20)));
  }
}

}  // namespace
}  // namespace kvmem
