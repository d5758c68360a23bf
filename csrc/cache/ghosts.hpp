// The keys that a policy remembers after it evicted their entries: at most so many, found by hash.
//
// A ghost is a number from `first` on, so that it can be in lists beside entries. All memory is had
// when it is made. Two keys of one hash are two ghosts; find() gives either.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/check.hpp"
#include "cache/policy.hpp"
#include "cache/zeroed_array.hpp"

namespace kvmem {

class Ghosts {
 public:
  Ghosts(EntryId capacity, EntryId first)  // capacity and first are at least 1
      : first_(first),
        hashes_(capacity),
        unused_(capacity),
        buckets_(std::size_t{capacity} + capacity / 2 + 1) {}  // at most two thirds are taken

  [[nodiscard]] EntryId size() const noexcept { return made_ - unused_count_; }
  [[nodiscard]] bool full() const noexcept { return size() == hashes_.size(); }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return hashes_.bytes() + unused_.bytes() + buckets_.bytes();
  }

  static constexpr EntryId none = 0;
  [[nodiscard]] EntryId find(std::uint64_t hash) const noexcept {
    for (std::size_t at = home(hash);; at = next(at)) {
      if (buckets_[at] == none || hashes_[buckets_[at] - first_] == hash) return buckets_[at];
    }
  }

  EntryId add(std::uint64_t hash) noexcept {  // it is not full
    KVMEM_INVARIANT(!full());
    // A number that had a ghost before goes first: what was never used has cost no memory yet.
    const EntryId ghost = first_ + (unused_count_ > 0 ? unused_[--unused_count_] : made_++);
    hashes_[ghost - first_] = hash;
    std::size_t at = home(hash);
    while (buckets_[at] != none) at = next(at);
    buckets_[at] = ghost;
    return ghost;
  }

  // Those behind that were pushed on by the one that goes move up, so that no search stops early.
  void remove(EntryId ghost) noexcept {
    std::size_t gap = home(hashes_[ghost - first_]);
    while (buckets_[gap] != ghost) gap = next(gap);
    for (std::size_t at = next(gap); buckets_[at] != none; at = next(at)) {
      const std::size_t its_home = home(hashes_[buckets_[at] - first_]);
      if (distance(its_home, at) < distance(gap, at)) continue;  // at home behind the gap
      buckets_[gap] = buckets_[at];
      gap = at;
    }
    buckets_[gap] = none;
    unused_[unused_count_++] = ghost - first_;
  }

 private:
  // Multiplied twice: spread over all bits, whatever the hash is made of, then over the buckets.
  [[nodiscard]] std::size_t home(std::uint64_t hash) const noexcept {
    const std::uint64_t spread = hash * 0x9E3779B97F4A7C15U;
    return static_cast<std::size_t>((static_cast<unsigned __int128>(spread) * buckets_.size()) >>
                                    64U);
  }
  [[nodiscard]] std::size_t next(std::size_t at) const noexcept {
    return at + 1 == buckets_.size() ? 0 : at + 1;
  }
  [[nodiscard]] std::size_t distance(std::size_t from, std::size_t to) const noexcept {
    return to >= from ? to - from : to + buckets_.size() - from;
  }

  EntryId first_;
  EntryId made_ = 0;  // numbers that have ever been used
  EntryId unused_count_ = 0;
  ZeroedArray<std::uint64_t> hashes_;
  ZeroedArray<EntryId> unused_;
  ZeroedArray<EntryId> buckets_;
};

}  // namespace kvmem
