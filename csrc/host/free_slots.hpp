// The slots that nobody holds. Those in registered memory ("ready") go out first, the last one that
// came back before the others, so that it is warm.
//
// Memory is registered in chunks, in ascending order, so ready slots are those below a bound. Until
// then the free ones of a chunk lie in a stack of their own, in the part of the array that the
// ready ones cannot need yet. Not thread-safe; nothing here checks what the table knows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.hpp"

namespace kvmem {

class FreeSlots {
 public:
  // All are free. With `chunk_slots` none is ready at first, without all are.
  explicit FreeSlots(std::uint32_t capacity, std::uint32_t chunk_slots = 0);

  // Where too few are ready, slots of the chunks that are registered next make up for it.
  void take(std::span<SlotIndex> out) noexcept {  // never more than there are
    if (out.size() > ready_) return take_late(out);
    std::size_t top = ready_;
    for (SlotIndex& index : out) index = slots_[--top];
    ready_ = static_cast<std::uint32_t>(top);
  }
  void put(SlotIndex index) noexcept {
    if (index < bound_)
      slots_[ready_++] = index;
    else
      put_late(index);
  }

  // The slots below `bound`, whole chunks or all, are ready. It never goes down.
  void make_ready(std::uint32_t bound) noexcept;

  template <class Visit>
  void each(Visit&& visit) const {
    for (std::uint32_t i = 0; i < ready_; ++i) visit(slots_[i]);
    for (std::size_t chunk = 0; chunk < late_.size(); ++chunk) {
      for (std::uint32_t i = 0; i < late_[chunk]; ++i) visit(slots_[chunk * chunk_slots_ + i]);
    }
  }

 private:
  void take_late(std::span<SlotIndex> out) noexcept;
  void put_late(SlotIndex index) noexcept;

  std::vector<SlotIndex> slots_;  // stacks: of the ready ones, and of each chunk that is not
  std::uint32_t ready_ = 0;       // free and ready
  std::uint32_t bound_;           // ready: those below
  std::uint32_t chunk_slots_;
  std::vector<std::uint32_t> late_;  // free slots of each chunk that is not ready
  std::size_t first_late_ = 0;       // no chunk before this one has any
};

}  // namespace kvmem
