// Blocks between huge-page buffers and the disk: by the disk tier, and by a bare loop. No timing
// here.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tier/disk_slots.hpp"

namespace kvmem::bench {

class HugeBuffer {
 public:
  explicit HugeBuffer(std::size_t bytes);
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  ~HugeBuffer();
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::byte* mapped_;
  std::size_t mapped_bytes_;
  std::byte* data_;
};

// As many buffers as blocks, as a pool of host memory has: a few that are used again and again
// would stay in the processor's caches, where no engine finds them. Each run moves every block
// once, in an order that changes from run to run.
class DiskBench {
 public:
  // `depth`: calls of the system at a time: a tier's workers, a loop's threads. Throws
  // std::runtime_error.
  DiskBench(const std::string& folder, std::size_t block_bytes, std::uint32_t blocks,
            unsigned depth);
  ~DiskBench();
  DiskBench(const DiskBench&) = delete;
  DiskBench& operator=(const DiskBench&) = delete;

  void tier_write();
  void tier_read();
  // Threads with O_DIRECT calls, a block each, to where the tier has its payloads: on a virtual
  // disk two files may differ in speed by a third.
  void raw_write();
  void raw_read();
  // The calls of a tier's write and no more: a page, the block, and the page again. What the tier
  // has there is lost.
  void raw_write_with_headers();

  [[nodiscard]] std::byte* buffers() const { return buffers_.data(); }
  [[nodiscard]] std::size_t bytes() const { return block_bytes_ * blocks_; }
  [[nodiscard]] bool direct() const { return tier_->stats().direct; }
  void fill();
  void clear();
  [[nodiscard]] bool holds() const;  // what fill() put there

 private:
  template <class Submit>
  void run_tier(Submit submit);
  template <class Move>
  void run_raw(Move move);
  [[nodiscard]] std::vector<std::uint32_t> next_order();
  [[nodiscard]] std::byte* buffer(std::uint32_t block) const {
    return buffers_.data() + block * block_bytes_;
  }

  // Of a block of whole pages.
  [[nodiscard]] off_t payload_at(std::uint32_t block) const {
    return static_cast<off_t>(block * (block_bytes_ + 2 * disk_page_bytes) + disk_page_bytes);
  }

  const std::size_t block_bytes_;
  const std::uint32_t blocks_;
  const unsigned depth_;
  const HugeBuffer buffers_;
  std::unique_ptr<DiskSlots> tier_;
  std::vector<std::uint64_t> generations_;
  int raw_ = -1;
  std::uint32_t runs_ = 0;
};

}  // namespace kvmem::bench
