#include "host/free_slots.hpp"

#include <algorithm>
#include <numeric>

namespace kvmem {

FreeSlots::FreeSlots(std::uint32_t capacity, std::uint32_t chunk_slots)
    : slots_(capacity),
      ready_(chunk_slots > 0 ? 0 : capacity),
      bound_(ready_),
      chunk_slots_(chunk_slots) {
  const std::uint32_t stack = chunk_slots > 0 ? chunk_slots : std::max(capacity, 1U);
  for (std::uint64_t first = 0; first < capacity; first += stack) {
    const auto size = static_cast<std::uint32_t>(std::min<std::uint64_t>(stack, capacity - first));
    const auto lowest = slots_.rbegin() + static_cast<std::ptrdiff_t>(capacity - first - size);
    std::iota(lowest, lowest + size, static_cast<SlotIndex>(first));  // the lowest on top
    if (chunk_slots > 0) late_.push_back(size);
  }
}

void FreeSlots::make_ready(std::uint32_t bound) noexcept {
  while (bound_ < bound) {
    const std::size_t chunk = bound_ / chunk_slots_;
    const auto stack = slots_.begin() + bound_;
    std::copy(stack, stack + late_[chunk], slots_.begin() + ready_);  // downwards, or onto itself
    ready_ += late_[chunk];
    late_[chunk] = 0;
    bound_ = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(std::uint64_t{bound_} + chunk_slots_, slots_.size()));
  }
}

void FreeSlots::take_late(std::span<SlotIndex> out) noexcept {
  for (SlotIndex& index : out) {
    if (ready_ > 0) {
      index = slots_[--ready_];
      continue;
    }
    while (late_[first_late_] == 0) ++first_late_;
    index = slots_[first_late_ * chunk_slots_ + --late_[first_late_]];
  }
}

void FreeSlots::put_late(SlotIndex index) noexcept {
  const std::size_t chunk = index / chunk_slots_;
  slots_[chunk * chunk_slots_ + late_[chunk]++] = index;
  first_late_ = std::min(first_late_, chunk);
}

}  // namespace kvmem
