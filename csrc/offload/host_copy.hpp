// The resident result of a finished offload: blocks in host memory and what is needed to restore
// them.
//
// A HostCopy is a holder of its blocks; a slice or a share is a further one. Not thread-safe by
// itself: one object, one thread at a time.
#pragma once

#include <memory>

#include "copy/kv_layout.hpp"
#include "host/block_pool.hpp"

namespace kvmem {

class HostCopy {
 public:
  HostCopy(std::shared_ptr<const KVLayout> layout, HostBlocks blocks)
      : layout_(std::move(layout)), count_(blocks.size()), blocks_(std::move(blocks)) {}

  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::size_t nbytes() const noexcept { return count_ * layout_->block_bytes(); }
  [[nodiscard]] bool released() const noexcept { return blocks_.empty(); }
  [[nodiscard]] const KVLayout& layout() const noexcept { return *layout_; }
  [[nodiscard]] const std::shared_ptr<const KVLayout>& layout_ptr() const noexcept {
    return layout_;
  }
  [[nodiscard]] const HostBlocks& blocks() const {  // throws AlreadyReleased
    mark_.expect_same_process("the host copy");
    if (released()) throw AlreadyReleased("the host copy was released");
    return blocks_;
  }
  [[nodiscard]] HostCopy slice(std::size_t first, std::size_t count) const {
    return {layout_, blocks().share(first, count)};
  }
  // Sums the blocks that have a checksum, now and here, and compares; answers how many those are.
  // Throws Corrupt for the first that differs, AlreadyReleased.
  std::size_t verify() const;
  void release() {  // throws AlreadyReleased the second time
    static_cast<void>(blocks());
    blocks_.release();
  }

 private:
  std::shared_ptr<const KVLayout> layout_;
  std::size_t count_;
  ProcessMark mark_;
  HostBlocks blocks_;
};

}  // namespace kvmem
