// A caller's interest in one offload or restore.
//
// The copy does not depend on it: dropping a Transfer, cancelling it or failing to wait for it
// never blocks and never frees anything that a copy may still touch. A restore's target blocks hold
// undefined bytes unless it ended done.
//
// Any thread, but one Transfer object is dropped by one thread. Waiting calls throw what their
// Interrupt throws.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/waker.hpp"
#include "copy/copy_queue.hpp"
#include "offload/checksums.hpp"
#include "offload/host_copy.hpp"
#include "offload/transfer_kinds.hpp"
#include "recycle/runtime.hpp"

namespace kvmem {

class Manager;

// One accepted transfer, whoever is interested in it. Lives until its guard has been observed.
class TransferJob final : public CopyJob {
 public:
  TransferJob(CopyBatch batch, Priority priority, Events after, Jobs behind, bool staged)
      : CopyJob(std::move(batch), priority, std::move(after), std::move(behind), staged) {}

  std::shared_ptr<Manager> manager;
  std::shared_ptr<const KVLayout> layout;
  std::uint64_t id = 0;
  TransferKind kind = TransferKind::offload;
  std::vector<BlockId> device_blocks;
  std::vector<SlotIndex> host_slots;
  Nanoseconds requested = -1;
  HostBlocks guarded;            // the copy's own hold: goes only when its end was observed
  std::optional<Report> report;  // of a tagged transfer; finished at the end
  bool lost = false;             // the reaper's
  BlockChecks checks;            // chosen before it is accepted
  Nanoseconds copied = -1;       // an offload's end, less its checksums
  Nanoseconds checked = -1;      // when its checksums were stored, or verified

  std::atomic<TransferState> ended{
      TransferState::queued};  // terminal, or queued while there is no end

  // Under the manager's lock.
  bool uses_blocks = false;  // counted in the manager's uses
  HostBlocks result;         // an offload's blocks, for as long as anybody may ask for them
  std::exception_ptr error;  // set before `ended`
  std::vector<Waker> wakers;
  std::shared_ptr<Event> first_use;

  [[nodiscard]] bool has_checks() const noexcept { return !checks.blocks.empty(); }
  [[nodiscard]] TransferState state() const noexcept {
    const TransferState end = ended.load();
    if (is_terminal(end)) return end;
    return begun() ? TransferState::in_flight : TransferState::queued;
  }
};

class Transfer {
 public:
  explicit Transfer(std::shared_ptr<TransferJob> job) : job_(std::move(job)) {}
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer();  // drops interest

  [[nodiscard]] const std::shared_ptr<TransferJob>& job() const noexcept { return job_; }
  [[nodiscard]] TransferState state() const noexcept { return job_->state(); }
  // Ended, whichever way.
  [[nodiscard]] bool done() const noexcept { return is_terminal(job_->ended.load()); }

  // Waits for the end. Throws the transfer's error (CopyFailed, DeviceLost, Cancelled), or
  // TimedOut.
  void wait(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt = {});
  void expect_done() const;  // throws NotDone before the end, the transfer's error after it

  // An offload's copy, the same object every time; null for a restore. Asks the device once more
  // before it throws NotDone; throws what expect_done() throws.
  [[nodiscard]] std::shared_ptr<HostCopy> result();

  CancelOutcome cancel();

  // Work queued on `stream` from now on runs after the transfer, or after that stage of it and
  // those before. Returns when that part has been submitted; it may submit it, or wait for it.
  // Throws the transfer's error if it has one by then: a later failure shows in the transfer's end
  // alone. InvalidArgument: a stream of another device, no such stage.
  void wait_on(StreamHandle stream, std::optional<std::int64_t> stage,
               const Runtime::Interrupt& interrupt = {});

  // Fired at the end; at once when it has ended. Who no longer waits takes it back, or it stays
  // until then.
  void wake(std::shared_ptr<WakeList> list, std::uint64_t token);
  void unwake(const std::shared_ptr<WakeList>& list, std::uint64_t token);

 private:
  std::shared_ptr<TransferJob> job_;
  std::shared_ptr<HostCopy> copy_;
};

}  // namespace kvmem
