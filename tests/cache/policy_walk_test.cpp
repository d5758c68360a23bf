// Policies victim by victim, as an index uses them: entries that are held, that leave by
// themselves, that go for no other. Beside each, a slow one without lists, tables or heaps.
#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "cache/policy.hpp"

namespace kvmem::test {
namespace {

using Held = std::set<EntryId>;

class Plain {
 public:
  virtual ~Plain() = default;
  virtual void announce(std::uint64_t /*key*/) {}
  virtual void insert(EntryId entry, std::uint64_t key, double value) = 0;
  virtual void touch(EntryId entry) = 0;
  virtual void remove(EntryId entry) = 0;
  virtual std::optional<EntryId> victim(const Held& held) = 0;
};

class PlainLru final : public Plain {
 public:
  void insert(EntryId entry, std::uint64_t /*key*/, double /*value*/) override {
    order_.push_back(entry);
  }
  void touch(EntryId entry) override {
    std::erase(order_, entry);
    order_.push_back(entry);
  }
  void remove(EntryId entry) override { std::erase(order_, entry); }
  std::optional<EntryId> victim(const Held& held) override {
    for (std::size_t unseen = order_.size(); unseen > 0; --unseen) {
      const EntryId entry = order_.front();
      order_.pop_front();
      if (!held.contains(entry)) return entry;
      order_.push_back(entry);  // in use, so used
    }
    return std::nullopt;
  }

 private:
  std::deque<EntryId> order_;  // oldest first
};

// Figure 4 of the paper, but that ghosts go where there would be more of them than entries, and
// that both parts are searched, in turns of 16, 32 and so on, where many are held.
class PlainArc final : public Plain {
 public:
  explicit PlainArc(std::size_t capacity) : c_(capacity) {}

  void announce(std::uint64_t key) override {
    const auto one = static_cast<double>(b1_.size()), two = static_cast<double>(b2_.size());
    fresh_ = in_b2_ = false;
    if (std::erase(b1_, key) > 0) {
      p_ = std::min(static_cast<double>(c_), p_ + std::max(two / one, 1.0));
    } else if (std::erase(b2_, key) > 0) {
      p_ = std::max(0.0, p_ - std::max(one / two, 1.0));
      in_b2_ = true;
    } else {
      fresh_ = true;
      if (t1_.size() + b1_.size() >= c_) {
        if (!b1_.empty()) b1_.pop_front();
      } else if (t1_.size() + t2_.size() + b1_.size() + b2_.size() >= 2 * c_) {
        b2_.pop_front();
      }
    }
  }
  void insert(EntryId entry, std::uint64_t key, double /*value*/) override {
    key_of_[entry] = key;
    (fresh_ ? t1_ : t2_).push_back(entry);
    fresh_ = in_b2_ = false;
  }
  void touch(EntryId entry) override {
    remove(entry);
    t2_.push_back(entry);
  }
  void remove(EntryId entry) override {
    std::erase(t1_, entry);
    std::erase(t2_, entry);
  }
  std::optional<EntryId> victim(const Held& held) override {
    const auto size = static_cast<double>(t1_.size());
    const bool first = t2_.empty() || size > p_ || (!t1_.empty() && size == p_ && in_b2_);
    auto &preferred = first ? t1_ : t2_, &other = first ? t2_ : t1_;
    const bool remembers = !(fresh_ && t1_.size() == c_);
    std::size_t seen = 0, seen_of_other = 0;
    const std::size_t all = preferred.size(), all_of_other = other.size();
    for (std::size_t turn = 16; seen < all || seen_of_other < all_of_other; turn *= 2) {
      for (std::size_t i = 0; i < turn && seen < all; ++i, ++seen)
        if (const auto entry = oldest(preferred, held, remembers)) return entry;
      for (std::size_t i = 0; i < turn && seen_of_other < all_of_other; ++i, ++seen_of_other)
        if (const auto entry = oldest(other, held, remembers)) return entry;
    }
    return std::nullopt;
  }

 private:
  std::optional<EntryId> oldest(std::deque<EntryId>& list, const Held& held, bool remembers) {
    const EntryId entry = list.front();
    if (held.contains(entry)) {
      list.pop_front();
      list.push_back(entry);
      return std::nullopt;
    }
    if (remembers) {
      if (b1_.size() + b2_.size() == c_) {
        const bool l1_is_large = t1_.size() + b1_.size() - (&list == &t1_) >= c_;
        ((l1_is_large && !b1_.empty()) || b2_.empty() ? b1_ : b2_).pop_front();
      }
      (&list == &t1_ ? b1_ : b2_).push_back(key_of_[entry]);
    }
    list.pop_front();
    return entry;
  }

  std::size_t c_;
  double p_ = 0;
  bool fresh_ = false, in_b2_ = false;
  std::deque<EntryId> t1_, t2_;
  std::deque<std::uint64_t> b1_, b2_;
  std::map<EntryId, std::uint64_t> key_of_;
};

class PlainGdsf final : public Plain {
 public:
  void announce(std::uint64_t /*key*/) override { before_newcomer_ = floor_; }
  void insert(EntryId entry, std::uint64_t /*key*/, double value) override {
    const double kept = static_cast<float>(value);
    ranks_[entry] = {before_newcomer_ + kept, ++now_, 1, kept};
  }
  void touch(EntryId entry) override {
    Rank& rank = ranks_.at(entry);
    ++rank.uses;
    rank.used = ++now_;
    rank.priority = floor_ + static_cast<double>(rank.uses) * rank.value;
  }
  void remove(EntryId entry) override { ranks_.erase(entry); }
  std::optional<EntryId> victim(const Held& held) override {
    std::vector<EntryId> passed;
    std::optional<EntryId> found;
    while (!found && passed.size() < ranks_.size()) {
      EntryId least = 0;
      std::pair lowest{std::numeric_limits<double>::infinity(), std::uint64_t{0}};
      for (const auto& [entry, rank] : ranks_) {
        const std::pair its_own{rank.priority, rank.used};
        if (its_own < lowest && std::ranges::find(passed, entry) == passed.end()) {
          lowest = its_own;
          least = entry;
        }
      }
      if (held.contains(least)) {
        passed.push_back(least);
      } else {
        found = least;
        floor_ = std::max(floor_, lowest.first);
        ranks_.erase(least);
      }
    }
    for (const EntryId entry : passed) {
      Rank& rank = ranks_.at(entry);
      rank.used = ++now_;
      rank.priority = floor_ + static_cast<double>(rank.uses) * rank.value;
    }
    return found;
  }

 private:
  struct Rank {
    double priority;
    std::uint64_t used, uses;
    double value;
  };
  std::map<EntryId, Rank> ranks_;
  double floor_ = 0, before_newcomer_ = 0;
  std::uint64_t now_ = 0;
};

std::unique_ptr<Plain> plain_of(PolicyKind kind, std::size_t capacity) {
  switch (kind) {
    case PolicyKind::lru:
      return std::make_unique<PlainLru>();
    case PolicyKind::arc:
      return std::make_unique<PlainArc>(capacity);
    default:
      return std::make_unique<PlainGdsf>();
  }
}

class NotHeld final : public MayGo {
 public:
  explicit NotHeld(const Held& held) : held_(held) {}
  bool operator()(EntryId entry) const noexcept override { return !held_.contains(entry); }

 private:
  const Held& held_;
};

struct Tally {
  std::size_t victims = 0, past_held = 0, in_vain = 0, removed = 0, hits = 0;
};

// An owner of entries who asks both for each victim.
class Walk {
 public:
  Walk(PolicyKind kind, EntryId capacity, std::uint64_t seed, Tally& tally)
      : policy_(make_policy(kind, capacity)),
        plain_(plain_of(kind, capacity)),
        capacity_(capacity),
        random_(seed),
        tally_(tally) {}

  void step() {
    const std::uint64_t what = pick(20);
    if (what < 13) {
      access(pick(2) == 0 ? pick(capacity_) : pick(4 * std::uint64_t{capacity_}));
    } else if (what < 17) {
      hold_or_let_go();
    } else if (what == 17) {
      if (entry_of_.empty()) return;
      const EntryId entry = any();
      policy_->remove(entry);
      plain_->remove(entry);
      leave(entry);
      ++tally_.removed;
    } else if (what == 18 && pick(5) == 0) {  // some go for no other
      for (std::uint64_t left = pick(capacity_ / 2 + 1); left > 0 && evict(); --left) continue;
    } else if (what == 19 && pick(40) == 0) {
      held_.clear();
    }
  }

 private:
  std::uint64_t pick(std::uint64_t bound) { return random_() % bound; }
  EntryId any() {
    return std::next(entry_of_.begin(), static_cast<std::ptrdiff_t>(pick(entry_of_.size())))
        ->second;
  }
  void leave(EntryId entry) {
    std::erase_if(entry_of_, [&](const auto& each) { return each.second == entry; });
    held_.erase(entry);
    free_.insert(entry);
  }
  // What the old ones are is decided by the seed: at times most are held.
  void hold_or_let_go() {
    if (entry_of_.empty()) return;
    const EntryId entry = any();
    if (held_.erase(entry) == 0 || pick(3) > 0) held_.insert(entry);
  }
  void access(std::uint64_t key) {
    if (const auto found = entry_of_.find(key); found != entry_of_.end()) {
      policy_->touch(found->second);
      plain_->touch(found->second);
      ++tally_.hits;
      return;
    }
    policy_->announce(key);
    plain_->announce(key);
    if (entry_of_.size() == capacity_ && !evict()) return held_.clear();
    const EntryId entry = free_.empty() ? unused_++ : *free_.begin();
    free_.erase(entry);
    entry_of_[key] = entry;
    const double value = std::array{1.0, 1.0, 0.001, 3.7, 5000.0}[key % 5];
    policy_->insert(entry, key, value);
    plain_->insert(entry, key, value);
  }
  bool evict() {
    const std::size_t held = held_.size();
    const auto expected = plain_->victim(held_);
    const auto victim = policy_->victim(NotHeld(held_));
    EXPECT_EQ(victim, expected);
    EXPECT_EQ(expected.has_value(), held < entry_of_.size());
    tally_.past_held += victim && held > 0;
    tally_.in_vain += !victim;
    if (!victim) return false;
    ++tally_.victims;
    leave(*victim);
    return true;
  }

  std::unique_ptr<Policy> policy_;
  std::unique_ptr<Plain> plain_;
  EntryId capacity_;
  std::mt19937_64 random_;
  Tally& tally_;
  std::map<std::uint64_t, EntryId> entry_of_;  // by key
  Held held_, free_;
  EntryId unused_ = 0;
};

class PolicyWalk : public testing::TestWithParam<PolicyKind> {};

TEST_P(PolicyWalk, GivesTheVictimThatItsDefinitionGives) {
  Tally tally;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Walk walk(GetParam(), std::array{1U, 2U, 9U, 60U}[seed % 4], seed, tally);
    for (int step = 0; step < 3000 && !HasFailure(); ++step) walk.step();
    if (HasFailure()) return;
  }
  EXPECT_GT(tally.victims, 10'000U);
  EXPECT_GT(tally.past_held, 5'000U);
  EXPECT_GT(tally.in_vain, 1'000U);
  EXPECT_GT(tally.removed, 1'000U);
  EXPECT_GT(tally.hits, 10'000U);
}

INSTANTIATE_TEST_SUITE_P(Policies, PolicyWalk, testing::ValuesIn(policy_kinds),
                         [](const auto& policy) { return std::string(name_of(policy.param)); });

// A newcomer is judged by what had been evicted before a victim went for it, so it may be worth
// less than that victim, and go next. What was evicted counts all the same: nobody loses by being
// used.
TEST(Gdsf, OneOfLittleWorthThatGoesNextTakesNothingFromTheOthers) {
  const auto policy = make_gdsf(4);
  const auto victim = [&] { return policy->victim(NotHeld({})).value(); };
  const auto come = [&](double value) {
    policy->announce(0);
    EXPECT_EQ(victim(), 0U);
    policy->insert(0, 0, value);
  };
  for (const EntryId entry : {0U, 1U, 2U, 3U}) policy->insert(entry, entry, 100.0 + entry);
  come(1.0);         // of priority 1, where the victim's was 100
  come(1.5);         // of 101.5: behind entry 1, whose priority is 101
  policy->touch(0);  // of 103, not of 1 + 2 * 1.5
  for (const EntryId entry : {1U, 2U, 3U, 0U}) EXPECT_EQ(victim(), entry);
}

}  // namespace
}  // namespace kvmem::test
