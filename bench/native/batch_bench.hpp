// The descriptors of one transfer, built by the library and by hand. No timing here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/copy_batch.hpp"

namespace kvmem::bench {

// `blocks` blocks of `regions` regions each, in a cache of four times as many, and their slots.
// Addresses are made up; nothing is copied.
class BatchBench {
 public:
  // contiguous: neighbours touch on both sides and become one descriptor. Otherwise blocks and
  // slots are drawn at random, and nothing can be merged.
  BatchBench(std::size_t blocks, std::size_t regions, std::size_t segment_bytes, bool contiguous);

  [[nodiscard]] std::size_t segments() const { return blocks_.size() * layout_.segments().size(); }
  // Descriptors of the one built last.
  [[nodiscard]] std::size_t descriptors() const { return descriptors_; }

  void build(std::uint64_t times);    // CopyBatch: checks of room, merging, stages
  void by_hand(std::uint64_t times);  // a loop that appends to three arrays, and merges nothing

 private:
  KVLayout layout_;
  std::vector<BlockId> blocks_;
  std::vector<SlotIndex> slots_;
  SlotArena arena_;
  std::size_t descriptors_ = 0;
};

}  // namespace kvmem::bench
