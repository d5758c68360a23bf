#include "cache/entries.hpp"

#include <bit>
#include <cstring>
#include <random>

#include "base/check.hpp"

namespace kvmem {

namespace {

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) noexcept {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64U);
}

std::uint64_t eight_bytes(const std::byte* at) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Odd, and as irregular as the digits of the golden ratio and of the square root of two.
constexpr std::uint64_t first_factor = 0x9E3779B97F4A7C15U;
constexpr std::uint64_t second_factor = 0x6A09E667F3BCC909U;

std::uint64_t drawn() {
  std::random_device device;
  return (std::uint64_t{device()} << 32U) | device();
}

std::size_t buckets_for(std::size_t capacity) {  // at most two thirds of them are taken
  return std::bit_ceil(capacity + capacity / 2 + 1);
}

}  // namespace

Entries::Entries(std::size_t capacity, std::size_t key_bytes)
    : key_bytes_(key_bytes),
      record_bytes_(sizeof(EntryFacts) + round_up(key_bytes, alignof(EntryFacts))),
      salt_(drawn()),
      other_salt_(drawn()),
      mask_(buckets_for(capacity) - 1) {
  KVMEM_EXPECTS(key_bytes >= least_key_bytes && key_bytes <= most_key_bytes, "a key has ",
                key_bytes, " bytes, which must be ", least_key_bytes, " to ", most_key_bytes);
  buckets_ = ZeroedArray<Bucket>(mask_ + 1);
  records_ = ZeroedArray<std::byte>(capacity * record_bytes_);
}

// Sixteen bytes a step; the last sixteen overlap where the length is no multiple. Both factors of a
// product are salted: a key that makes one of them 0 would cancel the other.
std::uint64_t Entries::hash(const std::byte* key, GroupIndex group) const noexcept {
  std::uint64_t hash = salt_ + group * first_factor;
  for (std::size_t at = 0; at + 16 < key_bytes_; at += 16)
    hash = mixed(eight_bytes(key + at) ^ other_salt_, eight_bytes(key + at + 8) ^ hash);
  const std::byte* const last = key + key_bytes_ - 16;
  hash = mixed(eight_bytes(last) ^ ~other_salt_, eight_bytes(last + 8) ^ hash);
  return mixed(hash ^ salt_, second_factor);
}

EntryId Entries::prefetch_entry(std::uint64_t hash) const noexcept {
  for (std::size_t at = hash & mask_;; at = (at + 1) & mask_) {
    const Bucket& bucket = buckets_[at];
    if (bucket.entry_plus_1 == 0) return none;
    if (bucket.hash != static_cast<std::uint32_t>(hash)) continue;
    const EntryId entry = bucket.entry_plus_1 - 1;
    __builtin_prefetch(record(entry));
    __builtin_prefetch(record(entry) + record_bytes_ - 1);
    return entry;
  }
}

EntryId Entries::find(std::uint64_t hash, const std::byte* key, GroupIndex group) const noexcept {
  for (std::size_t at = hash & mask_;; at = (at + 1) & mask_) {
    const Bucket& bucket = buckets_[at];
    if (bucket.entry_plus_1 == 0) return none;
    if (bucket.hash != static_cast<std::uint32_t>(hash)) continue;
    const EntryId entry = bucket.entry_plus_1 - 1;
    if (facts(entry).group == group && std::memcmp(this->key(entry), key, key_bytes_) == 0)
      return entry;
  }
}

void Entries::insert(std::uint64_t hash, const std::byte* key, EntryId entry,
                     GroupIndex group) noexcept {
  std::memcpy(records_.data() + entry * record_bytes_ + sizeof(EntryFacts), key, key_bytes_);
  facts(entry).group = group;
  std::size_t at = hash & mask_;
  while (buckets_[at].entry_plus_1 != 0) at = (at + 1) & mask_;
  buckets_[at] = {entry + 1, static_cast<std::uint32_t>(hash)};
}

// Those behind that were pushed on by the one that goes move up, so that no search stops early.
void Entries::erase(EntryId entry) noexcept {
  std::size_t at = hash(key(entry), facts(entry).group) & mask_;
  while (buckets_[at].entry_plus_1 != entry + 1) {
    KVMEM_INVARIANT(buckets_[at].entry_plus_1 != 0);
    at = (at + 1) & mask_;
  }
  std::size_t gap = at;
  for (at = (at + 1) & mask_; buckets_[at].entry_plus_1 != 0; at = (at + 1) & mask_) {
    const std::size_t home = buckets_[at].hash & mask_;
    if (((at - home) & mask_) < ((at - gap) & mask_)) continue;  // at home behind the gap
    buckets_[gap] = buckets_[at];
    gap = at;
  }
  buckets_[gap] = {};
}

}  // namespace kvmem
