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
// Always free + held + quarantined + poisoned = capacity. O(1) a slot; what came back last goes out
// first, so that memory is warm, and slots that are not ready go out when no other is free. Not
// thread-safe. Throws InvalidArgument for an index that is out of range or not held as claimed;
// then nothing has changed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/check.hpp"
#include "base/types.hpp"
#include "host/free_slots.hpp"

namespace kvmem {

enum class Holder : std::uint8_t { owner, copy };

struct SlotCounts {
  std::uint32_t capacity = 0, free = 0, held = 0, quarantined = 0, poisoned = 0;
  friend bool operator==(const SlotCounts&, const SlotCounts&) = default;
};

class BlockTable {
 public:
  // With `chunk_slots` no slot is ready at first.
  explicit BlockTable(std::uint32_t capacity, std::uint32_t chunk_slots = 0);

  [[nodiscard]] const SlotCounts& counts() const noexcept { return counts_; }

  void acquire(std::span<SlotIndex> out);  // out.size() <= counts().free; each gets one owner
  // Of slots that are held or quarantined; each occurrence of a slot counts.
  void add(std::span<const SlotIndex> slots, Holder holder);
  // Returns how many went home.
  std::uint32_t remove(std::span<const SlotIndex> slots, Holder holder) noexcept;
  void poison(std::span<const SlotIndex> slots) noexcept;  // the copy's hold becomes the poison
  void make_ready(std::uint32_t bound) noexcept;           // the slots below: whole chunks, or all
  void expect_held(std::span<const SlotIndex> slots) const;  // each has an owner
  void expect_owners(std::span<const SlotIndex> slots);      // and each occurrence one of its own
  // Throws NotDone where a copy may still touch one, DeviceLost for a poisoned one.
  void expect_no_copies(std::span<const SlotIndex> slots) const;

  // Walks everything; stops the process when a count is wrong. Does nothing in unchecked builds.
  void check() const;

 private:
  struct Slot {
    std::uint32_t owners = 0;
    std::uint32_t copies = 0;
    bool poisoned = false;
    friend bool operator==(const Slot&, const Slot&) = default;
  };
  static std::uint32_t& holders_of(Slot& slot, Holder holder) noexcept {
    return holder == Holder::owner ? slot.owners : slot.copies;
  }
  std::uint32_t& count_of(const Slot& slot) noexcept;  // the counter of the state that it is in
  void remove_one(SlotIndex index, Holder holder) noexcept;
  void expect_in_range(SlotIndex index) const;
  void expect_owner(SlotIndex index) const;
  void expect_enough_owners(std::span<const SlotIndex> slots);
  void expect_conserved() const noexcept;

  std::vector<Slot> slots_;
  FreeSlots free_;  // counts_.free of them
  SlotCounts counts_;
};

// ---- in place, because the pool calls them for every block ----

inline void BlockTable::expect_held(std::span<const SlotIndex> slots) const {
  for (const SlotIndex index : slots) {
    if (index >= counts_.capacity || slots_[index].owners == 0) expect_owner(index);
  }
}

inline void BlockTable::expect_owners(std::span<const SlotIndex> slots) {
  expect_held(slots);
  if (slots.size() > 1) expect_enough_owners(slots);
}

inline void BlockTable::acquire(std::span<SlotIndex> out) {
  KVMEM_EXPECTS(out.size() <= counts_.free, "acquire of ", out.size(), " slots with ", counts_.free,
                " free");
  const auto taken = static_cast<std::uint32_t>(out.size());
  free_.take(out);
  for (const SlotIndex index : out) slots_[index].owners = 1;
  counts_.free -= taken;
  counts_.held += taken;
  expect_conserved();
}

inline std::uint32_t BlockTable::remove(std::span<const SlotIndex> slots, Holder holder) noexcept {
  const std::uint32_t free_before = counts_.free;
  std::uint32_t home = 0;  // counted at the end: this is a loop of a few instructions
  // Last first, so that the next acquire hands a run of neighbours out in the order that it had.
  for (std::size_t i = slots.size(); i-- > 0;) {
    const SlotIndex index = slots[i];
    KVMEM_INVARIANT(index < counts_.capacity);
    if (holder == Holder::owner && slots_[index] == Slot{1, 0, false}) {  // nearly always
      slots_[index].owners = 0;
      free_.put(index);
      ++home;
    } else {
      remove_one(index, holder);
    }
  }
  counts_.held -= home;
  counts_.free += home;
  expect_conserved();
  return counts_.free - free_before;
}

inline void BlockTable::expect_conserved() const noexcept {
  KVMEM_INVARIANT(std::uint64_t{counts_.free} + counts_.held + counts_.quarantined +
                      counts_.poisoned ==
                  counts_.capacity);
}

}  // namespace kvmem
