#include "copy/copy_batch.hpp"

#include <algorithm>

namespace kvmem {

CopyBatch::CopyBatch(const KVLayout& layout, Direction direction, std::span<const BlockId> blocks,
                     std::span<const SlotIndex> slots, const SlotArena& arena,
                     std::size_t descriptor_bytes, bool by_stage)
    : direction_(direction) {
  const auto segments = layout.segments();
  const std::size_t most = blocks.size() * segments.size();
  device_.reserve(most);
  host_.reserve(most);
  sizes_.reserve(most);
  for (std::size_t first = 0; first < segments.size();) {
    std::size_t last = first;
    while (last < segments.size() &&
           (!by_stage || segments[last].stage_index == segments[first].stage_index))
      ++last;
    const std::size_t stage_begin = sizes_.size();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const std::size_t offset = slots[i] * arena.slot_bytes;
      const bool starts_chunk = arena.chunk_bytes > 0 && offset % arena.chunk_bytes == 0;
      for (std::size_t s = first; s < last; ++s) {
        const KVLayout::Segment& segment = segments[s];
        const std::uint64_t address =
            segment.address + static_cast<std::uint64_t>(blocks[i]) * segment.stride_bytes;
        append(reinterpret_cast<std::byte*>(address),
               arena.base + offset + segment.slot_offset_bytes, segment.payload_bytes,
               sizes_.size() > stage_begin && !(s == first && starts_chunk), descriptor_bytes);
      }
    }
    stage_ends_.push_back(sizes_.size());
    first = last;
  }
}

void CopyBatch::append(std::byte* device, std::byte* host, std::size_t size, bool may_join,
                       std::size_t descriptor_bytes) {
  bytes_ += size;
  if (may_join && device == device_.back() + sizes_.back() &&
      host == host_.back() + sizes_.back()) {
    const std::size_t joined = std::min(size, descriptor_bytes - sizes_.back());
    sizes_.back() += joined;
    device += joined;
    host += joined;
    size -= joined;
  }
  while (size > 0) {
    const std::size_t piece = std::min(size, descriptor_bytes);
    device_.push_back(device);
    host_.push_back(host);
    sizes_.push_back(piece);
    device += piece;
    host += piece;
    size -= piece;
  }
}

CopyDescriptors CopyBatch::descriptors(std::size_t begin, std::size_t end) const noexcept {
  const auto& targets = direction_ == Direction::to_host ? host_ : device_;
  const auto& sources = direction_ == Direction::to_host ? device_ : host_;
  return {targets.data() + begin, sources.data() + begin, sizes_.data() + begin, end - begin};
}

CopyBatch::Cut CopyBatch::cut(std::size_t begin, std::size_t most_bytes,
                              std::size_t most_descriptors) const noexcept {
  const std::size_t stage_end = *std::ranges::upper_bound(stage_ends_, begin);
  const std::size_t most_end =
      std::min(stage_end, begin + std::max<std::size_t>(most_descriptors, 1));
  Cut cut{begin + 1, sizes_[begin]};
  while (cut.end < most_end && cut.bytes + sizes_[cut.end] <= most_bytes)
    cut.bytes += sizes_[cut.end++];
  return cut;
}

}  // namespace kvmem
