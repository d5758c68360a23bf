// Who holds which slot: bookkeeping on indices, without memory, device or lock.
//
// A slot has owners (leases, index entries, sessions) and copies in flight. Its state follows from
// the counts:
//
//   owners  copies   state
//   0       0        free          in the free list
//   > 0     any      held
//   0       > 0      quarantined   owner gone, a copy may still touch it
//   any     any      poisoned      once its device was lost under a copy; never free again
//
// Always free + held + quarantined + poisoned = capacity. O(1) a slot; the free list is LIFO, so
// that warm memory goes out first. Not thread-safe. Throws InvalidArgument for an index that is out
// of range or not held as claimed; then nothing has changed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.hpp"

namespace kvmem {

enum class Holder : std::uint8_t { owner, copy };

struct SlotCounts {
  std::uint32_t capacity = 0, free = 0, held = 0, quarantined = 0, poisoned = 0;
  friend bool operator==(const SlotCounts&, const SlotCounts&) = default;
};

class BlockTable {
 public:
  explicit BlockTable(std::uint32_t capacity);

  [[nodiscard]] const SlotCounts& counts() const noexcept { return counts_; }

  void acquire(std::span<SlotIndex> out);  // out.size() <= counts().free; each gets one owner
  // Of slots that are held or quarantined; each occurrence of a slot counts.
  void add(std::span<const SlotIndex> slots, Holder holder);
  // Returns how many went home.
  std::uint32_t remove(std::span<const SlotIndex> slots, Holder holder) noexcept;
  void poison(std::span<const SlotIndex> slots) noexcept;    // the copy's hold becomes the poison
  void expect_held(std::span<const SlotIndex> slots) const;  // each has an owner

  // Walks everything; stops the process when a count is wrong. Does nothing in unchecked builds.
  void check() const;

 private:
  struct Slot {
    std::uint32_t owners = 0;
    std::uint32_t copies = 0;
    bool poisoned = false;
  };
  static std::uint32_t& holders_of(Slot& slot, Holder holder) noexcept {
    return holder == Holder::owner ? slot.owners : slot.copies;
  }
  std::uint32_t& count_of(const Slot& slot) noexcept;  // the counter of the state that it is in
  void expect_in_range(SlotIndex index) const;
  void expect_conserved() const noexcept;

  std::vector<Slot> slots_;
  std::vector<SlotIndex> free_;  // a stack of counts_.free indices, with room for all
  SlotCounts counts_;
};

}  // namespace kvmem
