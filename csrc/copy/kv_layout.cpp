#include "copy/kv_layout.hpp"

#include <algorithm>
#include <limits>
#include <set>
#include <unordered_set>

#include "base/check.hpp"

namespace kvmem {

namespace {

constexpr std::uint64_t most_regions = 1u << 16;

std::uint64_t end_of(const Region& region) {  // one past the last payload byte
  return region.address + (region.block_count - 1) * region.stride_bytes + region.payload_bytes;
}

void expect_region(const Region& region, std::size_t index) {
  KVMEM_EXPECTS(region.address != 0, "region ", index, ": address is 0");
  KVMEM_EXPECTS(region.payload_bytes > 0, "region ", index, ": payload_bytes is 0");
  KVMEM_EXPECTS(region.block_count > 0, "region ", index, ": block_count is 0");
  KVMEM_EXPECTS(region.stride_bytes >= region.payload_bytes, "region ", index, ": stride_bytes ",
                region.stride_bytes, " is smaller than payload_bytes ", region.payload_bytes);
  KVMEM_EXPECTS(region.stage >= 0, "region ", index, ": stage ", region.stage, " is negative");
  std::uint64_t span = 0;
  std::uint64_t end = 0;
  const bool overflows =
      __builtin_mul_overflow(region.block_count - 1, region.stride_bytes, &span) ||
      __builtin_add_overflow(span, region.payload_bytes, &span) ||
      __builtin_add_overflow(region.address, span, &end) ||
      region.block_count > static_cast<std::uint64_t>(std::numeric_limits<BlockId>::max());
  KVMEM_EXPECTS(!overflows, "region ", index, ": address ", region.address, " + ",
                region.block_count, " blocks of stride ", region.stride_bytes, " exceeds 2^64");
}

// Do any two segments of these regions overlap? `a` starts first and their extents overlap.
bool segments_overlap(const Region& a, const Region& b) {
  if (a.stride_bytes == b.stride_bytes) {
    // Exact, because b starts inside a's extent: either its first segment meets the segment of a in
    // whose stride it starts, or it reaches into the next one, which exists.
    const std::uint64_t within = (b.address - a.address) % a.stride_bytes;
    return within < a.payload_bytes || within + b.payload_bytes > a.stride_bytes;
  }
  std::uint64_t i = (b.address - a.address) / a.stride_bytes;
  std::uint64_t j = 0;
  while (i < a.block_count && j < b.block_count) {
    const std::uint64_t left = a.address + i * a.stride_bytes;
    const std::uint64_t right = b.address + j * b.stride_bytes;
    if (left + a.payload_bytes <= right)
      ++i;
    else if (right + b.payload_bytes <= left)
      ++j;
    else
      return true;
  }
  return false;
}

void expect_no_overlap(const std::vector<Region>& regions) {
  std::vector<std::size_t> order(regions.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, {}, [&](std::size_t i) { return regions[i].address; });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const Region& a = regions[order[i]];
    for (std::size_t j = i + 1; j < order.size(); ++j) {
      const Region& b = regions[order[j]];
      if (b.address >= end_of(a)) break;
      KVMEM_EXPECTS(!segments_overlap(a, b), "regions ", order[i], " and ", order[j], " overlap");
    }
  }
}

}  // namespace

KVLayout::KVLayout(std::vector<Region> regions) : regions_(std::move(regions)) {
  KVMEM_EXPECTS(!regions_.empty(), "a layout needs at least one region");
  KVMEM_EXPECTS(regions_.size() <= most_regions, "regions: ", regions_.size(), ", limit ",
                most_regions);
  std::set<std::int64_t> stages;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    expect_region(region, i);
    KVMEM_EXPECTS(region.block_count == block_count(), "region ", i, ": block_count ",
                  region.block_count, ", region 0 has ", block_count());
    KVMEM_EXPECTS(region.memory == memory(), "region ", i, " is in ", region.memory,
                  " memory, region 0 in ", memory());
    stages.insert(region.stage);
  }
  expect_no_overlap(regions_);
  stages_.assign(stages.begin(), stages.end());
  smallest_segment_bytes_ = regions_.front().payload_bytes;
  for (const Region& region : regions_) {
    segments_.push_back({region.address, region.stride_bytes, region.payload_bytes, block_bytes_,
                         stage_index(region.stage)});
    smallest_segment_bytes_ = std::min(smallest_segment_bytes_, region.payload_bytes);
    block_bytes_ += region.payload_bytes;  // fits: the segments of a block do not overlap
  }
  std::ranges::stable_sort(segments_, {}, &Segment::stage_index);
}

std::size_t KVLayout::stage_index(std::int64_t stage) const {
  const auto found = std::ranges::lower_bound(stages_, stage);
  KVMEM_EXPECTS(found != stages_.end() && *found == stage, "stage ", stage,
                " is not one of the layout's ", stages_.size(), " stages ", stages_.front(), " to ",
                stages_.back());
  return static_cast<std::size_t>(found - stages_.begin());
}

std::vector<std::string> KVLayout::geometry_differences(const KVLayout& other) const {
  std::vector<std::string> differing;
  const auto compare = [&](const char* what, const auto& mine, const auto& theirs) {
    if (!(mine == theirs)) differing.push_back(text(what, ": ", mine, " and ", theirs));
  };
  compare("regions", regions_.size(), other.regions_.size());
  compare("block_count", block_count(), other.block_count());
  compare("memory", memory(), other.memory());
  for (std::size_t i = 0; i < std::min(regions_.size(), other.regions_.size()); ++i) {
    const Region& mine = regions_[i];
    const Region& theirs = other.regions_[i];
    if (mine.payload_bytes == theirs.payload_bytes && mine.stage == theirs.stage) continue;
    differing.push_back(text("region ", i, ": payload_bytes ", mine.payload_bytes, ", stage ",
                             mine.stage, " and ", theirs.payload_bytes, ", ", theirs.stage));
  }
  return differing;
}

void KVLayout::expect_blocks(std::span<const BlockId> blocks, bool unique) const {
  for (const BlockId block : blocks) {
    KVMEM_EXPECTS(block >= 0 && static_cast<std::uint64_t>(block) < block_count(), "device block ",
                  block, " is out of range: the layout has ", block_count(), " blocks");
  }
  if (!unique) return;
  std::unordered_set<BlockId> seen;
  for (const BlockId block : blocks) {
    KVMEM_EXPECTS(seen.insert(block).second, "device block ", block, " stands twice");
  }
}

}  // namespace kvmem
