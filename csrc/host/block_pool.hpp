// Step 1 ALLOCATE. A bounded arena of host memory cut into slots, and the handles that hold them.
//
// A block goes home when its last holder lets go, and a copy in flight is a holder. HostBlocks is
// one holder of a few slots; a second one is spelled share(), the hold of a copy is
// hold_for_copy(). The pool's memory lives until the pool object and every holder are gone. If a
// copy has not been observed to end by then, or a slot is poisoned, the region is leaked: never
// unmapped under a copy.
//
// A pool over attached memory (RegionOptions::attach) hands out none of it: each slot has an owner
// elsewhere, the pool that made the memory or an index over it. It takes part by number alone,
// share_indices(), and what its holders do shows in no other pool: whoever hands the slots out has
// to be told when copies have ended.
//
// Threads: every call, any thread; one short leaf lock. Full is not an error: try_acquire answers
// with nullopt.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/progress.hpp"
#include "base/tickets.hpp"
#include "host/block_table.hpp"
#include "host/pinned_region.hpp"
#include "host/slot_list.hpp"

namespace kvmem {

namespace detail {
class PoolCore;
}

class HostBlocks {  // move-only
 public:
  HostBlocks() = default;
  HostBlocks(HostBlocks&& other) noexcept
      : core_(std::exchange(other.core_, nullptr)),
        slots_(std::move(other.slots_)),
        holder_(other.holder_) {}
  HostBlocks& operator=(HostBlocks&& other) noexcept {
    if (this == &other) return *this;
    release();
    core_ = std::exchange(other.core_, nullptr);
    slots_ = std::move(other.slots_);
    holder_ = other.holder_;
    return *this;
  }
  ~HostBlocks() { release(); }

  [[nodiscard]] std::size_t size() const noexcept { return slots_.size(); }
  [[nodiscard]] bool empty() const noexcept { return slots_.size() == 0; }
  [[nodiscard]] std::span<const SlotIndex> slots() const noexcept { return slots_.span(); }
  [[nodiscard]] std::byte* data(std::size_t i) const noexcept;
  [[nodiscard]] std::size_t block_bytes() const noexcept;
  [[nodiscard]] std::size_t slot_bytes() const noexcept;
  [[nodiscard]] std::optional<std::uint32_t> sum(std::size_t i) const noexcept;  // if one is kept
  [[nodiscard]] bool pinned() const noexcept;                                    // each of them
  // Whether one copy may touch them all: no two are in chunks that were pinned one by one.
  [[nodiscard]] bool in_one_chunk() const noexcept;
  [[nodiscard]] bool of(const detail::PoolCore* core) const noexcept { return core_ == core; }

  [[nodiscard]] HostBlocks share(std::size_t first, std::size_t count) const;
  [[nodiscard]] HostBlocks share() const { return share(0, size()); }
  [[nodiscard]] HostBlocks hold_for_copy() const;
  // Throws NotDone while a copy holds one of them, DeviceLost for a poisoned one, AlreadyReleased.
  void expect_no_copies() const;

  void release() noexcept {  // twice is fine here: the second finds nothing
    if (core_ != nullptr) let_go();
  }
  void poison() noexcept;  // of a copy's hold: the device was lost, the slots are never used again

 private:
  friend class detail::PoolCore;
  friend class BlockPool;
  HostBlocks(detail::PoolCore* core, SlotList slots, Holder holder) noexcept
      : core_(core), slots_(std::move(slots)), holder_(holder) {}
  void let_go() noexcept;

  detail::PoolCore* core_ = nullptr;  // counted by the core itself, under its lock
  SlotList slots_;
  Holder holder_ = Holder::owner;
};

struct PoolOptions {
  std::size_t block_bytes = 0;
  std::size_t capacity_bytes = 0;
  Pin pin = Pin::automatic;
  double pin_bytes_per_second = 0;  // at most; at least 1; 0: as fast as it goes
  // Its progress is told of pinning too where that is waited for: each byte counts twice then.
  RegionOptions region;
};

struct PoolStats {
  SlotCounts slots;
  std::uint32_t peak_held = 0, peak_quarantined = 0;
  std::size_t waiters = 0;
  std::uint64_t acquired = 0;  // slots handed out
  std::uint64_t refused = 0;   // try_acquire calls that found too few
  std::size_t block_bytes = 0, slot_bytes = 0, padding_bytes = 0;  // padding: of all slots
  RegionFacts region;
  std::optional<std::string> pin_error;  // why pinning in the background ended early
};

// Waiting for slots is holding one of these. Dropping it gives up the place in the queue, or what
// was granted.
class PoolTicket {  // move-only
 public:
  PoolTicket(PoolTicket&& other) noexcept;
  PoolTicket& operator=(PoolTicket&&) = delete;
  ~PoolTicket();
  // Throws Closed when the pool was closed meanwhile, CapacityError when so many blocks were
  // poisoned that the ticket can never be served, AlreadyReleased once it was taken.
  [[nodiscard]] bool granted() const;
  [[nodiscard]] HostBlocks take();  // once, after granted(); else throws what it throws, or NotDone

 private:
  friend class BlockPool;
  PoolTicket(detail::PoolCore* core, std::shared_ptr<Ticket> ticket) noexcept;
  detail::PoolCore* core_;
  std::shared_ptr<Ticket> ticket_;
};

class BlockPool {
 public:
  // Throws InvalidArgument (a zero size, block_bytes over 2^63, 2^32 slots or more, less than one
  // byte a second), CapacityError (less than one slot) and what PinnedRegion::map and pin throw.
  //
  // With Pin::background a thread pins chunk after chunk, until it is done, one fails, or the pool
  // is closed or gone. It holds the memory like any holder; nobody waits for it.
  BlockPool(std::shared_ptr<Device> device, const PoolOptions& options);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Throws InvalidArgument for 0, Closed.
  [[nodiscard]] std::optional<HostBlocks> try_acquire(std::size_t count);
  // The same without a handle, for owners that keep books of their own: fills all of `slots`, or
  // answers false. Whoever was given a slot gives it back once; until then it counts as held, also
  // behind the pool's end.
  [[nodiscard]] bool try_acquire(std::span<SlotIndex> slots);
  // Throws InvalidArgument for a slot out of range or without an owner left, and for an attached
  // pool; then nothing has changed.
  void release(std::span<const SlotIndex> slots);
  // Joins the FIFO. Throws CapacityError at once when `count` exceeds the capacity less what is
  // poisoned.
  [[nodiscard]] PoolTicket enqueue(std::size_t count, Waker waker = {});
  // A further owner of slots that somebody already holds, by index (throws InvalidArgument for one
  // that nobody does).
  [[nodiscard]] HostBlocks share_indices(std::span<const SlotIndex> slots);

  // Checksums (CRC32C of the payload) of slots, kept from now on; twice is fine. A slot that is
  // acquired has none. Who lets a slot be written forgets its sum first; that is a no-op where none
  // are kept. Each process has its own: of a slot that another one writes nothing is known here.
  void keep_sums();
  void set_sum(SlotIndex slot, std::uint32_t sum) noexcept;
  void forget_sums(std::span<const SlotIndex> slots) noexcept;
  [[nodiscard]] std::optional<std::uint32_t> sum(SlotIndex slot) const noexcept;

  [[nodiscard]] std::uint64_t free() const;  // what try_acquire() can have just now
  [[nodiscard]] PoolStats stats() const;
  [[nodiscard]] Shortage shortage(std::size_t wanted) const;  // the numbers for an error message
  void close() noexcept;  // no more acquires; waiters are told; holders stay good
  void check() const;     // BlockTable::check()

  [[nodiscard]] std::byte* data() const noexcept;
  [[nodiscard]] std::size_t block_bytes() const noexcept;
  [[nodiscard]] std::size_t slot_bytes() const noexcept;
  [[nodiscard]] std::uint32_t capacity() const noexcept;
  [[nodiscard]] bool pinned() const noexcept;                                  // all of it
  [[nodiscard]] bool pinned(std::span<const SlotIndex> slots) const noexcept;  // once so, always so
  // Whole slots. No copy may cross from one chunk into the next; 0: nothing is ever pinned.
  [[nodiscard]] std::size_t pin_chunk_bytes() const noexcept;
  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept;
  [[nodiscard]] detail::PoolCore* core() const noexcept { return core_; }

 private:
  detail::PoolCore* core_;
};

}  // namespace kvmem
