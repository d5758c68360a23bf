// The inside of a block pool: its memory, table, queue and the one lock. Private to the pool and
// its handles; every other room sees host/block_pool.hpp.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "base/process.hpp"
#include "host/block_pool.hpp"
#include "host/block_sums.hpp"
#include "host/page_touch.hpp"
#include "host/pin_pace.hpp"

namespace kvmem::detail {

// What the pool object and all its handles share, and the thread that pins in the background. Each
// of them is counted under the one lock; whoever leaves last deletes the core. Wakers fire and the
// device's progress moves under the lock too: both are short leaves below it, and behind it the
// core may be gone.
class PoolCore {
 public:
  PoolCore(std::shared_ptr<Device> device, const PoolOptions& options, std::size_t slot_bytes,
           std::uint32_t capacity);
  PoolCore(const PoolCore&) = delete;
  PoolCore& operator=(const PoolCore&) = delete;

  [[nodiscard]] std::optional<HostBlocks> try_acquire(std::size_t count);
  [[nodiscard]] bool try_acquire(std::span<SlotIndex> slots);
  [[nodiscard]] std::shared_ptr<Ticket> enqueue(std::size_t count, Waker waker);
  [[nodiscard]] bool granted(const Ticket& ticket);
  [[nodiscard]] HostBlocks take(const Ticket& ticket);
  void drop(const std::shared_ptr<Ticket>& ticket) noexcept;

  [[nodiscard]] HostBlocks add(std::span<const SlotIndex> slots, Holder holder, bool expect_owner);
  void remove(std::span<const SlotIndex> slots, Holder holder) noexcept;
  void release(std::span<const SlotIndex> slots);
  void expect_no_copies(std::span<const SlotIndex> slots);
  void poison(std::span<const SlotIndex> slots) noexcept;

  void keep_sums();
  void set_sum(SlotIndex slot, std::uint32_t sum) noexcept {
    if (BlockSums* const sums = sums_.load(std::memory_order_acquire)) sums->set(slot, sum);
  }
  void forget_sums(std::span<const SlotIndex> slots) noexcept {
    if (BlockSums* const sums = sums_.load(std::memory_order_acquire)) sums->forget(slots);
  }
  [[nodiscard]] std::optional<std::uint32_t> sum(SlotIndex slot) const noexcept {
    const BlockSums* const sums = sums_.load(std::memory_order_acquire);
    return sums != nullptr ? sums->get(slot) : std::nullopt;
  }

  void close() noexcept;
  void drop_pool() noexcept;

  [[nodiscard]] std::uint64_t free();
  [[nodiscard]] PoolStats stats();
  [[nodiscard]] Shortage shortage(std::size_t wanted);
  void check();

  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  [[nodiscard]] const PinnedRegion& region() const noexcept { return region_; }
  [[nodiscard]] bool pinned(std::span<const SlotIndex> slots) const noexcept;
  [[nodiscard]] std::size_t block_bytes() const noexcept { return block_bytes_; }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::byte* at(SlotIndex slot) const noexcept {
    return region_.data() + std::size_t{slot} * slot_bytes_;
  }

 private:
  ~PoolCore();
  void expect_same_process() const { mark_.expect_same_process("a block pool"); }
  void expect_open() const {
    if (closed_) throw Closed("the block pool is closed");
  }
  void pin_first(const TouchProgress& progress);
  void pin_behind();
  void pin_in_background() noexcept;
  [[nodiscard]] bool note_pinned(Nanoseconds pause);
  void pinning_ended(const std::exception_ptr& error) noexcept;
  [[nodiscard]] Shortage shortage_locked(std::size_t wanted) const;
  [[nodiscard]] bool try_acquire_locked(std::span<SlotIndex> slots);
  void note_peaks() noexcept;
  // Under the lock; those who wait look again.
  template <class Change>
  void apply(Change&& change) noexcept;
  // The same, and the caller's handle is gone.
  template <class Change>
  void leave(Change&& change) noexcept;

  const std::shared_ptr<Device> device_;
  const std::size_t block_bytes_, slot_bytes_;
  const std::uint32_t capacity_;
  // Another pool hands its slots out: each has an owner elsewhere, who never lets go here.
  const bool attached_;
  const PinPace pace_;
  const ProcessMark mark_;
  PinnedRegion region_;
  std::atomic<BlockSums*> sums_{nullptr};  // those below, once there are any

  std::mutex mutex_;
  std::unique_ptr<BlockSums> own_sums_;
  BlockTable table_;
  TicketQueue tickets_;  // free() is what the table has free, less what is granted and not taken
  // The pool object, each HostBlocks with slots, each PoolTicket, the thread that pins.
  std::size_t handles_ = 1;
  bool closed_ = false;
  std::condition_variable pinning_ends_;
  std::exception_ptr pin_error_;
  std::uint32_t peak_held_ = 0, peak_quarantined_ = 0;
  std::uint64_t acquired_ = 0, refused_ = 0;
};

}  // namespace kvmem::detail
