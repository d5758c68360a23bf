// Groups that back other groups: copies between the two, what was there before, slots that go bad.
#include <algorithm>
#include <limits>

#include "cache/index_parts.hpp"

namespace kvmem {

CopyPlan Index::plan_copy(KeyPointers keys, std::size_t key_bytes, GroupIndex from, GroupIndex to,
                          const std::string& owner, double value) {
  KVMEM_EXPECTS(from < groups_.size() && to < groups_.size() &&
                    (options_.groups[from].backs == to || options_.groups[to].backs == from),
                "groups ", int{from}, " and ", int{to}, " do not back one another");
  KVMEM_EXPECTS(value > 0 && value <= std::numeric_limits<double>::max(), "value is ", value,
                ", which must be positive and finite");
  CopyPlan result;
  const auto lock = enter();
  if (keys.empty() || !knows(key_bytes)) return result;
  find_all(keys);
  Ranges batch{};
  batch[to] = {0, keys.size()};
  const BatchHold held(*this, keys.size(), std::span(batch).first(groups_.size()));
  result.positions.reserve(keys.size());
  result.source.reserve(keys.size());
  result.target.reserve(keys.size());
  GroupCounts blocks{};
  blocks[from] = blocks[to] = keys.size();
  Plan* const plan = new_plan(PlanKind::copy, owner, blocks, {});
  if (plan == nullptr) return result;
  plan->target = to;

  Group& target = groups_[to];
  for (std::size_t i = 0; i < keys.size() && target.room() > 0; ++i) {
    const EntryId source = found_[from * keys.size() + i].entry;
    const Found& found = found_[to * keys.size() + i];
    if (source == Entries::none || entries_->facts(source).state != EntryState::ready) continue;
    // Asked again, for a key that stands twice.
    if (entries_->find(found.hash, keys[i], to) != Entries::none) continue;
    write_entry(target, found, keys[i], value, plan->groups[to], i);
    hold(source);
    plan->groups[from].slots.push_back(source - groups_[from].base);
  }
  if (plan->groups[to].slots.empty()) {
    end_plan(*plan);
    return result;
  }
  result.id = plan->id;
  result.positions = plan->groups[to].positions;  // has the room
  result.source = plan->groups[from].slots;
  result.target = plan->groups[to].slots;
  counts_.blocks_planned += result.target.size();
  return result;
}

std::vector<std::size_t> Index::blocks(PlanId reservation) {
  std::vector<std::size_t> all(groups_.size());
  const auto lock = enter();
  const Plan& plan = plan_of(reservation);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = plan.groups[i].slots.size();
  return all;
}

void Index::adopt(KeyPointers keys, std::size_t key_bytes, GroupIndex number,
                  std::span<const SlotIndex> slots) {
  KVMEM_EXPECTS(number < groups_.size(), "group is ", int{number}, ", and there are ",
                groups_.size());
  KVMEM_EXPECTS(keys.size() == slots.size(), "there are ", keys.size(), " keys for ", slots.size(),
                " slots");
  const auto lock = enter();
  if (keys.empty()) return;
  Group& group = groups_[number];
  KVMEM_EXPECTS(group.writing + group.ready + group.leaving == 0, "group '",
                options_.groups[number].name, "' has entries already");
  std::vector<bool> taken(group.slots);
  for (const SlotIndex slot : slots) {
    KVMEM_EXPECTS(slot < group.slots, "slot ", slot, " is out of range: group '",
                  options_.groups[number].name, "' has ", group.slots);
    KVMEM_EXPECTS(!taken[slot], "slot ", slot, " stands twice");
    KVMEM_EXPECTS(group.retiring.empty() || !group.retiring[slot], "slot ", slot, " is retired");
    taken[slot] = true;
  }
  expect_keys(key_bytes);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t hash = entries_->hash(keys[i], number);
    if (entries_->find(hash, keys[i], number) != Entries::none) {
      taken[slots[i]] = false;
      continue;
    }
    group.policy->announce(hash);
    entries_->insert(hash, keys[i], group.base + slots[i], number);
    group.policy->insert(slots[i], hash, 1.0);
    entries_->facts(group.base + slots[i]).state = EntryState::writing;
    ++group.writing;
    publish(group.base + slots[i]);
  }
  group.free_count = group.next_free = 0;
  for (SlotIndex slot = 0; slot < group.slots; ++slot) {
    const bool retired = !group.retiring.empty() && group.retiring[slot];
    if (!taken[slot] && !retired) group.put_free(slot);
  }
}

void Index::retire(GroupIndex number, SlotIndex slot) {
  const auto lock = enter();
  KVMEM_EXPECTS(number < groups_.size() && slot < groups_[number].slots, "there is no slot ", slot,
                " in group ", int{number});
  Group& group = groups_[number];
  group.retiring.resize(group.slots);
  if (group.retiring[slot]) return;
  group.retiring[slot] = true;
  const EntryState state = entries_ ? entries_->facts(group.base + slot).state : EntryState::free;
  if (state == EntryState::ready || state == EntryState::writing)
    return remove_entry(group.base + slot);
  if (state != EntryState::free) return;  // its last holder will see to it
  for (SlotIndex left = group.free_count; left > 0; --left) {
    const SlotIndex other = group.take_free();
    if (other != slot) group.put_free(other);
  }
  ++group.retired;
}

}  // namespace kvmem
