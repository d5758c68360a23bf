// The entries of an index by (key, group): a hash table with room for as many as there are slots.
//
// An entry is a number below the capacity; what it stands for is the index's business. Keys are
// 16 to 64 bytes, one length per table, compared whole: a hash that collides finds nothing. Not
// thread-safe. All memory is had when it is made; no other call throws or allocates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.hpp"
#include "cache/policy.hpp"
#include "cache/zeroed_array.hpp"

namespace kvmem {

using GroupIndex = std::uint8_t;

enum class EntryState : std::uint8_t {
  free,       // no key
  writing,    // in flight: attached to, never read
  ready,      // readable
  forgotten,  // no longer found; who holds it may still read it
  failed,     // no longer found, and never readable
};

// Of one entry, besides its key.
struct EntryFacts {
  std::uint32_t holds = 0;  // of plans; the writer's own is one
  EntryState state = EntryState::free;
  GroupIndex group = 0;
};
static_assert(sizeof(EntryFacts) == 8);

inline constexpr std::size_t least_key_bytes = 16;
inline constexpr std::size_t most_key_bytes = 64;

class Entries {
 public:
  // Throws InvalidArgument (a key length out of range), std::bad_alloc. At most 2^31 entries.
  Entries(std::size_t capacity, std::size_t key_bytes);

  [[nodiscard]] std::size_t key_bytes() const noexcept { return key_bytes_; }
  [[nodiscard]] const std::byte* key(EntryId entry) const noexcept {
    return record(entry) + sizeof(EntryFacts);
  }
  [[nodiscard]] EntryFacts& facts(EntryId entry) noexcept {
    return *reinterpret_cast<EntryFacts*>(records_.data() + entry * record_bytes_);
  }
  [[nodiscard]] const EntryFacts& facts(EntryId entry) const noexcept {
    return *reinterpret_cast<const EntryFacts*>(record(entry));
  }

  // Of a key in a group. Salted: another one in each table, so that nobody can choose keys which
  // collide.
  [[nodiscard]] std::uint64_t hash(const std::byte* key, GroupIndex group) const noexcept;

  // In this order, for a whole batch each, before find(): then no key waits for memory alone.
  void prefetch_bucket(std::uint64_t hash) const noexcept {
    __builtin_prefetch(&buckets_[hash & mask_]);
  }
  // The entry that find() will most likely look at, or `none`.
  EntryId prefetch_entry(std::uint64_t hash) const noexcept;

  static constexpr EntryId none = ~EntryId{0};
  [[nodiscard]] EntryId find(std::uint64_t hash, const std::byte* key,
                             GroupIndex group) const noexcept;
  // The key is not there, and the entry has none.
  void insert(std::uint64_t hash, const std::byte* key, EntryId entry, GroupIndex group) noexcept;
  void erase(EntryId entry) noexcept;  // it has its facts still

  [[nodiscard]] std::size_t bytes() const noexcept { return buckets_.bytes() + records_.bytes(); }

 private:
  // A bucket is empty while its entry is 0: entries are counted from 1 in here.
  struct Bucket {
    std::uint32_t entry_plus_1;
    std::uint32_t hash;  // the low half, whose lowest bits are the bucket it belongs into
  };

  [[nodiscard]] const std::byte* record(EntryId entry) const noexcept {
    return records_.data() + entry * record_bytes_;
  }

  std::size_t key_bytes_, record_bytes_;
  std::uint64_t salt_, other_salt_;
  std::size_t mask_;  // of buckets
  ZeroedArray<Bucket> buckets_;
  ZeroedArray<std::byte> records_;
};

}  // namespace kvmem
