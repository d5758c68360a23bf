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
#include <unordered_set>

#include "base/gate.hpp"
#include "offload/admission.hpp"
#include "offload/block_uses.hpp"
#include "offload/checksums.hpp"
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

class BlockClaim;

struct TransferRequest {
  std::vector<BlockId> blocks;  // device blocks, in the order of the host blocks
  After after;
  Priority priority = Priority::background;
  std::optional<Tag> tag;
  std::shared_ptr<BlockClaim> claim = nullptr;  // that has the blocks, or null
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
  ChecksumStats checksum;
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

  // Device blocks that transfers of this kind will use, made one after the other: in use from now
  // on and until the claim goes, so that nobody else's transfer gets in between and busy() tells of
  // them. Throws InvalidArgument (a block that stands twice too), and Busy as such a transfer
  // would.
  [[nodiscard]] std::shared_ptr<BlockClaim> claim(TransferKind kind,
                                                  const std::vector<BlockId>& blocks,
                                                  const After& after);
  // Throws as claim() would, and changes nothing.
  void expect_claimable(TransferKind kind, const std::vector<BlockId>& blocks, const After& after);

  // All throw Busy when a block of either side is in use by an unfinished transfer that is not in
  // `after`; then nothing has changed.
  [[nodiscard]] std::shared_ptr<Transfer> offload(TransferRequest request, Admission admission);
  [[nodiscard]] std::shared_ptr<Transfer> offload_into(TransferRequest request, HostBlocks target,
                                                       Admission admission);
  // Throws Incompatible when `copy` was made with another geometry. Blocks with a checksum are
  // verified before anything is submitted: one that differs ends the transfer with Corrupt.
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
  friend class BlockClaim;
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
  void open_checksums();
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
  void activate(const std::shared_ptr<TransferJob>& job, BlockClaim* claim, Admission& admission);
  // With mutex_ held; throws Busy.
  void expect_free(TransferKind kind, const std::vector<BlockId>& device_blocks,
                   const std::vector<SlotIndex>& host_slots, const CopyJob::Jobs& before,
                   const BlockClaim* own_claim) const;
  void begin_uses(TransferJob& job) noexcept;  // with mutex_ held
  void end_uses(TransferJob& job) noexcept;
  enum class Turn : std::uint8_t { wait, skip };  // when another thread is submitting
  bool submit_some(Side& side, Turn turn) noexcept;
  void slice_ended(Slice& slice, bool lost) noexcept;
  void finish(TransferJob& job) noexcept;
  void choose_checks(TransferJob& job) const;  // with mutex_ held
  void settle_checks() noexcept;               // of those whose check has ended
  void forget_overwritten(const Slice& slice) noexcept;
  CancelOutcome cancel(TransferJob& job) noexcept;
  void record(const TransferJob& job, TransferState state, Nanoseconds observed,
              const CopyQueue::Times& times) noexcept;

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<BlockPool> pool_;
  const ManagerConfig config_;
  std::unique_ptr<Checksums> checksums_;     // none when off
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
  std::vector<BlockClaim*> claims_;
  std::vector<Report> reports_;  // has room for max_reports
  std::uint64_t last_id_ = 0;
  std::uint64_t offloaded_ = 0;  // blocks of accepted offloads, to sample them
  std::unique_ptr<Runtime::ReaperLease> reaper_;
};

// See Manager::claim. Any thread.
class BlockClaim {
 public:
  BlockClaim(const BlockClaim&) = delete;
  BlockClaim& operator=(const BlockClaim&) = delete;
  ~BlockClaim();

 private:
  friend class Manager;
  // The claim (or none) does not count for the blocks of its own job. With the manager's lock held.
  class Aside {
   public:
    Aside(BlockClaim* claim, const TransferJob& job);
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;
    ~Aside();

   private:
    BlockClaim* claim_;
    const std::vector<BlockId>& blocks_;
  };
  BlockClaim(std::shared_ptr<Manager> manager, TransferKind kind,
             const std::vector<BlockId>& blocks)
      : manager_(std::move(manager)), kind_(kind), blocks_(blocks.begin(), blocks.end()) {}

  const std::shared_ptr<Manager> manager_;
  const TransferKind kind_;
  const std::unordered_set<BlockId> blocks_;
};

}  // namespace kvmem
