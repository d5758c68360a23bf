// The descriptors of one transfer: which bytes go where, in stage order.
//
// Built from index arrays in one pass; neighbours that touch on both sides become one descriptor,
// because a driver merges nothing and each descriptor costs it time. Validation is the layout's and
// the pool's; this is arithmetic.
#pragma once

#include <span>
#include <vector>

#include "copy/kv_layout.hpp"
#include "device/device.hpp"

namespace kvmem {

// Where the slots of a pool stand.
struct SlotArena {
  std::byte* base = nullptr;
  std::size_t slot_bytes = 0;
  // Pinned at a time, whole slots: no descriptor crosses from one into the next. 0: never pinned.
  std::size_t chunk_bytes = 0;
};

class CopyBatch {
 public:
  // blocks[i] of the device goes with slots[i] of the arena. No descriptor exceeds
  // `descriptor_bytes`. Unless `by_stage`, all stages count as one.
  CopyBatch(const KVLayout& layout, Direction direction, std::span<const BlockId> blocks,
            std::span<const SlotIndex> slots, const SlotArena& arena, std::size_t descriptor_bytes,
            bool by_stage);

  [[nodiscard]] Direction direction() const noexcept { return direction_; }
  [[nodiscard]] std::size_t count() const noexcept { return sizes_.size(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<const std::size_t> stage_ends() const noexcept { return stage_ends_; }
  [[nodiscard]] std::size_t size(std::size_t i) const noexcept { return sizes_[i]; }
  [[nodiscard]] CopyDescriptors descriptors(std::size_t begin, std::size_t end) const noexcept;

  // The host end of a descriptor, so that a staged slice can go through pinned memory instead.
  [[nodiscard]] std::byte*& host_side(std::size_t i) noexcept { return host_[i]; }

  // One past the last descriptor of a slice that starts at `begin`: within one stage, at most that
  // many bytes and descriptors, and never fewer than one descriptor.
  struct Cut {
    std::size_t end, bytes;
  };
  [[nodiscard]] Cut cut(std::size_t begin, std::size_t most_bytes,
                        std::size_t most_descriptors) const noexcept;

 private:
  void append(std::byte* device, std::byte* host, std::size_t size, bool may_join,
              std::size_t descriptor_bytes);

  Direction direction_;
  std::vector<std::byte*> device_;
  std::vector<std::byte*> host_;
  std::vector<std::size_t> sizes_;
  std::vector<std::size_t> stage_ends_;
  std::size_t bytes_ = 0;
};

}  // namespace kvmem
