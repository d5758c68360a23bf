// Step 2 SUBMIT. The copies of one direction on one device: who goes next, on which stream, how
// much at a time.
//
// Accepted jobs wait here in two classes. A window bounds what the device has been given, so that a
// demand job waits for at most one window whatever the background has queued. Lanes are copy
// streams: ready jobs share lane 0; a job whose `after` is not complete yet gets a lane of its own,
// or waits here, so that it never stands before a ready one. Behind a job whose slots the host
// itself still uses (a staged offload, a check) it waits here for the end of that. The slices of
// one job stay in one lane, in stage order.
//
// Nothing hidden: the owner asks for a slice with next(), submits it, parks its guard, and says
// when it ended. Threads: next() and submit() under submitting(), held across both; the rest from
// any thread. noexcept calls cannot fail: what went wrong is in the slice and in the job.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "copy/copy_batch.hpp"
#include "copy/staging_ring.hpp"
#include "device/stream.hpp"

namespace kvmem {

class CopyQueue;

struct Lane {
  explicit Lane(Stream own) : stream(std::move(own)) {}
  Stream stream;
  std::size_t bytes = 0, descriptors = 0;  // in flight
  const void* owner = nullptr;             // the job that has the lane to itself
};

// Its arrays may have to outlive all else: a lost device goes on reading them. It then holds
// itself, which needs no memory.
struct KeptBatch : CopyBatch {
  explicit KeptBatch(CopyBatch batch) : CopyBatch(std::move(batch)) {}
  std::shared_ptr<KeptBatch> kept;
  KeptBatch* next_kept = nullptr;
};

// What the queue knows of a transfer. The batch's arrays live as long as the job, and the job as
// long as a guard.
class CopyJob {
 public:
  using Events = std::vector<std::shared_ptr<Event>>;
  using Jobs = std::vector<std::shared_ptr<CopyJob>>;

  CopyJob(CopyBatch batch, Priority priority, Events after, Jobs behind, bool staged);
  virtual ~CopyJob() = default;
  CopyJob(const CopyJob&) = delete;
  CopyJob& operator=(const CopyJob&) = delete;

  [[nodiscard]] const CopyBatch& batch() const noexcept { return *batch_; }
  [[nodiscard]] Priority priority() const noexcept { return priority_; }
  [[nodiscard]] bool staged() const noexcept { return staged_; }
  // Some of it was submitted.
  [[nodiscard]] bool begun() const noexcept { return submitted_at_.load() >= 0; }
  // Or will never be.
  [[nodiscard]] bool all_submitted() const noexcept { return all_submitted_.load(); }
  // First slice; -1 before.
  [[nodiscard]] Nanoseconds submitted_at() const noexcept { return submitted_at_.load(); }
  // The transfers that this one runs after; none once it is finished.
  [[nodiscard]] Jobs behind() const;
  [[nodiscard]] bool cancelled() const;  // dropped by its owner before it was finished
  // Its bytes are to be checked: before the first slice of a restore, behind the last one of an
  // offload. Until then the one is not submitted and the other not finished, and what runs behind
  // it waits. Before it is accepted.
  void expect_check() noexcept { unchecked_.store(true); }

 private:
  friend class CopyQueue;
  const std::shared_ptr<KeptBatch> batch_;
  const Priority priority_;
  const bool staged_;
  std::atomic<Nanoseconds> submitted_at_{-1};
  std::atomic<bool> all_submitted_{false};
  std::atomic<bool> urgent_{false};
  std::atomic<bool> unchecked_{false};

  // The submitter's.
  Events after_;          // not observed complete yet
  Jobs unsubmitted_;      // of behind_: those that no event stands for yet
  std::size_t next_ = 0;  // first descriptor not submitted
  Lane* lane_ = nullptr;

  // All of it was submitted, and yet only its end says that the host neither writes nor reads its
  // slots any more.
  [[nodiscard]] bool host_uses_slots() const noexcept {
    return unchecked_.load() || (staged_ && batch_->direction() == Direction::to_host);
  }

  mutable std::mutex mutex_;  // over all that follows; nothing is called under it
  Jobs behind_;
  bool cancelled_ = false;
  bool dropped_ = false;
  bool submitting_ = false;  // a slice was taken and is not published yet
  bool unguarded_ = false;   // no event could be recorded behind a slice
  bool finished_ = false;
  std::size_t in_flight_ = 0;  // slices
  Events stage_events_;        // recorded behind the last slice of each stage, while not finished
  // before the first slice's copy; behind the last slice so far
  std::shared_ptr<Event> started_event_, last_event_;
  std::exception_ptr error_;
};

struct Slice {
  std::shared_ptr<CopyJob> job;
  Lane* lane = nullptr;
  std::size_t begin = 0, end = 0, bytes = 0;
  std::shared_ptr<Event> event;  // recorded behind the slice, or not recorded when that failed too
  std::optional<StagingRing::Piece> piece;
  std::vector<std::byte*> home;  // host ends of staged descriptors
};

struct QueueWindow {
  std::size_t bytes = 0, descriptors = 0;
  bool eager = false;  // nobody will come back to submit the rest: submit all that can go
};

class CopyQueue {
 public:
  // Lane 0 has half of the window, the others share the rest.
  static constexpr std::size_t lanes = 5;
  // A consumer that waits for an unready job may open more.
  static constexpr std::size_t most_lanes = 64;

  // `opened` is told of each lane before it is used, so that its guard can be prepared; it may
  // throw.
  using LaneOpened = std::function<void(const Stream&)>;
  CopyQueue(std::shared_ptr<EventPool> events, const QueueWindow& window,
            std::shared_ptr<StagingRing> ring, LaneOpened opened);

  // For CopyBatch.
  [[nodiscard]] std::size_t descriptor_bytes() const noexcept { return descriptor_bytes_; }

  using Entry = std::list<std::shared_ptr<CopyJob>>;  // of one job: made before the call, so that
                                                      // it cannot fail
  // Never refuses: admission is the owner's. Returns whether nothing was waiting before.
  bool accept(Entry entry) noexcept;
  // Somebody waits for its submission: no window holds it back, nor those that it runs behind,
  // whatever their class.
  static void hurry(CopyJob& job);
  static void hurry_those_before(const CopyJob& job);

  [[nodiscard]] std::mutex& submitting() noexcept { return submitting_; }
  // Jobs that next() has done with, to be dropped when the submitter's lock is gone: with them may
  // go the last of other managers.
  struct Gone {
    Entry jobs;
    CopyJob::Jobs before;  // others ran behind them
  };
  [[nodiscard]] Gone take_gone() noexcept { return std::exchange(gone_, {}); }
  [[nodiscard]] bool next(Slice& slice);  // throws nothing but bad_alloc; then nothing was taken
  void submit(Slice& slice) noexcept;

  // A job is finished when nothing more of it will be submitted and nothing is in flight. Exactly
  // one call for each job says that it finished it: the end of its last slice, or a drop that finds
  // nothing in flight.
  [[nodiscard]] bool ended(Slice& slice, bool lost) noexcept;
  enum class Dropped : std::uint8_t { too_late, draining, finished };
  // No further slices; the job counts as cancelled unless too late.
  [[nodiscard]] Dropped drop(CopyJob& job) noexcept;

  // Whether the check of a job's bytes may begin now, which then counts as in flight. Of an offload
  // that is said once, when its last slice has ended; never of a job that was dropped.
  [[nodiscard]] static bool begin_check(CopyJob& job) noexcept;
  // With what the check found, if it is bad; of a dropped job that does not matter. Whether that
  // finished the job: an offload always.
  [[nodiscard]] static bool end_check(CopyJob& job, std::exception_ptr error) noexcept;

  // The event recorded behind a stage; `submitted` false: not yet; a null event: nothing to wait
  // for.
  struct StagePoint {
    bool submitted = false;
    std::shared_ptr<Event> event;
  };
  [[nodiscard]] static StagePoint stage_point(const CopyJob& job, std::size_t stage);
  [[nodiscard]] static std::exception_ptr error(const CopyJob& job);
  struct Times {
    Nanoseconds started = -1, completed = -1;  // -1: never recorded, or no timing events
  };
  // Of a finished job, which then forgets its events.
  [[nodiscard]] Times settle(CopyJob& job) noexcept;

  // Jobs with slices yet to be taken.
  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_count_.load(); }
  struct InFlight {
    std::size_t bytes = 0, descriptors = 0, lanes_owned = 0;
  };
  [[nodiscard]] InFlight in_flight() const;

 private:
  void open_lane();
  void collect_incoming();
  [[nodiscard]] Lane* lane_for(CopyJob& job);  // null: not yet
  [[nodiscard]] bool take(const std::shared_ptr<CopyJob>& job, Lane& lane, Slice& slice);
  void send(Slice& slice);
  void note_start(CopyJob& job, StreamHandle stream) noexcept;
  void through_staging(Slice& slice);
  void publish(const Slice& slice, const std::exception_ptr& error) noexcept;
  [[nodiscard]] QueueWindow budget(const Lane& lane) const noexcept;
  [[nodiscard]] static bool finish_if_last(CopyJob& job) noexcept;  // with the job's lock held
  void free_lane_of(const CopyJob& job) noexcept;

  std::shared_ptr<EventPool> events_;
  const QueueWindow window_;
  std::shared_ptr<StagingRing> ring_;
  const LaneOpened opened_;
  std::size_t descriptor_bytes_;

  std::mutex submitting_;
  std::list<std::shared_ptr<CopyJob>> jobs_[2];  // by class, first come first; the submitter's
  Gone gone_;                                    // the submitter's too
  std::vector<std::unique_ptr<Lane>> lanes_;     // grown by the submitter, under the lock

  mutable std::mutex mutex_;  // over the lanes' counts and incoming_
  std::list<std::shared_ptr<CopyJob>> incoming_;
  std::atomic<std::size_t> waiting_count_{0};
  std::atomic<bool> lost_{false};  // a slice ended with its device
};

}  // namespace kvmem
