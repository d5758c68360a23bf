// A caller's interest in one store or load of a cache.
//
// It ends once: done, failed or cancelled, like a Transfer, and dropping it changes nothing. A
// store that is done was published; a load that is done delivered every block. Of a load that
// failed, loaded() is the prefix that was delivered and verified; its other targets, and all of
// those of a cancelled one, hold undefined bytes.
//
// Any thread. Waiting calls throw what their Interrupt throws.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cache/index.hpp"
#include "offload/manager.hpp"
#include "tier/disk_slots.hpp"

namespace kvmem {

class Cache;
enum class CacheKind : std::uint8_t { store, load };
[[nodiscard]] constexpr const char* name_of(CacheKind kind) noexcept {
  return kind == CacheKind::store ? "store" : "load";
}

// What of a job is copied by one transfer.
struct CachePart {
  enum class State : std::uint8_t { to_read, reading, to_submit, submitted, ended };
  State state = State::to_submit;
  bool ok = false;       // of one that ended
  bool landing = false;  // its one slot is a landing block
  GroupIndex group = 0;
  std::vector<std::uint32_t> positions;
  std::vector<SlotIndex> slots;  // of the pool
  SlotIndex disk_slot = 0;       // of one that is to be read
  std::uint32_t disk_sum = 0;    // of one that was read
  Nanoseconds since = 0;         // reading or submitted
  std::shared_ptr<Transfer> transfer;
};

// One accepted store or load, whoever is interested in it. It keeps the cache until it has ended.
struct CacheJob {
  std::shared_ptr<Cache> cache;
  CacheKind kind = CacheKind::store;
  std::uint64_t id = 0;
  std::string owner;
  Priority priority = Priority::background;
  After after;
  PlanId plan = 0;
  std::size_t key_bytes = 0;
  std::vector<std::byte> keys;
  std::vector<std::vector<BlockId>> blocks;  // of each group, by position
  std::vector<std::shared_ptr<BlockClaim>> claims;
  double value = 1.0;

  // Of a store, fixed when it is made.
  std::size_t covered = 0, present = 0, attached = 0;
  std::string refused;

  std::atomic<bool> cancelled{false};
  std::atomic<TransferState> ended{TransferState::queued};  // terminal, or queued: no end yet
  std::atomic<std::size_t> length{0};                       // keys, of a load: once it was begun
  std::atomic<std::size_t> loaded{0};
  std::atomic<bool> begun{false};  // something was handed to a manager or a disk

  // By whoever moves the cache on, and changed under `mutex` where others look.
  std::mutex mutex;
  bool waits_for_keys = false;  // a load that attached to keys in flight
  bool told_cancelled = false;  // its parts were
  std::vector<CachePart> parts;
  std::size_t first_open = 0;     // all before it have ended
  Nanoseconds starves_since = 0;  // it waits for a landing block; real time, 0: it does not
  std::exception_ptr error;       // the first; set before `ended`
  std::vector<Waker> wakers;

  [[nodiscard]] const std::byte* key(std::size_t position) const noexcept {
    return keys.data() + position * key_bytes;
  }
  [[nodiscard]] std::span<const std::byte> key_span(std::size_t position) const noexcept {
    return {key(position), key_bytes};
  }
  [[nodiscard]] TransferState state() const noexcept {
    const TransferState end = ended.load();
    if (is_terminal(end)) return end;
    return begun ? TransferState::in_flight : TransferState::queued;
  }
};

class CacheTransfer {
 public:
  explicit CacheTransfer(std::shared_ptr<CacheJob> job) : job_(std::move(job)) {}
  CacheTransfer(const CacheTransfer&) = delete;
  CacheTransfer& operator=(const CacheTransfer&) = delete;

  [[nodiscard]] const CacheJob& job() const noexcept { return *job_; }
  [[nodiscard]] TransferState state() const noexcept { return job_->state(); }
  [[nodiscard]] bool done() const noexcept { return is_terminal(job_->ended.load()); }

  // Throws the error (CopyFailed, Corrupt, Cancelled, DeviceLost...) or TimedOut.
  void wait(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt = {});
  void expect_done() const;  // throws NotDone before the end, the error after it
  CancelOutcome cancel();

  // As Transfer::wait_on: it returns when all parts have been submitted, so of a load when all that
  // it reads from disk is in host memory.
  void wait_on(StreamHandle stream, std::optional<std::int64_t> stage,
               const Runtime::Interrupt& interrupt = {});

  // Of a load: keys, once it has ended; and the positions of those that did not arrive.
  [[nodiscard]] std::size_t loaded() const noexcept { return job_->loaded; }
  [[nodiscard]] std::vector<std::size_t> failed_positions() const;
  [[nodiscard]] std::span<const std::byte> key(std::size_t position) const;

  void wake(std::shared_ptr<WakeList> list, std::uint64_t token);
  void unwake(const std::shared_ptr<WakeList>& list, std::uint64_t token);

 private:
  std::shared_ptr<CacheJob> job_;
};

}  // namespace kvmem
