// What is remembered of keys that an index need not have: how often each was offered and stored,
// and why it would be missed now.
//
// A table of fixed size; a key that falls into the place of another one takes it, so what is
// remembered may be forgotten, and never is another's (but for 64 equal bits). Not thread-safe. All
// memory is had when it is made.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "cache/zeroed_array.hpp"

namespace kvmem {

enum class MissReason : std::uint8_t {
  never_stored,    // or so long ago that it is forgotten
  none,            // it is there for every group that was stored
  in_flight,       // being stored
  not_admitted,    // offered fewer times than `admit_after`
  thrash,          // refused by the budget of its owner
  no_room,         // all slots were held when it was offered
  store_failed,    // or cancelled
  evicted,         // for others, and not on disk
  removed,         // on demand
  corrupt,         // went bad in host memory, and is not on disk
  disk_failed,     // not read back from disk, or wrong
  other_manifest,  // on disk, under another manifest
};
inline constexpr const char* miss_reason_names[] = {
    "never_stored", "none",    "in_flight", "not_admitted", "thrash",      "no_room",
    "store_failed", "evicted", "removed",   "corrupt",      "disk_failed", "other_manifest"};

class KeyMemory {
 public:
  struct Fate {
    std::uint32_t tag = 0;  // the high half of the hash, never 0 where there is a key
    MissReason why = MissReason::never_stored;
    std::uint8_t offered = 0, stored = 0;  // times, as far as a byte can count
    std::uint8_t detail = 0;               // of `why`
  };

  explicit KeyMemory(std::size_t keys)
      : mask_(std::bit_ceil(std::max<std::size_t>(2 * keys, 64)) - 1), fates_(mask_ + 1) {}

  // Its own, or a new one in the place of whatever was there.
  [[nodiscard]] Fate& of(std::span<const std::byte> key) noexcept {
    const std::uint64_t hash = mixed(key);
    Fate& fate = fates_[hash & mask_];
    if (fate.tag != tag(hash)) fate = {.tag = tag(hash)};
    return fate;
  }
  // Null when it is forgotten.
  [[nodiscard]] const Fate* find(std::span<const std::byte> key) const noexcept {
    const std::uint64_t hash = mixed(key);
    const Fate& fate = fates_[hash & mask_];
    return fate.tag == tag(hash) ? &fate : nullptr;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return fates_.bytes(); }

 private:
  static std::uint32_t tag(std::uint64_t hash) noexcept {
    return static_cast<std::uint32_t>(hash >> 32U) | 1U;
  }
  static std::uint64_t mixed(std::span<const std::byte> key) noexcept {
    std::uint64_t hash = key.size();
    for (std::size_t at = 0; at < key.size(); at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, key.data() + at, std::min<std::size_t>(8, key.size() - at));
      hash = (hash ^ word) * 0x9E3779B97F4A7C15U;
      hash ^= hash >> 29U;
    }
    return hash * 0xBF58476D1CE4E5B9U ^ hash >> 32U;
  }

  std::size_t mask_;
  ZeroedArray<Fate> fates_;
};

inline void count_up(std::uint8_t& count) noexcept {
  if (count < 255) ++count;
}

}  // namespace kvmem
