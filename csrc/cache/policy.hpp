// Which entry goes first when a slot is needed. A policy orders entries by how they were used; it
// knows neither keys nor slots nor who holds what.
//
//   a miss   announce(), victim() where there is no free entry, insert()
//   a hit    touch()
//
// An entry is a number below the capacity, given by the owner. Not thread-safe: the owner's lock
// guards it. All memory is had when it is made; no call throws or allocates. Deterministic: the
// order of the calls decides, not the values of the hashes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

namespace kvmem {

using EntryId = std::uint32_t;

// Whether an entry may go now: not what is held.
class MayGo {
 public:
  [[nodiscard]] virtual bool operator()(EntryId entry) const noexcept = 0;

 protected:
  ~MayGo() = default;
};

class Policy {
 public:
  virtual ~Policy() = default;

  // The key that insert() is called for next has been missed. A policy that remembers keys which
  // it evicted (ARC) learns from that, once a miss, and chooses its next victim accordingly.
  virtual void announce(std::uint64_t key_hash) noexcept = 0;
  // After announce(): whether that key would itself be the next to go, in a full cache. One that
  // may do without it does not take it in then, and that counts as its eviction.
  [[nodiscard]] virtual bool outranked(double value) noexcept = 0;
  // `value`: the predicted seconds of recomputation that a hit saves, per byte; only their ratios
  // matter. Positive and finite. Only GDSF looks at it.
  virtual void insert(EntryId entry, std::uint64_t key_hash, double value) noexcept = 0;
  virtual void touch(EntryId entry) noexcept = 0;
  // Leaves without having been evicted: nothing is remembered of it.
  virtual void remove(EntryId entry) noexcept = 0;
  // The first in the order of eviction that may go. It has left the policy then, which may remember
  // its key. Nothing when none may. One that is passed over because it may not go is in use, which
  // may count as a use: so it is not looked at again for each victim.
  [[nodiscard]] virtual std::optional<EntryId> victim(const MayGo& may_go) noexcept = 0;

  // Brings what touch() needs into the cache of the processor.
  virtual void prefetch(EntryId entry) const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;  // of memory, all of it
};

enum class PolicyKind : std::uint8_t { lru, arc, gdsf };

inline constexpr PolicyKind policy_kinds[] = {PolicyKind::lru, PolicyKind::arc, PolicyKind::gdsf};
[[nodiscard]] std::string_view name_of(PolicyKind kind) noexcept;
[[nodiscard]] PolicyKind policy_named(std::string_view name);  // throws InvalidArgument

// A capacity is 1 to so many; a policy for another one throws InvalidArgument.
inline constexpr EntryId most_policy_entries = (EntryId{1} << 31U) - 4;

// Least recently used.
[[nodiscard]] std::unique_ptr<Policy> make_lru(EntryId capacity);
// Adaptive replacement (Megiddo and Modha, FAST 2003, figure 4), with a real-valued target for the
// part of what was seen once. Remembers as many evicted keys as there are entries.
[[nodiscard]] std::unique_ptr<Policy> make_arc(EntryId capacity);
// GreedyDual-Size with frequency (Cherkasova, HPL-98-69R1): the priority of an entry is the highest
// of any victim plus uses times value, which is kept as a float; of equal ones the least recently
// used goes first.
[[nodiscard]] std::unique_ptr<Policy> make_gdsf(EntryId capacity);
[[nodiscard]] std::unique_ptr<Policy> make_policy(PolicyKind kind, EntryId capacity);

// The hits of a cache of `capacity` blocks of equal size that does nothing but ask a policy: one
// access a key, in order; the keys serve as their own hashes. `values`: of each access, or empty
// for 1. `hit`: told of each access whether it was one, or empty. Throws InvalidArgument (no
// capacity, another number of values than of keys, a value that is not positive and finite).
[[nodiscard]] std::uint64_t count_hits(PolicyKind kind, EntryId capacity,
                                       std::span<const std::uint64_t> keys,
                                       std::span<const double> values = {},
                                       std::span<std::uint8_t> hit = {});

}  // namespace kvmem
