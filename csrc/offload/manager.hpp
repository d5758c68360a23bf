// Moves blocks between the device cache that a layout declares and the slots of a pool, and
// guarantees that no block on either side is reused while a copy can still touch it.
//
//   1 allocate   admit()              slots, queue room, a report place: each a bound with a FIFO
//   2 submit     offload(), restore() counted against the blocks in use, handed to the copy queue
//     guard      submit_ready()       every slice is parked with the event behind it
//   3 complete   Runtime::advance()   events are asked, never waited for
//   4 recycle    finish()             one terminal state; holds, bytes and counts go home
//   5 restore    restore()            only from a copy whose end was observed
//
// Always held by shared_ptr; transfers keep it alive, so dropping the last handle loses nothing.
// Any thread. Calls may wait for a device call of another thread; none waits for a copy unless it
// says so.
#pragma once

#include <array>
#include <unordered_map>

#include "base/gate.hpp"
#include "offload/admission.hpp"
#include "offload/block_uses.hpp"
#include "offload/config.hpp"
#include "offload/timeline.hpp"
#include "offload/transfer.hpp"

namespace kvmem {

// What a transfer is ordered behind. Taken when the call is made: later use of the same stream or
// event changes nothing.
struct After {
  CopyJob::Events events;
  CopyJob::Jobs transfers;
};

struct TransferRequest {
  std::vector<BlockId> blocks;  // device blocks, in the order of the host blocks
  After after;
  Priority priority = Priority::background;
  std::optional<Tag> tag;
};

struct DirectionStats {
  std::uint64_t accepted = 0, done = 0, failed = 0, cancelled = 0;  // transfers
  std::uint64_t blocks_done = 0, bytes_done = 0, bytes_staged = 0;
  std::uint64_t queue_delay_total_us = 0, queue_delay_max_us = 0;  // requested to submitted
  std::uint64_t guard_wait_total_us = 0;                           // submitted to observed
  std::size_t active = 0, waiting = 0;  // not ended; of those, not wholly submitted
  std::size_t queued_bytes = 0, window_bytes = 0, window_descriptors = 0, lanes_owned = 0;
};

struct ManagerStats {
  std::array<DirectionStats, 2> directions;  // by Direction
  std::size_t restoration_slots = 0;         // device blocks that an unfinished restore writes
  std::size_t reports_waiting = 0, reports_taken = 0, waiters = 0;
  std::size_t smallest_segment_bytes = 0;
};

struct CloseReport {
  bool quiet = false;         // everything had ended in time
  std::size_t cancelled = 0;  // at the deadline
  std::size_t in_flight = 0;  // transfers whose copies have still not been observed to end
  SlotCounts slots;           // of the pool, after the close
};

class Manager final : public Submitter, public std::enable_shared_from_this<Manager> {
 public:
  // Throws InvalidArgument (a layout of another memory, block sizes that differ, a bound out of
  // range).
  [[nodiscard]] static std::shared_ptr<Manager> make(std::shared_ptr<Runtime> runtime,
                                                     KVLayout layout,
                                                     std::shared_ptr<BlockPool> pool,
                                                     const ManagerConfig& config);
  ~Manager() override;

  // Order behind streams, events and transfers. Throws InvalidArgument for one that may not be used
  // here.
  void add_stream(After& after, StreamHandle stream);
  void add_event(After& after, EventHandle event);
  void add_transfer(After& after, const Transfer& transfer);

  // Checks the request and names what it needs. Throws InvalidArgument; CapacityError when it can
  // never be accepted.
  [[nodiscard]] Admission admit(TransferKind kind, const TransferRequest& request,
                                bool takes_slots);
  // False at the deadline.
  [[nodiscard]] bool wait_for(Admission& admission, std::optional<double> timeout_seconds,
                              const Runtime::Interrupt& interrupt);

  // All throw Busy when a block of either side is in use by an unfinished transfer that is not in
  // `after`; then nothing has changed.
  [[nodiscard]] std::shared_ptr<Transfer> offload(TransferRequest request, Admission admission);
  [[nodiscard]] std::shared_ptr<Transfer> offload_into(TransferRequest request, HostBlocks target,
                                                       Admission admission);
  // Throws Incompatible when `copy` was made with another geometry.
  [[nodiscard]] std::shared_ptr<Transfer> restore(TransferRequest request, const HostCopy& copy,
                                                  Admission admission);

  // Reports of tagged transfers that ended since the last call; drives submission and reaping.
  [[nodiscard]] std::vector<Report> poll();
  // Those of the blocks that an unfinished transfer reads or writes.
  [[nodiscard]] std::vector<BlockId> busy(std::span<const BlockId> blocks) const;
  [[nodiscard]] ManagerStats stats() const;
  [[nodiscard]] std::vector<TimelineRecord> timeline();

  // Waits until nothing is unfinished. False at the deadline.
  bool drain(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt);
  // Swaps addresses for those of equal geometry. Throws Busy unless drained, Incompatible.
  void rebind(KVLayout layout);
  // Stops new work, waits for the old, cancels the rest. Whatever is then in flight stays guarded;
  // its pool region is leaked rather than unmapped. Twice is fine.
  CloseReport close(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt);

  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }
  [[nodiscard]] const std::shared_ptr<BlockPool>& pool() const noexcept { return pool_; }
  [[nodiscard]] const ManagerConfig& config() const noexcept { return config_; }
  [[nodiscard]] std::shared_ptr<const KVLayout> layout() const;
  [[nodiscard]] bool closed() const noexcept { return gate_.closed(); }

  void submit_ready() noexcept override;
  [[nodiscard]] bool has_waiting() const noexcept override;

 private:
  friend class Transfer;
  struct SliceGuard;
  struct Side {  // one direction
    // of the queue's lanes
    std::unordered_map<std::uint64_t, std::shared_ptr<RecycleQueue::Line>> lines;
    std::unique_ptr<CopyQueue> queue;
    std::unique_ptr<Bound> bytes, transfers;
    DirectionStats stats;  // under mutex_
  };

  Manager(std::shared_ptr<Runtime> runtime, KVLayout layout, std::shared_ptr<BlockPool> pool,
          const ManagerConfig& config);
  void open_side(Direction direction);
  [[nodiscard]] Gate::Pass enter();
  [[nodiscard]] Side& side(Direction direction) noexcept {
    return sides_[static_cast<std::size_t>(direction)];
  }
  [[nodiscard]] Side& side(const TransferJob& job) noexcept {
    return side(job.batch().direction());
  }

  std::shared_ptr<Transfer> accept(TransferKind kind, TransferRequest request, HostBlocks guarded,
                                   HostBlocks result, Admission admission);
  std::shared_ptr<TransferJob> make_job(TransferKind kind, const TransferRequest& request,
                                        const HostBlocks& guarded,
                                        std::shared_ptr<const KVLayout> layout);
  // Throws Busy; then nothing has changed.
  void activate(const std::shared_ptr<TransferJob>& job, Admission& admission);
  void expect_free(const TransferJob& job) const;  // with mutex_ held; throws Busy
  void begin_uses(TransferJob& job) noexcept;      // with mutex_ held
  void end_uses(TransferJob& job) noexcept;
  enum class Turn : std::uint8_t { wait, skip };  // when another thread is submitting
  bool submit_some(Side& side, Turn turn) noexcept;
  void slice_ended(Slice& slice, bool lost) noexcept;
  void finish(TransferJob& job) noexcept;
  CancelOutcome cancel(TransferJob& job) noexcept;
  void record(const TransferJob& job, TransferState state, Nanoseconds observed,
              const CopyQueue::Times& times) noexcept;

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<BlockPool> pool_;
  const ManagerConfig config_;
  const std::shared_ptr<EventPool> events_;  // with timing when the timeline is on
  ProcessMark mark_;
  Gate gate_;
  std::array<Side, 2> sides_;
  Bound report_places_;
  Timeline timeline_;

  mutable std::mutex mutex_;  // over what follows; no device call under it
  std::shared_ptr<const KVLayout> layout_;
  BlockUses device_uses_;
  BlockUses host_uses_;
  std::unordered_map<std::uint64_t, std::shared_ptr<TransferJob>> active_;
  std::vector<Report> reports_;  // has room for max_reports
  std::uint64_t last_id_ = 0;
  std::unique_ptr<Runtime::ReaperLease> reaper_;
};

}  // namespace kvmem
