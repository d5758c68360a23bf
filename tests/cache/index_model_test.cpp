// The index against a plain model of it, over random walks: groups of all three needs, two ranks,
// two owners who want the same keys. What is evicted is the policy's choice; that it may be is not.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "cache/index.hpp"
#include "cache/index_keys.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t ranks = 2;
constexpr std::array<Need, 3> needs{Need{NeedKind::all, 0}, Need{NeedKind::last, 2},
                                    Need{NeedKind::state, 0}};
constexpr std::array<SlotIndex, 3> slots_of{6, 5, 4};

struct ModelEntry {
  std::uint64_t key = 0;
  SlotIndex slot = 0;
  EntryState state = EntryState::writing;
  std::set<PlanId> holders;
};

struct ModelPlan {
  bool store = false, begun = false, attaches = false, failed = false;
  std::string owner;
  std::vector<std::uint64_t> keys;  // of a load: as far as it reaches
  Nanoseconds expires = -1;
  std::set<std::size_t> ended;
};

struct Tally {
  std::size_t stores = 0, loads = 0, published = 0, evicted = 0, attached = 0, failed = 0,
              expired = 0, shortened = 0, refused = 0;
};

class Walk {
 public:
  Walk(std::uint64_t seed, PolicyKind policy, Tally& tally)
      : random_(seed), tally_(tally), index_(options(policy)) {}

  void step() {
    switch (pick(12)) {
      case 0:
      case 1:
      case 2:
        return store();
      case 3:
      case 4:
        return reserve();
      case 5:
        return begin();
      case 6:
      case 7:
      case 8:
        return finish();
      case 9:
        return pick(2) ? release() : keep();
      case 10:
        return pick(3) ? remove() : drop_owner();
      default:
        return pick(2) ? pass_time() : stale();
    }
  }
  void check() {
    index_.check();
    const IndexStats stats = index_.stats();
    for (std::size_t g = 0; g < needs.size(); ++g) {
      std::map<SlotIndex, std::uint64_t> taken;
      for (const ModelEntry& entry : groups_[g])
        EXPECT_TRUE(taken.emplace(entry.slot, entry.key).second) << "a slot that two have";
      EXPECT_EQ(stats.groups[g].free, slots_of[g] - groups_[g].size());
      for (std::uint64_t key = 0; key < 24; ++key) {
        const ModelEntry* const entry = found(g, key);
        EXPECT_EQ(index_state(g, key), entry ? entry->state : EntryState::free)
            << "group " << g << ", key " << key;
      }
    }
    EXPECT_EQ(stats.plans, plans_.size());
  }

 private:
  IndexOptions options(PolicyKind policy) {
    IndexOptions made;
    for (std::size_t g = 0; g < needs.size(); ++g)
      made.groups.push_back({std::string(1, static_cast<char>('a' + g)), needs[g], slots_of[g]});
    made.policy = policy;
    made.ranks = ranks;
    made.clock = [this] { return now_; };
    return made;
  }

  std::size_t pick(std::size_t below) { return random_() % below; }
  std::string owner() { return pick(2) ? "one" : "two"; }
  // A part of one of four chains from its beginning.
  std::vector<std::uint64_t> chain() {
    std::vector<std::uint64_t> keys(1 + pick(6));
    const std::uint64_t first = 6 * pick(4);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = first + i;
    return keys;
  }
  EntryState index_state(std::size_t g, std::uint64_t key) {
    const Keys keys{key};
    return index_.state(keys.pointers()[0], Keys::bytes, static_cast<GroupIndex>(g));
  }

  ModelEntry* found(std::size_t g, std::uint64_t key) {
    for (ModelEntry& entry : groups_[g]) {
      if (entry.key == key && is_found(entry)) return &entry;
    }
    return nullptr;
  }
  static bool is_found(const ModelEntry& entry) {
    return entry.state == EntryState::ready || entry.state == EntryState::writing;
  }
  ModelEntry* held_by(PlanId plan, std::size_t g, std::uint64_t key) {
    for (ModelEntry& entry : groups_[g]) {
      if (entry.key == key && entry.holders.contains(plan)) return &entry;
    }
    return nullptr;
  }
  static std::pair<std::size_t, std::size_t> range(std::size_t g, std::size_t length) {
    if (needs[g].kind == NeedKind::all) return {0, length};
    const std::size_t count = needs[g].kind == NeedKind::state ? 1 : needs[g].count;
    return {length < count ? 0 : length - count, length};
  }
  // The longest length that has all that is needed. `own`: what that plan holds counts as well.
  std::size_t usable(const std::vector<std::uint64_t>& keys, bool writing, PlanId own = 0) {
    for (std::size_t length = keys.size(); length > 0; --length) {
      bool all = true;
      for (std::size_t g = 0; g < needs.size(); ++g) {
        const auto [first, last] = range(g, length);
        for (std::size_t i = first; i < last; ++i) {
          const ModelEntry* entry = own ? held_by(own, g, keys[i]) : nullptr;
          if (entry == nullptr) entry = found(g, keys[i]);
          all = all && entry != nullptr && entry->state != EntryState::failed &&
                (writing || entry->state != EntryState::writing);
        }
      }
      if (all) return length;
    }
    return 0;
  }
  void hold(PlanId plan, const std::vector<std::uint64_t>& keys, std::size_t length, PlanId own) {
    std::vector<ModelEntry*> held;
    for (std::size_t g = 0; g < needs.size(); ++g) {
      const auto [first, last] = range(g, length);
      for (std::size_t i = first; i < last; ++i) {
        ModelEntry* entry = own ? held_by(own, g, keys[i]) : nullptr;
        held.push_back(entry ? entry : found(g, keys[i]));
      }
    }
    if (own) let_go(own, held);
    for (ModelEntry* const entry : held) entry->holders.insert(plan);
    sweep();
  }
  void let_go(PlanId plan, const std::vector<ModelEntry*>& but = {}) {
    for (auto& group : groups_) {
      for (ModelEntry& entry : group) {
        if (std::ranges::find(but, &entry) == but.end()) entry.holders.erase(plan);
      }
    }
  }
  void sweep() {  // what nobody can find and nobody holds is gone
    for (auto& group : groups_)
      std::erase_if(
          group, [](const ModelEntry& entry) { return !is_found(entry) && entry.holders.empty(); });
  }
  void leave(ModelEntry& entry) {
    entry.state = entry.state == EntryState::ready ? EntryState::forgotten : EntryState::failed;
  }
  void end(PlanId plan) {
    let_go(plan);
    sweep();
    plans_.erase(plan);
  }

  void expire() {
    for (auto plan = plans_.begin(); plan != plans_.end();) {
      const auto next = std::next(plan);
      if (!plan->second.begun && plan->second.expires >= 0 && plan->second.expires <= now_) {
        ++tally_.expired;
        end(plan->first);
      }
      plan = next;
    }
  }

  void store() {
    expire();
    const auto keys = chain();
    std::array<std::size_t, 3> free{}, room{};
    std::set<const ModelEntry*> batch;
    for (std::size_t g = 0; g < needs.size(); ++g) {
      free[g] = room[g] = slots_of[g] - groups_[g].size();
      for (std::size_t i = first_stored(g, keys); i < keys.size(); ++i)
        batch.insert(found(g, keys[i]));
      for (const ModelEntry& entry : groups_[g]) room[g] += may_go(entry, batch);
    }
    std::size_t covered = keys.size();
    std::array<std::vector<std::uint32_t>, 3> missing;
    for (;; --covered) {
      bool fits = true;
      for (std::size_t g = 0; g < needs.size(); ++g) {
        missing[g].clear();
        for (std::size_t i = first_stored(g, keys); i < covered; ++i) {
          if (!found(g, keys[i])) missing[g].push_back(static_cast<std::uint32_t>(i));
        }
        fits = fits && missing[g].size() <= room[g];
      }
      if (fits) break;
    }
    const std::size_t new_blocks = missing[0].size() + missing[1].size() + missing[2].size();
    const std::string who = owner();
    const auto plan = index_.try_plan_store(Keys(keys).pointers(), Keys::bytes, who);
    if (new_blocks == 0 && covered < keys.size()) {
      EXPECT_FALSE(plan.has_value());
      ++tally_.refused;
      return;
    }
    ASSERT_TRUE(plan.has_value());
    EXPECT_EQ(plan->covered, covered);
    EXPECT_EQ(plan->id == 0, new_blocks == 0);
    ++tally_.stores;
    tally_.attached += plan->attached;
    for (std::size_t g = 0; g < needs.size(); ++g) {
      EXPECT_EQ(plan->groups[g].positions, missing[g]);
      adopt_evictions(g, batch, missing[g].size() > free[g] ? missing[g].size() - free[g] : 0);
      for (std::size_t i = 0; i < missing[g].size(); ++i)
        groups_[g].push_back(
            {keys[missing[g][i]], plan->groups[g].slots[i], EntryState::writing, {plan->id}});
    }
    if (plan->id != 0) {
      EXPECT_FALSE(plans_.contains(plan->id)) << "an id that was given before";
      ModelPlan& made = plans_[plan->id];
      made.store = made.begun = true;
      made.owner = who;
    }
  }
  static std::size_t first_stored(std::size_t g, const std::vector<std::uint64_t>& keys) {
    return needs[g].kind == NeedKind::state ? keys.size() - 1 : 0;
  }
  static bool may_go(const ModelEntry& entry, const std::set<const ModelEntry*>& batch) {
    return entry.state == EntryState::ready && entry.holders.empty() && !batch.contains(&entry);
  }
  void adopt_evictions(std::size_t g, const std::set<const ModelEntry*>& batch,
                       std::size_t expected) {
    std::vector<std::uint64_t> evicted;
    for (const ModelEntry& entry : groups_[g]) {
      if (!is_found(entry) || index_state(g, entry.key) != EntryState::free) continue;
      EXPECT_TRUE(may_go(entry, batch))
          << "group " << g << ", key " << entry.key << " was evicted and may not be";
      evicted.push_back(entry.key);
    }
    EXPECT_EQ(evicted.size(), expected);
    tally_.evicted += evicted.size();
    for (const std::uint64_t key : evicted)
      std::erase_if(groups_[g],
                    [&](const ModelEntry& entry) { return entry.key == key && is_found(entry); });
  }

  void reserve() {
    expire();
    const auto keys = chain();
    const bool attach = pick(2) == 0;
    const std::optional<double> expires =
        pick(3) == 0 ? std::optional<double>(static_cast<double>(pick(5))) : std::nullopt;
    const std::size_t ready = usable(keys, false), writing = usable(keys, true);
    const std::string who = owner();
    const Reservation got = index_.reserve(Keys(keys).pointers(), Keys::bytes, who,
                                           attach ? Pending::attach : Pending::stop, expires);
    EXPECT_EQ(got.length, attach ? writing : ready);
    EXPECT_EQ(got.pending, writing > ready);
    EXPECT_EQ(got.id == 0, got.length == 0);
    if (got.length == 0) return;
    ModelPlan plan;
    plan.attaches = attach && writing > ready;
    plan.owner = who;
    plan.keys = keys;
    plan.keys.resize(got.length);
    if (expires) plan.expires = now_ + static_cast<Nanoseconds>(*expires * 1e9);
    hold(got.id, keys, got.length, 0);
    plans_[got.id] = plan;
  }

  // Some plan of which `wanted` holds; 0 where there is none.
  template <class Wanted>
  PlanId some(Wanted&& wanted) {
    std::vector<PlanId> all;
    for (const auto& [id, plan] : plans_) {
      if (wanted(plan)) all.push_back(id);
    }
    return all.empty() ? 0 : all[pick(all.size())];
  }
  PlanId some_reservation() {
    return some([](const ModelPlan& plan) { return !plan.begun; });
  }

  void keep() {
    const PlanId id = some_reservation();
    if (id == 0) return;
    ModelPlan& plan = plans_[id];
    const std::size_t length = pick(plan.keys.size() + 2);
    if (length >= plan.keys.size()) {
      EXPECT_EQ(index_.keep(id, length), plan.keys.size());
      return;
    }
    auto keys = plan.keys;
    keys.resize(length);
    const std::size_t kept = usable(keys, plan.attaches, id);
    EXPECT_EQ(index_.keep(id, length), kept);
    ++tally_.shortened;
    if (kept == 0) return end(id);
    hold(id, keys, kept, id);
    plan.keys.resize(kept);
  }

  void begin() {
    const PlanId id = some_reservation();
    if (id == 0) return;
    ModelPlan& plan = plans_[id];
    const auto load = index_.begin(id);
    if (plan.attaches && any(id, EntryState::failed)) {
      const std::size_t kept = usable(plan.keys, true, id);
      hold(id, plan.keys, kept, id);
      plan.keys.resize(kept);
    }
    if (plan.attaches && any(id, EntryState::writing)) {
      EXPECT_FALSE(load.has_value()) << "readable before it was complete";
      return;
    }
    ASSERT_TRUE(load.has_value());
    EXPECT_EQ(load->length, plan.keys.size());
    if (plan.keys.empty()) return end(id);
    for (std::size_t g = 0; g < needs.size(); ++g) {
      const auto [first, last] = range(g, plan.keys.size());
      ASSERT_EQ(load->groups[g].slots.size(), last - first);
      for (std::size_t i = first; i < last; ++i) {
        EXPECT_EQ(load->groups[g].positions[i - first], i);
        EXPECT_EQ(load->groups[g].slots[i - first], held_by(id, g, plan.keys[i])->slot);
      }
    }
    plan.begun = true;
    ++tally_.loads;
  }
  bool any(PlanId id, EntryState state) {
    return std::ranges::any_of(groups_, [&](const auto& group) {
      return std::ranges::any_of(group, [&](const ModelEntry& entry) {
        return entry.state == state && entry.holders.contains(id);
      });
    });
  }

  void finish() {
    const PlanId id = some([](const ModelPlan& plan) { return plan.begun; });
    if (id == 0) return;
    ModelPlan& plan = plans_[id];
    const std::size_t rank = pick(ranks);
    const bool ok = pick(4) != 0;
    if (plan.ended.contains(rank)) {
      EXPECT_THROW(static_cast<void>(index_.finish(id, rank, ok)), InvalidArgument);
      return;
    }
    EXPECT_EQ(index_.finish(id, rank, ok), plan.ended.size() + 1 == ranks);
    plan.ended.insert(rank);
    plan.failed = plan.failed || !ok;
    for (auto& group : groups_) {
      for (ModelEntry& entry : group) {
        // A store holds what it writes and nothing else.
        if (!plan.store || entry.state != EntryState::writing || !entry.holders.contains(id))
          continue;
        if (plan.failed) {
          leave(entry);
          ++tally_.failed;
        } else if (plan.ended.size() == ranks) {
          entry.state = EntryState::ready;
          ++tally_.published;
        }
      }
    }
    if (plan.ended.size() == ranks) end(id);
  }

  void release() {
    const PlanId id = some_reservation();
    if (id == 0) return;
    index_.release(id);
    end(id);
  }
  void drop_owner() {
    const std::string who = owner();
    std::vector<PlanId> mine;
    for (const auto& [id, plan] : plans_) {
      if (!plan.begun && plan.owner == who) mine.push_back(id);
    }
    EXPECT_EQ(index_.drop_owner(who), mine.size());
    for (const PlanId id : mine) end(id);
  }
  void remove() {
    const std::vector<std::uint64_t> keys{pick(24)};
    std::size_t expected = 0;
    for (std::size_t g = 0; g < needs.size(); ++g) {
      ModelEntry* const entry = found(g, keys[0]);
      if (entry == nullptr) continue;
      leave(*entry);
      ++expected;
    }
    EXPECT_EQ(index_.remove(Keys(keys).pointers(), Keys::bytes), expected);
    sweep();
  }
  void pass_time() { now_ += 1'000'000'000; }
  void stale() {  // an id of a plan that has ended, or of none
    const PlanId id = (std::uint64_t{1 + pick(40)} << 32U) + pick(4);
    if (plans_.contains(id)) return;
    EXPECT_THROW(static_cast<void>(index_.finish(id, 0, true)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(index_.begin(id)), InvalidArgument);
    EXPECT_THROW(index_.release(id), InvalidArgument);
  }

  std::mt19937_64 random_;
  Tally& tally_;
  Nanoseconds now_ = 0;
  Index index_;
  std::array<std::vector<ModelEntry>, 3> groups_;
  std::map<PlanId, ModelPlan> plans_;
};

class IndexModel : public testing::TestWithParam<PolicyKind> {};

TEST_P(IndexModel, AgreesWithThePlainOneOverRandomWalks) {
  Tally tally;
  for (std::uint64_t seed = 0; seed < 350 && !HasFailure(); ++seed) {
    Walk walk(seed, GetParam(), tally);
    for (int i = 0; i < 120 && !HasFatalFailure(); ++i) {
      walk.step();
      walk.check();
      if (HasFailure()) FAIL() << "seed " << seed << ", step " << i;
    }
  }
  // The walks came to everything.
  for (const std::size_t count :
       {tally.stores, tally.loads, tally.published, tally.evicted, tally.attached, tally.failed,
        tally.expired, tally.shortened, tally.refused})
    EXPECT_GT(count, 50U);
}

INSTANTIATE_TEST_SUITE_P(Policies, IndexModel, testing::ValuesIn(policy_kinds),
                         [](const auto& policy) { return std::string(name_of(policy.param)); });

}  // namespace
}  // namespace kvmem::test
