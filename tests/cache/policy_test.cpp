// Policies against slow ones that are written down as their definitions read.
#include "cache/policy.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace kvmem::test {
namespace {

class Unless final : public MayGo {
 public:
  explicit Unless(std::set<EntryId> held = {}) : held_(std::move(held)) {}
  bool operator()(EntryId entry) const noexcept override {
    ++asked;
    return !held_.contains(entry);
  }
  mutable std::size_t asked = 0;

 private:
  std::set<EntryId> held_;
};

// What a cache of `capacity` hits by a policy written over keys, not entries.
template <class Plain>
std::vector<bool> hits_by(Plain plain, std::span<const std::uint64_t> keys) {
  std::vector<bool> hits;
  for (const std::uint64_t key : keys) hits.push_back(plain.access(key));
  return hits;
}

struct PlainLru {
  std::size_t capacity;
  std::deque<std::uint64_t> order = {};  // oldest first

  bool access(std::uint64_t key) {
    const bool hit = std::erase(order, key) > 0;
    order.push_back(key);
    if (order.size() > capacity) order.pop_front();
    return hit;
  }
};

// Figure 4 of the paper, case by case.
struct PlainArc {
  std::size_t c;
  double p = 0;
  std::deque<std::uint64_t> t1 = {}, t2 = {}, b1 = {}, b2 = {};  // oldest first

  void replace(bool in_b2) {
    const auto size = static_cast<double>(t1.size());
    if ((!t1.empty() && ((in_b2 && size == p) || size > p)) || t2.empty()) {
      b1.push_back(t1.front());
      t1.pop_front();
    } else {
      b2.push_back(t2.front());
      t2.pop_front();
    }
  }
  bool access(std::uint64_t key) {
    if (std::erase(t1, key) + std::erase(t2, key) > 0) {  // case I
      t2.push_back(key);
      return true;
    }
    const auto one = static_cast<double>(b1.size()), two = static_cast<double>(b2.size());
    if (std::erase(b1, key) > 0) {  // case II
      p = std::min(static_cast<double>(c), p + std::max(two / one, 1.0));
      replace(false);
      t2.push_back(key);
    } else if (std::erase(b2, key) > 0) {  // case III
      p = std::max(0.0, p - std::max(one / two, 1.0));
      replace(true);
      t2.push_back(key);
    } else {  // case IV
      if (t1.size() + b1.size() == c) {
        if (t1.size() < c) {
          b1.pop_front();
          replace(false);
        } else {
          t1.pop_front();
        }
      } else if (t1.size() + t2.size() + b1.size() + b2.size() >= c) {
        if (t1.size() + t2.size() + b1.size() + b2.size() == 2 * c) b2.pop_front();
        if (t1.size() + t2.size() == c) replace(false);
      }
      t1.push_back(key);
    }
    return false;
  }
};

struct PlainGdsf {
  struct Fact {
    double priority, value;
    std::uint64_t used, uses;
  };
  std::size_t capacity;
  std::map<std::uint64_t, double> value_of = {};
  std::map<std::uint64_t, Fact> facts = {};
  double floor = 0;
  std::uint64_t now = 0;

  bool access(std::uint64_t key) {
    ++now;
    const auto found = facts.find(key);
    const bool hit = found != facts.end();
    Fact& fact = facts[key];
    if (!hit) fact = {0, value_of.contains(key) ? value_of[key] : 1.0, 0, 0};
    ++fact.uses;
    fact.used = now;
    fact.priority = floor + static_cast<double>(fact.uses) * fact.value;
    if (facts.size() > capacity) {  // the newcomer too may be the least worth
      const auto least = std::ranges::min_element(facts, {}, [](const auto& each) {
        return std::pair(each.second.priority, each.second.used);
      });
      floor = least->second.priority;
      facts.erase(least);
    }
    return hit;
  }
};

// Few keys that come often, and scans over others.
std::vector<std::uint64_t> workload(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> keys;
  while (keys.size() < 3000) {
    if (random() % 40 == 0) {
      const std::uint64_t first = 1000 + random() % 2000;
      for (std::uint64_t i = 0; i < 30; ++i) keys.push_back(first + i);
    }
    const std::uint64_t few = 1 + random() % 100;
    keys.push_back(few * few / 100);
  }
  return keys;
}

std::vector<bool> hits_of(PolicyKind kind, EntryId capacity, std::span<const std::uint64_t> keys,
                          std::span<const double> values = {}) {
  std::vector<std::uint8_t> told(keys.size());
  const std::uint64_t count = count_hits(kind, capacity, keys, values, told);
  EXPECT_EQ(count, std::ranges::count(told, 1));
  return {told.begin(), told.end()};
}

TEST(Policy, HitsWhatItsDefinitionHits) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const auto keys = workload(seed);
    for (const EntryId capacity : {1U, 2U, 7U, 40U, 150U}) {
      EXPECT_EQ(hits_of(PolicyKind::lru, capacity, keys), hits_by(PlainLru{capacity}, keys));
      EXPECT_EQ(hits_of(PolicyKind::arc, capacity, keys), hits_by(PlainArc{capacity}, keys));
      EXPECT_EQ(hits_of(PolicyKind::gdsf, capacity, keys), hits_by(PlainGdsf{capacity}, keys));
    }
  }
}

TEST(Policy, GdsfWeighsUsesByValue) {
  const auto keys = workload(7);
  PlainGdsf plain{40};
  std::vector<double> values;
  for (const std::uint64_t key : keys) {
    values.push_back(key % 3 == 0 ? 8.0 : 0.5);
    plain.value_of[key] = values.back();
  }
  const auto hits = hits_of(PolicyKind::gdsf, 40, keys, values);
  EXPECT_EQ(hits, hits_by(plain, keys));
  EXPECT_NE(hits, hits_of(PolicyKind::gdsf, 40, keys));
}

class EachPolicy : public testing::TestWithParam<PolicyKind> {};

// Random use by an owner who holds entries and drops some.
TEST_P(EachPolicy, GivesOnlyWhatMayGoAndEachEntryOnce) {
  constexpr EntryId capacity = 24;
  std::mt19937_64 random(3);
  const auto policy = make_policy(GetParam(), capacity);
  std::map<EntryId, std::uint64_t> there;
  std::set<EntryId> held;
  const auto pick = [&] {
    return std::next(there.begin(), static_cast<std::ptrdiff_t>(random() % there.size()))->first;
  };
  std::size_t evicted = 0;
  for (int step = 0; step < 20000; ++step) {
    const std::uint64_t what = random() % 8;
    if (what < 4 && there.size() < capacity) {
      EntryId entry = 0;
      while (there.contains(entry)) ++entry;
      const std::uint64_t key = random() % 200;
      policy->announce(key);
      policy->insert(entry, key, 1.0 + static_cast<double>(random() % 5));
      there[entry] = key;
    } else if (what < 6 && !there.empty()) {
      policy->touch(pick());
    } else if (what == 6 && !there.empty()) {
      const EntryId entry = pick();
      if (held.erase(entry) == 0) held.insert(entry);
    } else if (what == 7 && !there.empty() && random() % 4 == 0) {
      const EntryId entry = pick();
      policy->remove(entry);
      there.erase(entry);
      held.erase(entry);
    } else if (there.size() > capacity / 2) {
      const auto victim = policy->victim(Unless(held));
      ASSERT_EQ(victim.has_value(), held.size() < there.size());
      if (!victim) continue;
      ASSERT_TRUE(there.contains(*victim) && !held.contains(*victim));
      there.erase(*victim);
      ++evicted;
    }
  }
  EXPECT_GT(evicted, 1000U);
  for (std::size_t left = there.size(); left > 0; --left)
    ASSERT_TRUE(there.erase(policy->victim(Unless()).value()));
  EXPECT_FALSE(policy->victim(Unless()).has_value());
}

TEST_P(EachPolicy, DoesNotLookAtEntriesInUseForEachVictimAnew) {
  constexpr EntryId capacity = 2000;
  const auto policy = make_policy(GetParam(), capacity);
  std::set<EntryId> held;
  for (EntryId entry = 0; entry < capacity; ++entry) {
    policy->announce(entry);
    policy->insert(entry, entry, 1.0);
    if (entry < capacity * 9 / 10) held.insert(entry);  // the oldest ones
  }
  const Unless may_go(held);
  for (EntryId i = 0; i < capacity / 10; ++i) ASSERT_TRUE(policy->victim(may_go).has_value());
  EXPECT_LE(may_go.asked, 3 * capacity);
  EXPECT_FALSE(policy->victim(may_go).has_value());
}

TEST_P(EachPolicy, TakesNoMoreMemoryThanItSays) {
  const std::map<PolicyKind, std::size_t> of_one{
      {PolicyKind::lru, 8}, {PolicyKind::arc, 48}, {PolicyKind::gdsf, 32}};
  const std::size_t bytes = make_policy(GetParam(), 100'000)->bytes();
  EXPECT_GE(bytes, 8U * 100'000);
  EXPECT_LE(bytes, of_one.at(GetParam()) * 100'000 + 64);
}

INSTANTIATE_TEST_SUITE_P(Policies, EachPolicy, testing::ValuesIn(policy_kinds),
                         [](const auto& policy) { return std::string(name_of(policy.param)); });

TEST(Policy, RefusesByName) {
  EXPECT_THROW(static_cast<void>(policy_named("fifo")), InvalidArgument);
  for (const PolicyKind kind : policy_kinds) {
    EXPECT_EQ(policy_named(name_of(kind)), kind);
    EXPECT_THROW(static_cast<void>(make_policy(kind, 0)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(make_policy(kind, most_policy_entries + 1)), InvalidArgument);
  }
  const std::vector<std::uint64_t> keys{1, 2};
  const std::vector<double> one{1.0}, zero{1.0, 0.0};
  EXPECT_THROW(static_cast<void>(count_hits(PolicyKind::lru, 0, keys)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(count_hits(PolicyKind::lru, 4, keys, one)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(count_hits(PolicyKind::gdsf, 4, keys, zero)), InvalidArgument);
  using Limits = std::numeric_limits<double>;
  for (const double value : {-1.0, Limits::infinity(), Limits::quiet_NaN()}) {
    const std::vector<double> values{1.0, value};
    EXPECT_THROW(static_cast<void>(count_hits(PolicyKind::lru, 4, keys, values)), InvalidArgument);
  }
  std::vector<std::uint8_t> room_for_one(1);
  EXPECT_THROW(static_cast<void>(count_hits(PolicyKind::lru, 4, keys, {}, room_for_one)),
               InvalidArgument);
}

}  // namespace
}  // namespace kvmem::test
