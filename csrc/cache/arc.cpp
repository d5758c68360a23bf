// As in figure 4 of the paper, with its names: T1 and T2 are what is held and was seen once and
// more often, B1 and B2 the ghosts of either, L1 = T1 + B1. The target `p` of T1 is real.
#include <algorithm>

#include "cache/entry_list.hpp"
#include "cache/ghosts.hpp"
#include "cache/policy.hpp"
#include "cache/policy_parts.hpp"
#include "cache/zeroed_array.hpp"

namespace kvmem {

namespace {

class Arc final : public Policy {
 public:
  explicit Arc(EntryId capacity)
      : capacity_(capacity),
        links_(2 * std::size_t{capacity} + 4),
        hashes_(capacity),
        often_(2 * std::size_t{capacity}),
        ghosts_(capacity, capacity),
        t1_(links_.data(), 2 * capacity),
        t2_(links_.data(), 2 * capacity + 1),
        b1_(links_.data(), 2 * capacity + 2),
        b2_(links_.data(), 2 * capacity + 3) {}

  void announce(std::uint64_t key_hash) noexcept override;
  bool outranked(double /*value*/) noexcept override { return false; }  // it is the most recent
  void insert(EntryId entry, std::uint64_t key_hash, double /*value*/) noexcept override {
    hashes_[entry] = key_hash;
    often_[entry] = missed_ == Missed::in_b1 || missed_ == Missed::in_b2;
    held(entry).add_newest(entry);
    missed_ = Missed::nothing;
  }
  void touch(EntryId entry) noexcept override {
    held(entry).remove(entry);
    often_[entry] = true;
    t2_.add_newest(entry);
  }
  void remove(EntryId entry) noexcept override { held(entry).remove(entry); }
  std::optional<EntryId> victim(const MayGo& may_go) noexcept override;

  void prefetch(EntryId entry) const noexcept override {
    __builtin_prefetch(&links_[entry]);
    __builtin_prefetch(&often_[entry]);
  }
  std::size_t bytes() const noexcept override {
    return links_.bytes() + hashes_.bytes() + often_.bytes() + ghosts_.bytes();
  }

 private:
  // Of the key that comes next.
  enum class Missed : std::uint8_t { nothing, in_b1, in_b2, everywhere };

  EntryList& held(EntryId entry) noexcept { return often_[entry] ? t2_ : t1_; }
  [[nodiscard]] EntryId l1_size() const noexcept { return t1_.size() + b1_.size(); }
  void forget(EntryId ghost) noexcept {
    (often_[ghost] ? b2_ : b1_).remove(ghost);
    ghosts_.remove(ghost);
  }
  void remember(EntryId entry) noexcept;

  EntryId capacity_;
  double p_ = 0;
  Missed missed_ = Missed::nothing;
  ZeroedArray<Links> links_;  // of entries, ghosts, and the heads of the lists
  ZeroedArray<std::uint64_t> hashes_;
  ZeroedArray<bool> often_;  // of entries and ghosts: in T2 or B2
  Ghosts ghosts_;
  EntryList t1_, t2_, b1_, b2_;
};

void Arc::announce(std::uint64_t key_hash) noexcept {
  const double capacity = capacity_;
  const EntryId ghost = ghosts_.find(key_hash);
  if (ghost != Ghosts::none) {
    const double b1 = b1_.size(), b2 = b2_.size();  // with this one
    missed_ = often_[ghost] ? Missed::in_b2 : Missed::in_b1;
    p_ = often_[ghost] ? std::max(p_ - std::max(b1 / b2, 1.0), 0.0)
                       : std::min(p_ + std::max(b2 / b1, 1.0), capacity);
    forget(ghost);
    return;
  }
  missed_ = Missed::everywhere;
  if (l1_size() >= capacity_) {
    if (b1_.size() > 0) forget(b1_.oldest());
  } else if (l1_size() + t2_.size() + b2_.size() >= 2 * std::uint64_t{capacity_}) {
    forget(b2_.oldest());  // L2 is larger than the cache, so it has ghosts
  }
}

// REPLACE of the paper. Where what it points at is held, both lists are searched in turns that
// grow, so that it costs no more than the list in which something is found first.
std::optional<EntryId> Arc::victim(const MayGo& may_go) noexcept {
  const bool from_t1 = t2_.size() == 0 || t1_.size() > p_ ||
                       (t1_.size() > 0 && t1_.size() == p_ && missed_ == Missed::in_b2);
  EntryList* const lists[] = {from_t1 ? &t1_ : &t2_, from_t1 ? &t2_ : &t1_};
  EntryId unseen[] = {lists[0]->size(), lists[1]->size()};
  // A cache full of what was seen once makes room in L1 for another such by forgetting.
  const bool forgets = missed_ == Missed::everywhere && t1_.size() == capacity_;
  for (std::uint64_t turn = 16; unseen[0] + unseen[1] > 0; turn *= 2) {
    for (const int i : {0, 1}) {
      for (std::uint64_t left = std::min<std::uint64_t>(turn, unseen[i]); left > 0; --left) {
        const EntryId entry = lists[i]->oldest();
        if (may_go(entry)) {
          lists[i]->remove(entry);
          if (!forgets) remember(entry);
          return entry;
        }
        lists[i]->make_newest(entry);
        --unseen[i];
      }
    }
  }
  return std::nullopt;
}

// The paper never has more ghosts than entries. Here entries also go for no other, or by remove().
void Arc::remember(EntryId entry) noexcept {
  if (ghosts_.full()) {
    const bool l1_is_large = l1_size() >= capacity_ && b1_.size() > 0;
    forget(l1_is_large || b2_.size() == 0 ? b1_.oldest() : b2_.oldest());
  }
  const EntryId ghost = ghosts_.add(hashes_[entry]);
  often_[ghost] = often_[entry];
  (often_[ghost] ? b2_ : b1_).add_newest(ghost);
}

}  // namespace

std::unique_ptr<Policy> make_arc(EntryId capacity) {
  return std::make_unique<Arc>(expect_capacity(capacity));
}

}  // namespace kvmem
