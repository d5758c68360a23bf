// The slots of one handle: a fixed number of them, the first few without an allocation, because
// most handles are of one block. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "base/types.hpp"

namespace kvmem {

class SlotList {  // move-only; a moved-from list is empty
 public:
  SlotList() noexcept = default;
  // Room for `count`, not written.
  explicit SlotList(std::size_t count) : count_(count) {
    if (count > most_inside) outside_ = std::make_unique_for_overwrite<SlotIndex[]>(count);
  }
  explicit SlotList(std::span<const SlotIndex> slots) : SlotList(slots.size()) {
    std::ranges::copy(slots, span().begin());
  }
  SlotList(SlotList&& other) noexcept
      : outside_(std::move(other.outside_)), count_(std::exchange(other.count_, 0)) {
    std::ranges::copy(other.inside_, inside_);
  }
  SlotList& operator=(SlotList&& other) noexcept {
    outside_ = std::move(other.outside_);
    count_ = std::exchange(other.count_, 0);
    std::ranges::copy(other.inside_, inside_);
    return *this;
  }
  ~SlotList() = default;

  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::span<SlotIndex> span() noexcept { return {data(), count_}; }
  [[nodiscard]] std::span<const SlotIndex> span() const noexcept {
    return {outside_ ? outside_.get() : inside_, count_};
  }

 private:
  static constexpr std::size_t most_inside = 2;
  SlotIndex* data() noexcept { return outside_ ? outside_.get() : inside_; }

  std::unique_ptr<SlotIndex[]> outside_;
  SlotIndex inside_[most_inside] = {};
  std::size_t count_ = 0;
};

}  // namespace kvmem
