// Which key is in which slot, and who needs it there: no device, no bytes.
//
// It stands in one process and plans; who copies may be other processes, to whom slots travel as
// integers. Each group has slots of its own, numbered from 0; an entry is one (key, group) in one
// slot.
//
//   plan_store()  slots for the keys that are missing      writing --finish of the last rank-->
//   ready
//   reserve()     the longest usable prefix, held            (expires while it was not begun)
//   begin()       its slots may be read from now on          until every rank has finished
//   finish()      each rank once, whichever way its copies ended
//
// A key becomes readable when every rank has said that its bytes arrived; the first writer wins,
// whoever comes later attaches. A slot is free again when nobody holds its entry and every rank has
// ended. Never evicted: what is held, in flight, or in the caller's own batch. Recency is updated
// tail first, so that the head of a chain outlives its tail.
//
// A slower tier is a group that backs another one: what is missing there may be used from here.
// plan_copy() moves keys between the two, so that a key is never in flight without a plan.
//
// Any thread; one short leaf lock. What can grow has a bound: slots, `max_plans`, `max_events`.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.hpp"
#include "base/process.hpp"
#include "base/types.hpp"
#include "cache/entries.hpp"
#include "cache/need.hpp"
#include "cache/policy.hpp"

namespace kvmem {

inline constexpr std::size_t most_groups = 16;
inline constexpr std::size_t most_plans = std::size_t{1} << 24U;

struct GroupOptions {
  std::string name;
  Need need;  // of a group that backs another one: that one's
  SlotIndex slots = 0;
  // The group, named before, whose blocks are here too, or here alone. One group backs another, at
  // most.
  std::optional<GroupIndex> backs = std::nullopt;
};

struct IndexOptions {
  std::vector<GroupOptions> groups;  // 1 to most_groups, of different names
  std::size_t key_bytes = 0;         // 0: that of the first key
  PolicyKind policy = PolicyKind::lru;
  std::size_t ranks = 1;  // that finish each plan, 1 to 4096
  // trim() evicts where less than `low_free` of a group's slots are free, until `high_free` are.
  // Not of a group that backs another one: a slower tier has the time, and what it keeps is of use.
  double low_free = 0, high_free = 0;
  std::size_t max_plans = 1 << 16;     // unfinished, of both kinds; at most most_plans
  std::size_t max_events = 0;          // that wait to be taken; 0: none are made
  std::function<Nanoseconds()> clock;  // for expiry, must not throw; none: the steady clock
};

using PlanId = std::uint64_t;  // never given twice; 0: a plan with nothing to do
using KeyPointers = std::span<const std::byte* const>;

// Of one group: which of the keys, and the slot of each. Positions ascend.
struct PlannedSlots {
  std::vector<std::uint32_t> positions;
  std::vector<SlotIndex> slots;
};

struct StorePlan {
  PlanId id = 0;
  std::size_t covered = 0;   // leading keys that are stored when all goes well: planned or not new
  std::size_t present = 0;   // entries among them that are readable already
  std::size_t attached = 0;  // entries that another plan is writing
  std::vector<PlannedSlots> groups;  // to be written
};

enum class Pending : std::uint8_t { stop, attach };  // at a key in flight

// Of two groups for the same positions.
struct CopyPlan {
  PlanId id = 0;  // 0: there is nothing to copy, or no room for it
  std::vector<std::uint32_t> positions;
  std::vector<SlotIndex> source, target;
};

struct Reservation {
  PlanId id = 0;
  std::size_t length = 0;  // keys
  bool pending = false;    // a key in flight stopped it, or is among the reserved ones
};

struct LoadPlan {
  std::size_t length = 0;  // less than reserved where the store of an attached key failed
  std::vector<PlannedSlots> groups;
};

struct IndexEvent {
  enum class Kind : std::uint8_t { stored, removed };
  Kind kind;
  GroupIndex group;
  std::array<std::byte, most_key_bytes> key;  // the first key_bytes() of it
};
struct IndexEvents {
  std::vector<IndexEvent> events;
  std::uint64_t lost = 0;  // before these; who mirrors the index starts anew with keys()
};

struct GroupStats {
  std::string name;
  std::size_t slots = 0, free = 0, writing = 0, ready = 0;
  std::size_t leaving = 0;    // no longer found, and still held
  std::size_t evictable = 0;  // of the ready ones
  std::size_t retired = 0;
};
struct IndexStats {
  std::vector<GroupStats> groups;
  std::size_t plans = 0, reservations = 0;  // unfinished; of those, not begun
  std::uint64_t keys_asked = 0, keys_reserved = 0, keys_pending = 0;
  std::uint64_t blocks_loaded = 0, blocks_load_failed = 0;  // of plans that every rank finished
  std::uint64_t blocks_planned = 0, blocks_published = 0, blocks_store_failed = 0;
  std::uint64_t blocks_present = 0, blocks_attached = 0;  // at plan_store
  std::uint64_t evicted = 0, removed = 0;                 // for room; on demand
  std::uint64_t refused = 0, expired = 0, events_lost = 0;
  std::size_t bytes = 0;  // of memory that is had for entries
};

struct Holding {
  std::string owner;
  std::size_t plans = 0, blocks = 0;
};

class Index {
 public:
  // Throws InvalidArgument, std::bad_alloc.
  explicit Index(IndexOptions options);
  ~Index();
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  // All calls with keys throw InvalidArgument where `key_bytes` is not that of the index. A key
  // that stands twice in one call is one block.

  // Slots for what is missing of the longest leading part of the keys that there is room for.
  // Nothing when not even the first missing key finds room, or there are max_plans plans.
  // `ranges`: for which of the keys each group has blocks, or empty for all of them, where a group
  // of state has one for the last key. `value`: see Policy::insert.
  [[nodiscard]] std::optional<StorePlan> try_plan_store(KeyPointers keys, std::size_t key_bytes,
                                                        const std::string& owner,
                                                        std::span<const KeyRange> ranges = {},
                                                        double value = 1.0);
  static void expect_value(double value);  // throws InvalidArgument
  // The numbers of a refusal, and by whom what is not free is held.
  [[nodiscard]] PoolExhausted exhausted(std::size_t wanted) const;

  // From one group into the one that backs it, or back: for those of the keys that are readable in
  // `from` and missing in `to`, as far as there is room. The sources are held, the targets written:
  // finish() publishes those. Nobody's hit.
  [[nodiscard]] CopyPlan plan_copy(KeyPointers keys, std::size_t key_bytes, GroupIndex from,
                                   GroupIndex to, const std::string& owner, double value = 1.0);

  // Finds and holds in one step. Length 0: there is nothing to give back. Throws InvalidArgument,
  // PoolExhausted at max_plans. `expires_seconds`: from now, unless it was begun; nothing is never.
  [[nodiscard]] Reservation reserve(KeyPointers keys, std::size_t key_bytes,
                                    const std::string& owner, Pending pending = Pending::stop,
                                    std::optional<double> expires_seconds = std::nullopt);
  // Shortens to the longest usable prefix of at most `length` keys and answers how long that is,
  // 0 when nothing is left. Throws InvalidArgument for a plan that was begun or does not exist.
  std::size_t keep(PlanId reservation, std::size_t length);
  // How many blocks of each group a reservation holds.
  [[nodiscard]] std::vector<std::size_t> blocks(PlanId reservation);
  // Nothing while a reserved key is still in flight. Afterwards only finish() lets go of it.
  // `waits`: somebody will ask until it is there, so that it does not expire any more.
  [[nodiscard]] std::optional<LoadPlan> begin(PlanId reservation, bool waits = false);
  // Gives up a reservation that was not begun. Throws InvalidArgument for any other plan.
  void release(PlanId reservation);

  // Throws InvalidArgument for a plan that does not exist (any more), was not begun, or that this
  // rank has finished. Id 0 is nothing to do. True when it was the last rank.
  bool finish(PlanId plan, std::size_t rank, bool ok);

  // Ends the owner's reservations. What it has begun or is storing stays until each rank has
  // finished: copies may run. How many ended.
  std::size_t drop_owner(const std::string& owner);

  // No longer found from now on, whoever holds them: evicted on demand, or known to be bad. Keys in
  // flight will not be published. How many entries; of one group where one is given. `were`: told
  // where they were.
  struct Place {
    GroupIndex group = 0;
    SlotIndex slot = 0;
  };
  std::size_t remove(KeyPointers keys, std::size_t key_bytes,
                     std::optional<GroupIndex> group = std::nullopt,
                     std::vector<Place>* were = nullptr);
  std::size_t clear(std::vector<Place>* were = nullptr);  // all of them

  // What was in the slots of a group before this index was made, oldest first: readable from now
  // on. Of keys that stand twice only the first. Throws InvalidArgument for a slot out of range or
  // that stands twice, and once the group has an entry.
  void adopt(KeyPointers keys, std::size_t key_bytes, GroupIndex group,
             std::span<const SlotIndex> slots);
  // The slot is never used again, from when nobody holds it any more.
  void retire(GroupIndex group, SlotIndex slot);

  // Evicts a few where too few are free: off the path of those who store. How many.
  std::size_t trim(std::size_t most);
  [[nodiscard]] bool wants_trim() const;

  // How many leading keys could be reserved now. Holds and counts nothing.
  [[nodiscard]] std::size_t peek(KeyPointers keys, std::size_t key_bytes,
                                 Pending pending = Pending::stop) const;
  [[nodiscard]] EntryState state(const std::byte* key, std::size_t key_bytes,
                                 GroupIndex group) const;
  [[nodiscard]] EntryState state(const Place& place) const;  // of whatever key

  [[nodiscard]] IndexEvents take_events();
  [[nodiscard]] std::vector<Holding> holdings() const;  // by owner
  [[nodiscard]] IndexStats stats() const;
  [[nodiscard]] const IndexOptions& options() const noexcept { return options_; }
  [[nodiscard]] std::size_t key_bytes() const;  // 0 before the first key
  void check() const;  // walks everything; stops the process when something does not add up

 private:
  struct Group;
  struct Plan;
  // What one key was found to be in one group.
  struct Found {
    std::uint64_t hash = 0;
    EntryId entry = Entries::none;
  };
  class BatchHold;
  enum class PlanKind : std::uint8_t { store, load, copy };
  using Ranges = std::array<KeyRange, most_groups>;
  using GroupCounts = std::array<std::size_t, most_groups>;

  [[nodiscard]] std::unique_lock<std::mutex> enter() const;  // throws Forked

  // All of them with mutex_ held.
  void expect_keys(std::size_t key_bytes);
  [[nodiscard]] bool knows(std::size_t key_bytes) const;  // throws InvalidArgument
  void find_all(KeyPointers keys) const;                  // into found_, group after group
  [[nodiscard]] bool usable(EntryId entry, bool with_writing) const noexcept;
  // Of the group or those that back it, what serves this key: readable rather than in flight.
  [[nodiscard]] EntryId serving(const Group& group, std::size_t keys, std::size_t position,
                                bool with_writing) const noexcept;
  [[nodiscard]] std::size_t usable_prefix(std::size_t keys, bool with_writing) const noexcept;
  [[nodiscard]] Plan& plan_of(PlanId id);
  [[nodiscard]] Plan& reservation_of(PlanId id);
  // Null at max_plans. With room for so many blocks of each group, so that no more can fail.
  [[nodiscard]] Plan* new_plan(PlanKind kind, const std::string& owner, const GroupCounts& blocks,
                               KeyPointers keys);
  void end_plan(Plan& plan) noexcept;
  void hold_prefix(Plan& plan, std::size_t keys, std::size_t length, bool with_writing) noexcept;
  void let_go_all(Plan& plan) noexcept;
  std::size_t shorten(Plan& plan, std::size_t length);
  [[nodiscard]] bool any(const Plan& plan, EntryState state) const noexcept;
  void hold(EntryId entry) noexcept;
  void let_go(EntryId entry) noexcept;
  [[nodiscard]] Ranges ranges_of(std::size_t keys, std::span<const KeyRange> given) const;
  [[nodiscard]] std::size_t coverable(std::size_t keys, const Ranges& ranges,
                                      GroupCounts& missing) const noexcept;
  void plan_key(StorePlan& result, GroupIndex group, std::size_t position, KeyPointers keys,
                double value) noexcept;
  [[nodiscard]] EntryId take_slot(Group& group) noexcept;
  void write_entry(Group& group, const Found& found, const std::byte* key, double value,
                   PlannedSlots& its, std::size_t position) noexcept;
  void publish(EntryId entry) noexcept;
  void leave(EntryId entry, EntryState how) noexcept;
  void gone(EntryId entry) noexcept;
  void remove_entry(EntryId entry) noexcept;
  void give_up(const Plan& plan) noexcept;
  void settle(const Plan& plan) noexcept;
  void tell(IndexEvent::Kind kind, EntryId entry) noexcept;
  void expire() noexcept;
  [[nodiscard]] Group& group_of(EntryId entry) noexcept;
  std::size_t evict_some(Group& group, std::size_t most) noexcept;

  const IndexOptions options_;
  ProcessMark mark_;
  mutable std::mutex mutex_;
  std::unique_ptr<Entries> entries_;  // made with the first key
  std::vector<Group> groups_;
  std::vector<GroupNeed> needs_;              // of those that back none
  std::vector<std::unique_ptr<Plan>> plans_;  // by the low half of their ids; used again
  std::vector<std::uint32_t> free_plans_;
  std::size_t reservations_ = 0;
  Nanoseconds next_expiry_;
  bool shortening_needs_keys_ = false;  // a shorter hit may need blocks that a longer one does not
  IndexEvents events_;
  IndexStats counts_;
  mutable std::vector<Found> found_;  // of the call that has the lock
};

}  // namespace kvmem
