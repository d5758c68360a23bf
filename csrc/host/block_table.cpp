#include "host/block_table.hpp"

#include <new>

#include "base/check.hpp"

namespace kvmem {

BlockTable::BlockTable(std::uint32_t capacity, std::uint32_t chunk_slots)
    : slots_(capacity), free_(capacity, chunk_slots) {
  counts_.capacity = capacity;
  counts_.free = capacity;
}

void BlockTable::add(std::span<const SlotIndex> slots, Holder holder) {
  for (const SlotIndex index : slots) {
    expect_in_range(index);
    KVMEM_EXPECTS(slots_[index].owners > 0 || slots_[index].copies > 0, "nobody holds slot ",
                  index);
  }
  for (const SlotIndex index : slots) {
    Slot& slot = slots_[index];
    --count_of(slot);
    ++holders_of(slot, holder);
    KVMEM_INVARIANT(holders_of(slot, holder) > 0);
    ++count_of(slot);
  }
  expect_conserved();
}

void BlockTable::remove_one(SlotIndex index, Holder holder) noexcept {
  Slot& slot = slots_[index];
  std::uint32_t& holders = holders_of(slot, holder);
  KVMEM_INVARIANT(holders > 0);
  // A fault of ours. Where nothing checks, losing a slot is better than handing it out twice.
  if (holders == 0) return;
  std::uint32_t& was_in = count_of(slot);
  --holders;
  std::uint32_t& now_in = count_of(slot);
  if (&now_in == &counts_.free) free_.put(index);
  --was_in;
  ++now_in;
}

void BlockTable::poison(std::span<const SlotIndex> slots) noexcept {
  for (const SlotIndex index : slots) {
    KVMEM_INVARIANT(index < slots_.size());
    Slot& slot = slots_[index];
    KVMEM_INVARIANT(slot.copies > 0);
    if (slot.copies == 0) continue;  // as in remove()
    --count_of(slot);
    --slot.copies;
    slot.poisoned = true;
    ++count_of(slot);
  }
  expect_conserved();
}

void BlockTable::make_ready(std::uint32_t bound) noexcept {
  KVMEM_INVARIANT(bound <= counts_.capacity);
  free_.make_ready(bound);
}

void BlockTable::expect_owner(SlotIndex index) const {
  expect_in_range(index);
  KVMEM_EXPECTS(slots_[index].owners > 0, "slot ", index, " has no owner");
}

void BlockTable::expect_enough_owners(std::span<const SlotIndex> slots) {
  std::size_t counted = 0;  // taken off while counting, and put back
  while (counted < slots.size() && slots_[slots[counted]].owners > 0)
    --slots_[slots[counted++]].owners;
  for (const SlotIndex index : slots.first(counted)) ++slots_[index].owners;
  KVMEM_EXPECTS(counted == slots.size(), "slot ", slots[counted], " has no owner left");
}

void BlockTable::check() const {
#if KVMEM_CHECKED  // elsewhere it would cost time and memory and say nothing
  SlotCounts seen;
  seen.capacity = static_cast<std::uint32_t>(slots_.size());
  for (const Slot& slot : slots_) {
    if (slot.poisoned)
      ++seen.poisoned;
    else if (slot.owners > 0)
      ++seen.held;
    else if (slot.copies > 0)
      ++seen.quarantined;
    else
      ++seen.free;
  }
  KVMEM_INVARIANT(seen == counts_);
  std::vector<bool> listed;
  try {
    listed.resize(slots_.size());
  } catch (const std::bad_alloc&) {
    return;  // a destructor asks too: without memory the list goes unchecked
  }
  std::uint32_t free = 0;
  free_.each([&](SlotIndex index) {
    KVMEM_INVARIANT(index < slots_.size() && !listed[index]);
    listed[index] = true;
    ++free;
    const Slot& slot = slots_[index];
    KVMEM_INVARIANT(!slot.poisoned && slot.owners == 0 && slot.copies == 0);
  });
  KVMEM_INVARIANT(free == counts_.free);
#endif
}

std::uint32_t& BlockTable::count_of(const Slot& slot) noexcept {
  if (slot.poisoned) return counts_.poisoned;
  if (slot.owners > 0) return counts_.held;
  return slot.copies > 0 ? counts_.quarantined : counts_.free;
}

void BlockTable::expect_no_copies(std::span<const SlotIndex> slots) const {
  for (const SlotIndex index : slots) {
    expect_in_range(index);
    const Slot& slot = slots_[index];
    if (slot.poisoned)
      throw DeviceLost(text("slot ", index, " is poisoned: a copy on a lost device may write it"));
    if (slot.copies > 0)
      throw NotDone(text("a copy still holds slot ", index, ": its end has not been observed"));
  }
}

void BlockTable::expect_in_range(SlotIndex index) const {
  KVMEM_EXPECTS(index < slots_.size(), "slot ", index, " is out of range: there are ",
                slots_.size());
}

}  // namespace kvmem
