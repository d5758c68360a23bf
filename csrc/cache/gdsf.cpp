#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.hpp"
#include "cache/policy.hpp"
#include "cache/policy_parts.hpp"
#include "cache/zeroed_array.hpp"

namespace kvmem {

namespace {

// An entry in the order of eviction.
struct Rank {
  double priority;
  std::uint64_t last_use;  // as the count of uses of all entries
  EntryId entry;
  std::uint32_t uses;

  bool operator<(const Rank& other) const noexcept {
    return priority != other.priority ? priority < other.priority : last_use < other.last_use;
  }
};

// A heap, and where in it each entry is. One that is passed over because it may not go counts as
// used now, though not as one use more: it gets the priority that it would have had if it came
// back now. That puts it behind all that are as valuable and were not used since.
class Gdsf final : public Policy {
 public:
  explicit Gdsf(EntryId capacity) : ranks_(capacity), places_(capacity), values_(capacity) {}

  // A newcomer is judged by what was evicted before it came, not by the victim that goes for it.
  void announce(std::uint64_t /*key_hash*/) noexcept override { before_newcomer_ = last_evicted_; }
  bool outranked(double value) noexcept override {
    const double its_own = before_newcomer_ + as_float(value);
    if (size_ == 0 || its_own >= ranks_[0].priority) return false;
    last_evicted_ = its_own;
    return true;
  }
  void insert(EntryId entry, std::uint64_t /*key_hash*/, double value) noexcept override {
    KVMEM_INVARIANT(size_ < ranks_.size());
    values_[entry] = as_float(value);
    ranks_[size_] = {before_newcomer_ + values_[entry], ++uses_, entry, 1};
    places_[entry] = size_;
    rise(size_++);
  }
  void touch(EntryId entry) noexcept override {
    Rank& rank = ranks_[places_[entry]];
    KVMEM_INVARIANT(rank.entry == entry);
    if (rank.uses < std::numeric_limits<std::uint32_t>::max()) ++rank.uses;
    rank.priority = priority(values_[entry], rank.uses);
    rank.last_use = ++uses_;
    sink(places_[entry], size_);
  }
  void remove(EntryId entry) noexcept override {
    const EntryId place = places_[entry];
    KVMEM_INVARIANT(place < size_ && ranks_[place].entry == entry);
    if (place == --size_) return;
    put(place, ranks_[size_]);
    rise(place);
    sink(place, size_);
  }
  std::optional<EntryId> victim(const MayGo& may_go) noexcept override;

  void prefetch(EntryId entry) const noexcept override {
    __builtin_prefetch(&places_[entry]);
    __builtin_prefetch(&values_[entry]);
  }
  std::size_t bytes() const noexcept override {
    return ranks_.bytes() + places_.bytes() + values_.bytes();
  }

 private:
  static constexpr EntryId children = 4;  // of a place; fewer levels than two, so fewer misses

  static float as_float(double value) noexcept {
    return static_cast<float>(std::clamp(value, double{std::numeric_limits<float>::min()},
                                         double{std::numeric_limits<float>::max()}));
  }
  [[nodiscard]] double priority(double value, double uses) const noexcept {
    return last_evicted_ + uses * value;
  }

  void put(EntryId place, const Rank& rank) noexcept {
    ranks_[place] = rank;
    places_[rank.entry] = place;
  }
  void rise(EntryId place) noexcept;
  void sink(EntryId place, EntryId size) noexcept;  // in a heap of so many

  ZeroedArray<Rank> ranks_;
  ZeroedArray<EntryId> places_;
  ZeroedArray<float> values_;
  EntryId size_ = 0;
  std::uint64_t uses_ = 0;
  // The priority that the last victim had; never falls, so that a use never moves an entry forward.
  double last_evicted_ = 0;
  double before_newcomer_ = 0;  // the same, when the key that comes next was announced
};

void Gdsf::rise(EntryId place) noexcept {
  const Rank rank = ranks_[place];
  while (place > 0 && rank < ranks_[(place - 1) / children]) {
    put(place, ranks_[(place - 1) / children]);
    place = (place - 1) / children;
  }
  put(place, rank);
}

void Gdsf::sink(EntryId place, EntryId size) noexcept {
  const Rank rank = ranks_[place];
  for (;;) {
    const std::uint64_t first = std::uint64_t{children} * place + 1;
    if (first >= size) break;
    const Rank* const begin = ranks_.data() + first;
    const Rank* const least =
        std::min_element(begin, begin + std::min<std::uint64_t>(children, size - first));
    if (!(*least < rank)) break;
    const auto below = static_cast<EntryId>(least - ranks_.data());
    put(place, *least);
    place = below;
  }
  put(place, rank);
}

// What was looked at goes behind the heap, which shrinks; then all but the victim join it again.
std::optional<EntryId> Gdsf::victim(const MayGo& may_go) noexcept {
  std::optional<EntryId> found;
  EntryId heap = size_;
  while (heap > 0 && !found) {
    Rank first = ranks_[0];
    if (may_go(first.entry)) {
      found = first.entry;
      last_evicted_ = std::max(last_evicted_, first.priority);
    } else {
      first.last_use = ++uses_;
    }
    put(0, ranks_[--heap]);
    put(heap, first);
    sink(0, heap);
  }
  if (found) put(heap, ranks_[--size_]);
  for (; heap < size_; ++heap) {
    Rank& passed = ranks_[heap];
    passed.priority = priority(values_[passed.entry], passed.uses);
    rise(heap);
  }
  return found;
}

}  // namespace

std::unique_ptr<Policy> make_gdsf(EntryId capacity) {
  return std::make_unique<Gdsf>(expect_capacity(capacity));
}

}  // namespace kvmem
