// Plans: what is reserved, begun and finished.
#include <algorithm>
#include <limits>

#include "cache/index_parts.hpp"

namespace kvmem {

namespace {
constexpr Nanoseconds never = std::numeric_limits<Nanoseconds>::max();
constexpr double most_expiry_seconds = 1e9;
constexpr std::uint64_t id_step = most_plans;  // a plan has a place below it, and counts above it
}  // namespace

// ---- what is found ----

void Index::find_all(KeyPointers keys) const {
  found_.resize(keys.size() * groups_.size());
  for (const Group& group : groups_) {
    Found* const found = found_.data() + group.number * keys.size();
    for (std::size_t i = 0; i < keys.size(); ++i) {
      found[i].hash = entries_->hash(keys[i], group.number);
      entries_->prefetch_bucket(found[i].hash);
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const EntryId likely = entries_->prefetch_entry(found[i].hash);
      if (likely >= group.base && likely - group.base < group.slots)
        group.policy->prefetch(likely - group.base);
    }
    for (std::size_t i = 0; i < keys.size(); ++i)
      found[i].entry = entries_->find(found[i].hash, keys[i], group.number);
  }
}

bool Index::usable(EntryId entry, bool with_writing) const noexcept {
  if (entry == Entries::none) return false;
  const EntryState state = entries_->facts(entry).state;
  return state == EntryState::ready || state == EntryState::forgotten ||
         (with_writing && state == EntryState::writing);
}

EntryId Index::serving(const Group& group, std::size_t keys, std::size_t position,
                       bool with_writing) const noexcept {
  EntryId in_flight = Entries::none;
  for (const Group* tier = &group;; tier = &groups_[*tier->backed_by]) {
    const EntryId entry = found_[tier->number * keys + position].entry;
    if (usable(entry, false)) return entry;
    if (in_flight == Entries::none && usable(entry, with_writing)) in_flight = entry;
    if (!tier->backed_by) return in_flight;
  }
}

// From what was found.
std::size_t Index::usable_prefix(std::size_t keys, bool with_writing) const noexcept {
  return longest_usable(needs_, keys, [&](GroupIndex group, std::size_t position) {
    return serving(groups_[group], keys, position, with_writing) != Entries::none;
  });
}

// ---- plans ----

Index::Plan* Index::new_plan(PlanKind kind, const std::string& owner, const GroupCounts& blocks,
                             KeyPointers keys) {
  if (free_plans_.empty()) {
    if (plans_.size() == options_.max_plans) return nullptr;
    free_plans_.reserve(plans_.size() + 1);
    auto made = std::make_unique<Plan>();
    made->id = id_step + plans_.size();
    made->groups.resize(groups_.size());
    made->ended.resize(options_.ranks);
    plans_.push_back(std::move(made));
    free_plans_.push_back(static_cast<std::uint32_t>(plans_.size() - 1));
  }
  Plan& plan = *plans_[free_plans_.back()];
  for (const Group& group : groups_) reserve_room(plan.groups[group.number], blocks[group.number]);
  plan.keys.clear();
  for (const std::byte* const key : keys)
    plan.keys.insert(plan.keys.end(), key, key + entries_->key_bytes());
  plan.owner = owner;
  free_plans_.pop_back();  // nothing fails from here on
  plan.kind = kind;
  plan.live = true;
  plan.begun = kind != PlanKind::load;
  plan.failed = plan.attaches = false;
  plan.length = 0;
  plan.expires = never;
  plan.ended.assign(options_.ranks, false);
  plan.ranks_left = options_.ranks;
  if (!plan.begun) ++reservations_;
  return &plan;
}

// Its id is never given again: what is above its place counts.
void Index::end_plan(Plan& plan) noexcept {
  let_go_all(plan);
  if (!plan.begun) --reservations_;
  plan.live = false;
  free_plans_.push_back(static_cast<std::uint32_t>(plan.id % id_step));  // has room for all
  plan.id += id_step;
}

void Index::let_go_all(Plan& plan) noexcept {
  for (const Group& group : groups_) {
    PlannedSlots& its = plan.groups[group.number];
    for (const SlotIndex slot : its.slots) let_go(group.base + slot);
    its.positions.clear();
    its.slots.clear();
  }
}

Index::Plan& Index::plan_of(PlanId id) {
  const std::size_t place = id % id_step;
  KVMEM_EXPECTS(place < plans_.size() && plans_[place]->live && plans_[place]->id == id, "plan ",
                id, " does not exist or has ended");
  return *plans_[place];
}

Index::Plan& Index::reservation_of(PlanId id) {
  Plan& plan = plan_of(id);
  KVMEM_EXPECTS(!plan.begun, "plan ", id, " is ",
                plan.kind == PlanKind::load ? "begun" : "that of a store or copy",
                ", and only a reservation that was not begun can be changed or released");
  return plan;
}

bool Index::any(const Plan& plan, EntryState state) const noexcept {
  for (const Group& group : groups_) {
    for (const SlotIndex slot : plan.groups[group.number].slots) {
      if (entries_->facts(group.base + slot).state == state) return true;
    }
  }
  return false;
}

// ---- load ----

// Of those that were found; tail first, so that the head is the most recent one. In each tier: what
// is used from one must not be forgotten by the next.
void Index::hold_prefix(Plan& plan, std::size_t keys, std::size_t length,
                        bool with_writing) noexcept {
  for (const Group& group : groups_) {
    if (group.backs) continue;
    const KeyRange range = needed(group.need, length);
    for (std::size_t i = range.first; i < range.last; ++i) {
      const EntryId entry = serving(group, keys, i, with_writing);
      const Group& its = group_of(entry);
      hold(entry);
      plan.groups[its.number].positions.push_back(static_cast<std::uint32_t>(i));
      plan.groups[its.number].slots.push_back(entry - its.base);
    }
    for (const Group* tier = &group;; tier = &groups_[*tier->backed_by]) {
      const Found* const found = found_.data() + tier->number * keys;
      for (std::size_t i = range.last; i-- > range.first;) {
        const EntryId entry = found[i].entry;
        if (entry == Entries::none) continue;
        const EntryState state = entries_->facts(entry).state;  // others have left the policy
        if (state == EntryState::ready || state == EntryState::writing)
          tier->policy->touch(entry - tier->base);
      }
      if (!tier->backed_by) break;
    }
  }
  plan.length = length;
}

Reservation Index::reserve(KeyPointers keys, std::size_t key_bytes, const std::string& owner,
                           Pending pending, std::optional<double> expires_seconds) {
  if (expires_seconds) {
    KVMEM_EXPECTS(*expires_seconds >= 0 && *expires_seconds <= most_expiry_seconds,
                  "expires_seconds is ", *expires_seconds, ", which must be 0 to ",
                  most_expiry_seconds);
  }
  Reservation result;
  const auto lock = enter();
  if (keys.empty()) return result;
  expect_keys(key_bytes);
  expire();
  find_all(keys);
  result.length = usable_prefix(keys.size(), false);
  const std::size_t with_writing =
      result.length < keys.size() ? usable_prefix(keys.size(), true) : result.length;
  result.pending = with_writing > result.length;
  if (pending == Pending::attach) result.length = with_writing;
  counts_.keys_asked += keys.size();
  counts_.keys_pending += with_writing - std::min(result.length, with_writing);
  if (result.length == 0) return result;

  GroupCounts blocks{};
  blocks.fill(result.length);
  Plan* const plan = new_plan(PlanKind::load, owner, blocks,
                              keys.first(shortening_needs_keys_ ? result.length : 0));
  if (plan == nullptr) {
    ++counts_.refused;
    throw PoolExhausted("the index has no place for another plan",
                        {"plans", 1, 0, options_.max_plans, plans_.size(), 0});
  }
  counts_.keys_reserved += result.length;
  plan->attaches = result.pending && pending == Pending::attach;
  hold_prefix(*plan, keys.size(), result.length, plan->attaches);
  if (expires_seconds) {
    plan->expires = options_.clock() + static_cast<Nanoseconds>(*expires_seconds * 1e9);
    next_expiry_ = std::min(next_expiry_, plan->expires);
  }
  result.id = plan->id;
  return result;
}

// What the plan holds is its own, whatever is found by now, unless its bytes never came.
std::size_t Index::shorten(Plan& plan, std::size_t length) {
  const std::size_t keys = std::min(plan.length, length);
  if (shortening_needs_keys_) {
    std::vector<const std::byte*> pointers(keys);
    for (std::size_t i = 0; i < keys; ++i)
      pointers[i] = plan.keys.data() + i * entries_->key_bytes();
    find_all(pointers);
  } else {
    found_.assign(keys * groups_.size(), {});
  }
  for (const Group& group : groups_) {
    const PlannedSlots& its = plan.groups[group.number];
    for (std::size_t i = 0; i < its.slots.size() && its.positions[i] < keys; ++i)
      found_[group.number * keys + its.positions[i]].entry = group.base + its.slots[i];
  }
  const std::size_t usable_keys = usable_prefix(keys, plan.attaches);
  const std::vector<PlannedSlots> before = plan.groups;
  for (PlannedSlots& its : plan.groups) {
    its.positions.clear();
    its.slots.clear();
  }
  hold_prefix(plan, keys, usable_keys, plan.attaches);
  for (const Group& group : groups_) {
    for (const SlotIndex slot : before[group.number].slots) let_go(group.base + slot);
  }
  return usable_keys;
}

std::size_t Index::keep(PlanId reservation, std::size_t length) {
  const auto lock = enter();
  Plan& plan = reservation_of(reservation);
  if (length >= plan.length && plan.length > 0) return plan.length;
  const std::size_t kept = shorten(plan, length);
  if (kept == 0) end_plan(plan);
  return kept;
}

std::optional<LoadPlan> Index::begin(PlanId reservation, bool waits) {
  const auto lock = enter();
  Plan& plan = reservation_of(reservation);
  if (plan.attaches) {
    if (any(plan, EntryState::failed)) static_cast<void>(shorten(plan, plan.length));
    if (any(plan, EntryState::writing)) {
      if (waits) plan.expires = never;
      return std::nullopt;
    }
  }
  LoadPlan result{plan.length, plan.groups};
  if (plan.length == 0) {
    end_plan(plan);
    return result;
  }
  plan.begun = true;
  --reservations_;
  return result;
}

void Index::release(PlanId reservation) {
  const auto lock = enter();
  end_plan(reservation_of(reservation));
}

void Index::expire() noexcept {
  if (next_expiry_ == never || options_.clock() < next_expiry_) return;
  const Nanoseconds now = options_.clock();
  next_expiry_ = never;
  for (const auto& plan : plans_) {
    if (!plan->live || plan->begun || plan->expires == never) continue;
    if (plan->expires > now) {
      next_expiry_ = std::min(next_expiry_, plan->expires);
    } else {
      end_plan(*plan);
      ++counts_.expired;
    }
  }
}

std::size_t Index::drop_owner(const std::string& owner) {
  const auto lock = enter();
  std::size_t ended = 0;
  for (const auto& plan : plans_) {
    if (!plan->live || plan->begun || plan->owner != owner) continue;
    end_plan(*plan);
    ++ended;
  }
  return ended;
}

// ---- the end ----

bool Index::finish(PlanId id, std::size_t rank, bool ok) {
  const auto lock = enter();
  KVMEM_EXPECTS(rank < options_.ranks, "rank is ", rank, ", and there are ", options_.ranks);
  if (id == 0) return true;
  Plan& plan = plan_of(id);
  KVMEM_EXPECTS(plan.begun, "plan ", id, " was not begun, so nothing of it can have ended");
  KVMEM_EXPECTS(!plan.ended[rank], "rank ", rank, " has finished plan ", id, " already");
  plan.ended[rank] = true;
  if (!ok && !plan.failed) {
    plan.failed = true;
    if (plan.kind != PlanKind::load) give_up(plan);
  }
  if (--plan.ranks_left > 0) return false;
  settle(plan);
  end_plan(plan);
  return true;
}

// A store that failed on one rank is never published; others may store its keys at once.
void Index::give_up(const Plan& plan) noexcept {
  for (const Group& group : groups_) {
    for (const SlotIndex slot : plan.groups[group.number].slots) {
      const EntryId entry = group.base + slot;
      if (entries_->facts(entry).state == EntryState::writing) remove_entry(entry);
    }
  }
}

// Every rank has ended: what arrived everywhere is readable.
void Index::settle(const Plan& plan) noexcept {
  std::uint64_t& failed =
      plan.kind == PlanKind::load ? counts_.blocks_load_failed : counts_.blocks_store_failed;
  for (Group& group : groups_) {
    const PlannedSlots& its = plan.groups[group.number];
    if (plan.kind == PlanKind::copy && group.number != plan.target) continue;
    if (plan.kind == PlanKind::load || plan.failed) {
      (plan.failed ? failed : counts_.blocks_loaded) += its.slots.size();
      continue;
    }
    for (const SlotIndex slot : its.slots) {
      if (entries_->facts(group.base + slot).state == EntryState::writing)
        publish(group.base + slot);
      else
        ++failed;  // removed meanwhile
    }
  }
}

void Index::publish(EntryId entry) noexcept {
  Group& group = group_of(entry);
  EntryFacts& facts = entries_->facts(entry);
  facts.state = EntryState::ready;
  --group.writing;
  ++group.ready;
  if (facts.holds == 0) ++group.evictable;
  ++counts_.blocks_published;
  tell(IndexEvent::Kind::stored, entry);
}

}  // namespace kvmem
