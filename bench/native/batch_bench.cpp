#include "batch_bench.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>

namespace kvmem::bench {

namespace {

constexpr std::uint64_t cache_address = std::uint64_t{1} << 44;
constexpr std::uint64_t arena_address = std::uint64_t{1} << 45;
constexpr std::size_t cache_share = 4;  // the cache has so many times the blocks of a transfer

// One behind the other, or woven so that the regions of a block stand side by side.
KVLayout layout_of(std::size_t blocks, std::size_t regions, std::size_t segment_bytes, bool woven) {
  std::vector<Region> all(regions);
  for (std::size_t i = 0; i < regions; ++i) {
    all[i].address = cache_address + i * segment_bytes * (woven ? 1 : blocks);
    all[i].stride_bytes = segment_bytes * (woven ? regions : 1);
    all[i].payload_bytes = segment_bytes;
    all[i].block_count = blocks;
    all[i].stage = static_cast<std::int64_t>(i);
  }
  return KVLayout(std::move(all));
}

template <class Index>
std::vector<Index> numbers(std::size_t count, std::size_t among, bool contiguous, unsigned seed) {
  std::vector<Index> all(among);
  std::iota(all.begin(), all.end(), Index{0});
  if (!contiguous) std::shuffle(all.begin(), all.end(), std::mt19937(seed));
  all.resize(count);
  return all;
}

}  // namespace

BatchBench::BatchBench(std::size_t blocks, std::size_t regions, std::size_t segment_bytes,
                       bool contiguous)
    : layout_(layout_of(blocks * cache_share, regions, segment_bytes, contiguous)),
      blocks_(numbers<BlockId>(blocks, blocks * cache_share, contiguous, 1)),
      slots_(numbers<SlotIndex>(blocks, blocks * cache_share, contiguous, 2)) {
  arena_.base = std::bit_cast<std::byte*>(arena_address);
  arena_.slot_bytes = round_up(layout_.block_bytes(), slot_alignment_bytes);
  arena_.chunk_bytes = arena_.slot_bytes * blocks * cache_share;
}

void BatchBench::build(std::uint64_t times) {
  for (std::uint64_t i = 0; i < times; ++i) {
    const CopyBatch batch(layout_, Direction::to_host, blocks_, slots_, arena_,
                          std::size_t{256} << 20, false);
    descriptors_ = batch.count();
  }
}

void BatchBench::by_hand(std::uint64_t times) {
  for (std::uint64_t i = 0; i < times; ++i) {
    std::vector<const std::byte*> sources;
    std::vector<std::byte*> targets;
    std::vector<std::size_t> sizes;
    sources.reserve(segments());
    targets.reserve(segments());
    sizes.reserve(segments());
    for (std::size_t k = 0; k < blocks_.size(); ++k) {
      const auto block = static_cast<std::uint64_t>(blocks_[k]);
      for (const KVLayout::Segment& segment : layout_.segments()) {
        sources.push_back(
            std::bit_cast<const std::byte*>(segment.address + block * segment.stride_bytes));
        targets.push_back(arena_.base + slots_[k] * arena_.slot_bytes + segment.slot_offset_bytes);
        sizes.push_back(segment.payload_bytes);
      }
    }
    descriptors_ = sizes.size();
  }
}

}  // namespace kvmem::bench
