// Declared geometry of the device cache. Declared, never guessed from shapes.
//
// A block has one segment in every region; its payloads stand in its host slot one behind the
// other, in the order in which the regions were declared. Immutable; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/types.hpp"

namespace kvmem {

struct Region {
  std::uint64_t address = 0;       // of block 0's segment
  std::uint64_t stride_bytes = 0;  // from one block's segment to the next; at least the payload
  // copied; the rest of the stride is padding and is never touched
  std::uint64_t payload_bytes = 0;
  std::uint64_t block_count = 0;  // the same for every region of a layout
  std::string memory = "host";    // name of the device whose memory this is: "host", "cuda:0"
  std::int64_t stage = 0;         // step of a restore that the region belongs to, usually its layer
};

class KVLayout {
 public:
  // Throws InvalidArgument naming the region and the value: a zero size, a stride below the
  // payload, an address range beyond 2^64, regions with different block counts or memories,
  // segments that overlap.
  explicit KVLayout(std::vector<Region> regions);

  struct Segment {  // a region with its place in the host slot
    std::uint64_t address, stride_bytes, payload_bytes, slot_offset_bytes;
    std::size_t stage_index;
  };

  // As declared.
  [[nodiscard]] std::span<const Region> regions() const noexcept { return regions_; }
  // In stage order.
  [[nodiscard]] std::span<const Segment> segments() const noexcept { return segments_; }
  // Distinct, ascending.
  [[nodiscard]] std::span<const std::int64_t> stages() const noexcept { return stages_; }
  // Throws InvalidArgument listing the stages.
  [[nodiscard]] std::size_t stage_index(std::int64_t stage) const;
  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  [[nodiscard]] std::uint64_t block_count() const noexcept { return regions_.front().block_count; }
  [[nodiscard]] std::uint64_t smallest_segment_bytes() const noexcept {
    return smallest_segment_bytes_;
  }
  [[nodiscard]] const std::string& memory() const noexcept { return regions_.front().memory; }

  // What differs, apart from addresses and strides; empty when host blocks of one fit the other.
  [[nodiscard]] std::vector<std::string> geometry_differences(const KVLayout& other) const;
  // Throws InvalidArgument naming the first block that is out of range, or that stands twice where
  // `unique`.
  void expect_blocks(std::span<const BlockId> blocks, bool unique) const;

 private:
  std::vector<Region> regions_;
  std::vector<Segment> segments_;
  std::vector<std::int64_t> stages_;
  std::uint64_t block_bytes_ = 0;
  std::uint64_t smallest_segment_bytes_ = 0;
};

}  // namespace kvmem
