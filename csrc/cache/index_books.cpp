// What is removed, evicted ahead of need, told, counted and checked.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "cache/index_parts.hpp"

namespace kvmem {

// ---- removing ----

std::size_t Index::remove(KeyPointers keys, std::size_t key_bytes,
                          std::optional<GroupIndex> of_group, std::vector<Place>* were) {
  const auto lock = enter();
  if (keys.empty() || !knows(key_bytes)) return 0;
  if (were != nullptr) were->reserve(keys.size() * groups_.size());
  std::size_t removed = 0;
  for (const std::byte* const key : keys) {
    for (const Group& group : groups_) {
      if (of_group && group.number != *of_group) continue;
      const EntryId entry = entries_->find(entries_->hash(key, group.number), key, group.number);
      if (entry == Entries::none) continue;
      if (were != nullptr) were->push_back({group.number, entry - group.base});
      remove_entry(entry);
      ++removed;
    }
  }
  counts_.removed += removed;
  return removed;
}

std::size_t Index::clear(std::vector<Place>* were) {
  const auto lock = enter();
  std::size_t removed = 0;
  for (const Group& group : groups_) {
    if (!entries_) break;
    if (were != nullptr) were->reserve(were->size() + group.ready + group.writing);
    for (EntryId entry = group.base; entry < group.base + group.slots; ++entry) {
      const EntryState state = entries_->facts(entry).state;
      if (state != EntryState::ready && state != EntryState::writing) continue;
      if (were != nullptr) were->push_back({group.number, entry - group.base});
      remove_entry(entry);
      ++removed;
    }
  }
  counts_.removed += removed;
  return removed;
}

// ---- eviction ahead of need ----

bool Index::wants_trim() const {
  const auto lock = enter();
  return std::ranges::any_of(groups_, [&](const Group& group) {
    return !group.backs && group.free_count < options_.low_free * group.slots &&
           group.evictable > 0;
  });
}

std::size_t Index::trim(std::size_t most) {
  const auto lock = enter();
  std::size_t evicted = 0;
  for (Group& group : groups_) {
    if (group.backs || group.free_count >= options_.low_free * group.slots) continue;
    const double wanted = options_.high_free * group.slots - group.free_count;
    evicted +=
        evict_some(group, std::min(most - evicted, static_cast<std::size_t>(std::ceil(wanted))));
  }
  return evicted;
}

// ---- looking ----

std::size_t Index::peek(KeyPointers keys, std::size_t key_bytes, Pending pending) const {
  const auto lock = enter();
  if (keys.empty() || !knows(key_bytes)) return 0;
  find_all(keys);
  return usable_prefix(keys.size(), pending == Pending::attach);
}

EntryState Index::state(const std::byte* key, std::size_t key_bytes, GroupIndex group) const {
  const auto lock = enter();
  KVMEM_EXPECTS(group < groups_.size(), "group is ", int{group}, ", and there are ",
                groups_.size());
  if (!knows(key_bytes)) return EntryState::free;
  const EntryId entry = entries_->find(entries_->hash(key, group), key, group);
  return entry == Entries::none ? EntryState::free : entries_->facts(entry).state;
}

EntryState Index::state(const Place& place) const {
  const auto lock = enter();
  KVMEM_EXPECTS(place.group < groups_.size() && place.slot < groups_[place.group].slots,
                "there is no slot ", place.slot, " in group ", int{place.group});
  return entries_ ? entries_->facts(groups_[place.group].base + place.slot).state
                  : EntryState::free;
}

std::size_t Index::key_bytes() const {
  const auto lock = enter();
  return entries_ ? entries_->key_bytes() : 0;
}

// ---- telling ----

void Index::tell(IndexEvent::Kind kind, EntryId entry) noexcept {
  if (options_.max_events == 0) return;
  if (events_.events.size() == options_.max_events) {  // those that are too old to be of use
    events_.lost += events_.events.size();
    counts_.events_lost += events_.events.size();
    events_.events.clear();
  }
  IndexEvent& event = events_.events.emplace_back();  // it has the room
  event.kind = kind;
  event.group = entries_->facts(entry).group;
  std::copy_n(entries_->key(entry), entries_->key_bytes(), event.key.begin());
}

IndexEvents Index::take_events() {
  IndexEvents taken;
  taken.events.reserve(options_.max_events);
  const auto lock = enter();
  std::swap(taken, events_);
  return taken;
}

std::vector<Holding> Index::holdings() const {
  const auto lock = enter();
  std::map<std::string, Holding> by_owner;
  for (const auto& plan : plans_) {
    if (!plan->live) continue;
    Holding& holding = by_owner[plan->owner];
    holding.owner = plan->owner;
    ++holding.plans;
    for (const PlannedSlots& its : plan->groups) holding.blocks += its.slots.size();
  }
  std::vector<Holding> all;
  for (auto& [owner, holding] : by_owner) all.push_back(std::move(holding));
  std::ranges::stable_sort(all, std::greater<>{}, &Holding::blocks);
  return all;
}

PoolExhausted Index::exhausted(std::size_t wanted) const {
  constexpr std::size_t most_named = 8;
  const std::vector<Holding> holders = holdings();
  std::string by;
  for (std::size_t i = 0; i < std::min(holders.size(), most_named); ++i) {
    by += text(i == 0 ? " (held by " : ", ", "'", holders[i].owner, "': ", holders[i].blocks);
  }
  if (!by.empty()) by += holders.size() > most_named ? " and others)" : ")";
  const auto lock = enter();
  if (free_plans_.empty() && plans_.size() == options_.max_plans) {
    return PoolExhausted(text("the index has no place for another plan", by),
                         {"plans", 1, 0, options_.max_plans, plans_.size(), 0});
  }
  const Group& tight = *std::ranges::min_element(groups_, {}, &Group::room);
  return PoolExhausted(
      text("group '", options_.groups[tight.number].name, "' of the index has no room", by),
      {"slots", wanted, tight.room(), tight.slots, tight.slots - tight.room(), 0});
}

IndexStats Index::stats() const {
  const auto lock = enter();
  IndexStats stats = counts_;
  for (const Group& group : groups_) {
    stats.groups.push_back({options_.groups[group.number].name, group.slots, group.free_count,
                            group.writing, group.ready, group.leaving, group.evictable,
                            group.retired});
    stats.bytes += group.policy->bytes() + group.free_slots.bytes();
  }
  if (entries_) stats.bytes += entries_->bytes();
  stats.plans = plans_.size() - free_plans_.size();
  stats.reservations = reservations_;
  return stats;
}

// ---- checking ----

namespace {
void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "kvmem: the books of the index do not add up: %s\n", what);
  std::abort();
}
}  // namespace

void Index::check() const {
  const auto lock = enter();
  std::map<EntryId, std::uint32_t> holds;
  for (const auto& plan : plans_) {
    for (const Group& group : groups_) {
      for (const SlotIndex slot : plan->groups[group.number].slots) ++holds[group.base + slot];
    }
  }
  for (const Group& group : groups_) {
    std::array<std::size_t, 5> counted{};
    std::size_t evictable = 0;
    for (EntryId entry = group.base; entries_ && entry < group.base + group.slots; ++entry) {
      const EntryFacts& facts = entries_->facts(entry);
      ++counted[static_cast<std::size_t>(facts.state)];
      const auto held = holds.find(entry);
      expect(facts.holds == (held == holds.end() ? 0 : held->second), "holds of plans");
      const bool found = facts.state == EntryState::ready || facts.state == EntryState::writing;
      if (facts.state != EntryState::free) {
        const std::byte* const key = entries_->key(entry);
        const EntryId there = entries_->find(entries_->hash(key, group.number), key, group.number);
        expect((there == entry) == found, "what is found");
        expect(found ? facts.state == EntryState::ready || facts.holds > 0 : facts.holds > 0,
               "entries that nobody holds");
      }
      evictable += facts.state == EntryState::ready && facts.holds == 0;
    }
    const auto in = [&](EntryState state) { return counted[static_cast<std::size_t>(state)]; };
    expect(!entries_ || in(EntryState::free) == group.free_count + group.retired, "free slots");
    expect(in(EntryState::writing) == group.writing, "entries in flight");
    expect(in(EntryState::ready) == group.ready, "readable entries");
    expect(in(EntryState::forgotten) + in(EntryState::failed) == group.leaving, "leaving entries");
    expect(evictable == group.evictable, "evictable entries");
    expect(group.free_count + group.writing + group.ready + group.leaving + group.retired ==
               group.slots,
           "slots");
  }
}

}  // namespace kvmem
