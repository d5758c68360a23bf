// Failures that users of other systems reported in public: sizes and addresses beyond 32 bits. The
// addresses are made up; nothing is copied. docs/decisions/public-failures.md has the cases.
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "copy/copy_batch.hpp"

namespace kvmem {
namespace {

constexpr std::uint64_t gib = std::uint64_t{1} << 30;
constexpr std::uint64_t tib = std::uint64_t{1} << 40;
constexpr std::size_t unbounded = ~std::size_t{0};

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

Region region(std::uint64_t address, std::uint64_t stride, std::uint64_t payload,
              std::uint64_t blocks) {
  Region made;
  made.address = address;
  made.stride_bytes = stride;
  made.payload_bytes = payload;
  made.block_count = blocks;
  return made;
}

// Public failure 170: an offset was narrowed to 32 bits on its way through a helper.
TEST(PublicFailures, OffsetsOfBlocksAndSlotsAreExactBeyondThirtyTwoBits) {
  for (const std::uint64_t offset : {2 * gib, 4 * gib, tib + 4096}) {
    for (const Direction direction : {Direction::to_host, Direction::to_device}) {
      const KVLayout layout({region(8192, 4096, 64, tib)});
      const std::vector<BlockId> blocks{static_cast<BlockId>(offset / 4096)};
      const std::vector<SlotIndex> slots{static_cast<SlotIndex>(offset / 4096)};
      EXPECT_NO_THROW(layout.expect_blocks(blocks, true));
      const CopyBatch batch(layout, direction, blocks, slots, {at(1 << 20), 4096}, unbounded, true);
      const CopyDescriptors descriptors = batch.descriptors(0, 1);
      const bool to_host = direction == Direction::to_host;
      EXPECT_EQ(to_host ? descriptors.sources[0] : descriptors.targets[0], at(8192 + offset));
      EXPECT_EQ(to_host ? descriptors.targets[0] : descriptors.sources[0], at((1 << 20) + offset));
      EXPECT_EQ(batch.size(0), 64U);
    }
  }
}

// Public failure 170: the same, of block ids themselves.
TEST(PublicFailures, BlockIdsAreComparedInSixtyFourBits) {
  constexpr std::uint64_t count = 8 * gib;
  const KVLayout layout({region(4096, 1, 1, count)});
  EXPECT_NO_THROW(layout.expect_blocks(std::vector<BlockId>{4 * gib + 1, 1}, true));
  EXPECT_NO_THROW(layout.expect_blocks(std::vector<BlockId>{count - 1}, true));
  EXPECT_THROW(layout.expect_blocks(std::vector<BlockId>{count}, true), InvalidArgument);
  EXPECT_THROW(layout.expect_blocks(std::vector<BlockId>{4 * gib + 1, 4 * gib + 1}, true),
               InvalidArgument);
}

// Public failure 170: the same, of lengths: a place inside a slot, a sum, a cut.
TEST(PublicFailures, LengthsBeyondFourGibibytesAreExact) {
  constexpr std::uint64_t payload = 4 * gib + 64;
  const KVLayout layout(
      {region(tib, payload, payload, 300), region(4 * tib + 4096, payload, payload, 300)});
  EXPECT_EQ(layout.block_bytes(), 2 * payload);
  EXPECT_EQ(layout.segments()[1].slot_offset_bytes, payload);
  std::vector<BlockId> blocks;
  std::vector<SlotIndex> slots;
  for (SlotIndex i = 0; i < 150; ++i) {  // every second one, so that nothing is merged
    blocks.push_back(2 * i);
    slots.push_back(2 * i);
  }
  const SlotArena arena{at(8 * tib), 2 * payload};
  const CopyBatch whole(layout, Direction::to_host, blocks, slots, arena, unbounded, false);
  ASSERT_EQ(whole.count(), 300U);
  EXPECT_EQ(whole.bytes(), 300 * payload);
  EXPECT_GT(whole.bytes(), tib);
  EXPECT_EQ(whole.descriptors(299, 300).sources[0], at(4 * tib + 4096 + 298 * payload));
  EXPECT_EQ(whole.descriptors(299, 300).targets[0], at(8 * tib + 298 * 2 * payload + payload));
  EXPECT_EQ(whole.cut(0, 3 * payload + 1, 8).bytes, 3 * payload);
  EXPECT_EQ(whole.cut(0, 3 * payload + 1, 8).end, 3U);

  const CopyBatch capped(layout, Direction::to_host, std::vector<BlockId>{2},
                         std::vector<SlotIndex>{2}, arena, 4 * gib, false);
  ASSERT_EQ(capped.count(), 4U);  // each segment: the cap, and the rest
  EXPECT_EQ(capped.size(0), 4 * gib);
  EXPECT_EQ(capped.size(1), 64U);
  EXPECT_EQ(capped.descriptors(1, 2).sources[0], at(tib + 2 * payload + 4 * gib));
  EXPECT_EQ(capped.descriptors(1, 2).targets[0], at(8 * tib + 4 * payload + 4 * gib));
}

}  // namespace
}  // namespace kvmem
