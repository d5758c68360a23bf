// What an index consists of; for its own sources.
#pragma once

#include "base/check.hpp"
#include "cache/index.hpp"
#include "cache/zeroed_array.hpp"

namespace kvmem {

struct Index::Group final : MayGo {
  Group(const GroupOptions& options, GroupIndex own_number, EntryId first_entry, PolicyKind kind)
      : number(own_number),
        need(options.need),
        backs(options.backs.has_value()),
        slots(options.slots),
        base(first_entry),
        free_count(options.slots),
        policy(make_policy(kind, options.slots)),
        free_slots(options.slots) {
    for (SlotIndex slot = 0; slot < slots; ++slot) free_slots[slot] = slot;
  }

  bool operator()(EntryId slot) const noexcept override {
    const EntryFacts& facts = entries->facts(base + slot);
    return facts.state == EntryState::ready && facts.holds == 0;
  }
  // Slots that can be had now.
  [[nodiscard]] std::size_t room() const noexcept { return free_count + evictable; }
  // Each in turn: one that could not be written is not tried again at once.
  void put_free(SlotIndex slot) noexcept { free_slots[(next_free + free_count++) % slots] = slot; }
  [[nodiscard]] SlotIndex take_free() noexcept {
    const SlotIndex slot = free_slots[next_free];
    next_free = next_free + 1 == slots ? 0 : next_free + 1;
    --free_count;
    return slot;
  }

  GroupIndex number;
  Need need;
  bool backs;
  std::optional<GroupIndex> backed_by = std::nullopt;
  SlotIndex slots;
  EntryId base;  // the entry of slot 0
  SlotIndex free_count, next_free = 0;
  // free_count + writing + ready + leaving + retired = slots
  SlotIndex writing = 0, ready = 0, leaving = 0, evictable = 0, retired = 0;
  const Entries* entries = nullptr;
  std::unique_ptr<Policy> policy;     // of what is found: writing or ready
  ZeroedArray<SlotIndex> free_slots;  // a ring
  std::vector<bool> retiring;         // by slot; empty while none is
};

struct Index::Plan {
  PlanId id = 0;
  PlanKind kind = PlanKind::load;
  bool live = false, begun = false, failed = false;
  bool attaches = false;  // a load that waits for keys in flight
  std::string owner;
  GroupIndex target = 0;   // of a copy: the group that is written
  std::size_t length = 0;  // of a load, in keys
  Nanoseconds expires = 0;
  std::vector<PlannedSlots> groups;
  std::vector<bool> ended;  // by rank
  std::size_t ranks_left = 0;
  std::vector<std::byte> keys;  // of a load, where a shorter one may need other blocks
};

inline void reserve_room(PlannedSlots& slots, std::size_t count) {
  slots.positions.reserve(count);
  slots.slots.reserve(count);
}

inline Index::Group& Index::group_of(EntryId entry) noexcept {
  return groups_[entries_->facts(entry).group];
}

// What the call is about is not evicted for it.
class Index::BatchHold {
 public:
  BatchHold(Index& index, std::size_t keys, std::span<const KeyRange> ranges) : index_(index) {
    entries_.reserve(index.found_.size());
    for (std::size_t group = 0; group < ranges.size(); ++group) {
      for (std::size_t i = ranges[group].first; i < ranges[group].last; ++i) {
        const EntryId entry = index.found_[group * keys + i].entry;
        if (entry != Entries::none) entries_.push_back(entry);
      }
    }
    for (const EntryId entry : entries_) index_.hold(entry);
  }
  BatchHold(const BatchHold&) = delete;
  BatchHold& operator=(const BatchHold&) = delete;
  ~BatchHold() {
    for (const EntryId entry : entries_) index_.let_go(entry);
  }

 private:
  Index& index_;
  std::vector<EntryId> entries_;
};

}  // namespace kvmem
