#include "cache/index.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <unordered_set>

#include "cache/index_parts.hpp"

namespace kvmem {

namespace {

constexpr std::size_t most_ranks = 4096;
constexpr std::uint64_t most_entries = std::uint64_t{1} << 31U;

IndexOptions checked(IndexOptions options) {
  KVMEM_EXPECTS(!options.groups.empty() && options.groups.size() <= most_groups, "there are ",
                options.groups.size(), " groups, which must be 1 to ", most_groups);
  std::uint64_t entries = 0;
  std::unordered_set<std::string> names;
  for (const GroupOptions& group : options.groups) {
    KVMEM_EXPECTS(names.insert(group.name).second, "two groups have the name '", group.name, "'");
    KVMEM_EXPECTS(group.slots > 0, "group '", group.name, "' has no slots");
    KVMEM_EXPECTS(group.need.kind != NeedKind::last || group.need.count > 0, "group '", group.name,
                  "' needs the last 0 blocks, which must be at least 1");
    if (group.backs) {
      const auto number = static_cast<std::size_t>(&group - options.groups.data());
      KVMEM_EXPECTS(*group.backs < number, "group '", group.name, "' backs group ",
                    int{*group.backs}, ", which must stand before it");
      for (std::size_t other = 0; other < number; ++other)
        KVMEM_EXPECTS(options.groups[other].backs != group.backs, "groups '",
                      options.groups[other].name, "' and '", group.name, "' back the same group");
    }
    entries += group.slots;
  }
  KVMEM_EXPECTS(entries <= most_entries, "the groups have ", entries,
                " slots together, which must be at most ", most_entries);
  KVMEM_EXPECTS(options.key_bytes == 0 ||
                    (options.key_bytes >= least_key_bytes && options.key_bytes <= most_key_bytes),
                "key_bytes is ", options.key_bytes, ", which must be ", least_key_bytes, " to ",
                most_key_bytes);
  KVMEM_EXPECTS(options.ranks >= 1 && options.ranks <= most_ranks, "ranks is ", options.ranks,
                ", which must be 1 to ", most_ranks);
  KVMEM_EXPECTS(
      0 <= options.low_free && options.low_free <= options.high_free && options.high_free <= 1,
      "the watermarks are ", options.low_free, " and ", options.high_free,
      ", which must ascend from 0 to 1");
  KVMEM_EXPECTS(options.max_plans >= 1 && options.max_plans <= most_plans, "max_plans is ",
                options.max_plans, ", which must be 1 to ", most_plans);
  if (!options.clock) {
    options.clock = [] {
      return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
  }
  return options;
}

}  // namespace

Index::Index(IndexOptions options)
    : options_(checked(std::move(options))), next_expiry_(std::numeric_limits<Nanoseconds>::max()) {
  for (const GroupOptions& group : options_.groups)
    shortening_needs_keys_ = shortening_needs_keys_ || group.need.kind != NeedKind::all;
  EntryId base = 0;
  groups_.reserve(options_.groups.size());
  for (const GroupOptions& group : options_.groups) {
    groups_.emplace_back(group, static_cast<GroupIndex>(groups_.size()), base, options_.policy);
    base += group.slots;
    if (!group.backs) needs_.push_back({groups_.back().number, group.need});
    if (group.backs) groups_[*group.backs].backed_by = groups_.back().number;
  }
  events_.events.reserve(options_.max_events);
  if (options_.key_bytes != 0) expect_keys(options_.key_bytes);
}

Index::~Index() = default;

// ---- entries ----

void Index::expect_keys(std::size_t key_bytes) {
  if (knows(key_bytes)) return;
  const Group& last = groups_.back();
  entries_ = std::make_unique<Entries>(last.base + last.slots, key_bytes);
  for (Group& group : groups_) group.entries = entries_.get();
}

// Before the lock: in a forked child a thread that is not there may have it for ever.
std::unique_lock<std::mutex> Index::enter() const {
  mark_.expect_same_process("the index");
  return std::unique_lock(mutex_);
}

bool Index::knows(std::size_t key_bytes) const {
  if (!entries_) return false;
  KVMEM_EXPECTS(key_bytes == entries_->key_bytes(), "a key has ", key_bytes,
                " bytes, and those of this index have ", entries_->key_bytes());
  return true;
}

void Index::hold(EntryId entry) noexcept {
  EntryFacts& facts = entries_->facts(entry);
  if (facts.holds++ == 0 && facts.state == EntryState::ready) --group_of(entry).evictable;
}

void Index::let_go(EntryId entry) noexcept {
  EntryFacts& facts = entries_->facts(entry);
  KVMEM_INVARIANT(facts.holds > 0 && facts.state != EntryState::free);
  if (--facts.holds > 0) return;
  if (facts.state == EntryState::ready) {
    ++group_of(entry).evictable;
  } else {
    KVMEM_INVARIANT(facts.state != EntryState::writing);
    gone(entry);
  }
}

// No longer found, and no longer in the policy. The slot stays until the last holder lets go.
void Index::leave(EntryId entry, EntryState how) noexcept {
  EntryFacts& facts = entries_->facts(entry);
  Group& group = group_of(entry);
  if (facts.state == EntryState::ready) {
    tell(IndexEvent::Kind::removed, entry);
    --group.ready;
    if (facts.holds == 0) --group.evictable;
  } else {
    --group.writing;
  }
  entries_->erase(entry);
  ++group.leaving;
  facts.state = how;
  if (facts.holds == 0) gone(entry);
}

void Index::remove_entry(EntryId entry) noexcept {
  const Group& group = group_of(entry);
  group.policy->remove(entry - group.base);
  leave(entry, entries_->facts(entry).state == EntryState::ready ? EntryState::forgotten
                                                                 : EntryState::failed);
}

void Index::gone(EntryId entry) noexcept {
  Group& group = group_of(entry);
  entries_->facts(entry).state = EntryState::free;
  --group.leaving;
  if (!group.retiring.empty() && group.retiring[entry - group.base])
    ++group.retired;
  else
    group.put_free(entry - group.base);
}

EntryId Index::take_slot(Group& group) noexcept {
  if (group.free_count == 0) static_cast<void>(evict_some(group, 1));
  KVMEM_INVARIANT(group.free_count > 0);
  return group.base + group.take_free();
}

std::size_t Index::evict_some(Group& group, std::size_t most) noexcept {
  std::size_t evicted = 0;
  for (; evicted < most && group.evictable > 0; ++evicted) {
    const std::optional<EntryId> slot = group.policy->victim(group);
    KVMEM_INVARIANT(slot.has_value());
    leave(group.base + *slot, EntryState::forgotten);
  }
  counts_.evicted += evicted;
  return evicted;
}

// ---- store ----

// How many leading keys find room, and how many entries of each group those miss.
std::size_t Index::coverable(std::size_t keys, const Ranges& ranges,
                             GroupCounts& missing) const noexcept {
  for (std::size_t i = 0; i < keys; ++i) {
    for (const Group& group : groups_) {
      const KeyRange& range = ranges[group.number];
      if (i < range.first || i >= range.last) continue;
      if (found_[group.number * keys + i].entry != Entries::none) continue;
      if (missing[group.number] < group.room()) {
        ++missing[group.number];
        continue;
      }
      for (const Group& before : groups_) {  // those that were counted for this key
        const KeyRange& its = ranges[before.number];
        if (&before == &group) break;
        if (i >= its.first && i < its.last &&
            found_[before.number * keys + i].entry == Entries::none)
          --missing[before.number];
      }
      return i;
    }
  }
  return keys;
}

// One key of one group: used again, or in a slot of its own from now on.
void Index::plan_key(StorePlan& result, GroupIndex group_number, std::size_t position,
                     KeyPointers keys, double value) noexcept {
  Group& group = groups_[group_number];
  Found& found = found_[group_number * keys.size() + position];
  const std::byte* const key = keys[position];
  // Again, for a key that stands behind this one too.
  if (found.entry == Entries::none) found.entry = entries_->find(found.hash, key, group_number);
  if (found.entry != Entries::none) {
    group.policy->touch(found.entry - group.base);
    const EntryFacts& facts = entries_->facts(found.entry);
    if (facts.state == EntryState::ready) ++result.present;
    if (facts.state == EntryState::writing) ++result.attached;
    return;
  }
  write_entry(group, found, key, value, result.groups[group_number], position);
}

// In a slot of its own from now on, held by who writes it.
void Index::write_entry(Group& group, const Found& found, const std::byte* key, double value,
                        PlannedSlots& its, std::size_t position) noexcept {
  group.policy->announce(found.hash);
  const EntryId entry = take_slot(group);
  const SlotIndex slot = entry - group.base;
  entries_->insert(found.hash, key, entry, group.number);
  group.policy->insert(slot, found.hash, value);
  entries_->facts(entry).state = EntryState::writing;
  ++group.writing;
  hold(entry);
  its.positions.push_back(static_cast<std::uint32_t>(position));
  its.slots.push_back(slot);
}

// Checked, and in full where none were given.
Index::Ranges Index::ranges_of(std::size_t keys, std::span<const KeyRange> given) const {
  KVMEM_EXPECTS(given.empty() || given.size() == groups_.size(), "there are ", given.size(),
                " ranges for ", groups_.size(), " groups");
  Ranges ranges;
  for (const Group& group : groups_) {
    KeyRange& range = ranges[group.number];
    range = {group.need.kind == NeedKind::state && keys > 0 ? keys - 1 : 0, keys};
    if (group.backs) range = {0, 0};  // somebody copies into it later
    if (!given.empty()) range = given[group.number];
    KVMEM_EXPECTS(range.first <= range.last && range.last <= keys, "the range of group '",
                  options_.groups[group.number].name, "' is ", range.first, " to ", range.last,
                  ", and there are ", keys, " keys");
  }
  return ranges;
}

void Index::expect_value(double value) {
  KVMEM_EXPECTS(value > 0 && value <= std::numeric_limits<double>::max(), "value is ", value,
                ", which must be positive and finite");
}

std::optional<StorePlan> Index::try_plan_store(KeyPointers keys, std::size_t key_bytes,
                                               const std::string& owner,
                                               std::span<const KeyRange> ranges, double value) {
  expect_value(value);
  const auto lock = enter();
  if (keys.empty()) return StorePlan{.groups = std::vector<PlannedSlots>(groups_.size())};
  const Ranges wanted = ranges_of(keys.size(), ranges);
  expect_keys(key_bytes);
  expire();
  find_all(keys);
  const BatchHold batch(*this, keys.size(), std::span(wanted).first(groups_.size()));

  GroupCounts missing{};
  StorePlan result;
  result.covered = coverable(keys.size(), wanted, missing);
  const std::size_t new_blocks = std::accumulate(missing.begin(), missing.end(), std::size_t{0});
  result.groups.resize(groups_.size());
  for (const Group& group : groups_)
    reserve_room(result.groups[group.number], missing[group.number]);
  Plan* const plan = new_blocks > 0 ? new_plan(PlanKind::store, owner, missing, {}) : nullptr;
  if (plan == nullptr && (new_blocks > 0 || result.covered < keys.size())) {
    ++counts_.refused;
    return std::nullopt;
  }

  for (std::size_t i = result.covered; i-- > 0;) {  // tail first
    for (const Group& group : groups_) {
      const KeyRange& range = wanted[group.number];
      if (i >= range.first && i < range.last) plan_key(result, group.number, i, keys, value);
    }
  }
  for (const Group& group : groups_) {
    PlannedSlots& its = result.groups[group.number];
    std::ranges::reverse(its.positions);
    std::ranges::reverse(its.slots);
    counts_.blocks_planned += its.slots.size();
    if (plan != nullptr) plan->groups[group.number] = its;  // it has the room
  }
  if (plan != nullptr) result.id = plan->id;
  counts_.blocks_present += result.present;
  counts_.blocks_attached += result.attached;
  return result;
}

}  // namespace kvmem
