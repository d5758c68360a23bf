// What the queue and its jobs tell of themselves.
#include "copy/copy_queue.hpp"

namespace kvmem {

CopyJob::CopyJob(CopyBatch batch, Priority priority, Events after, Jobs behind, bool staged)
    : batch_(std::make_shared<KeptBatch>(std::move(batch))),
      priority_(priority),
      staged_(staged),
      after_(std::move(after)),
      unsubmitted_(behind),
      behind_(std::move(behind)),
      stage_events_(batch_->stage_ends().size()) {}

CopyJob::Jobs CopyJob::behind() const {
  const std::lock_guard lock(mutex_);
  return behind_;
}

bool CopyJob::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

CopyQueue::StagePoint CopyQueue::stage_point(const CopyJob& job, std::size_t stage) {
  const std::lock_guard lock(job.mutex_);
  if (job.finished_) return {true, nullptr};
  return {job.stage_events_[stage] != nullptr, job.stage_events_[stage]};
}

std::exception_ptr CopyQueue::error(const CopyJob& job) {
  const std::lock_guard lock(job.mutex_);
  return job.error_;
}

bool CopyQueue::begin_check(CopyJob& job) noexcept {
  const std::lock_guard lock(job.mutex_);
  if (job.finished_ || job.dropped_ || !job.unchecked_.load() || job.in_flight_ > 0) return false;
  const bool offload = job.batch_->direction() == Direction::to_host;
  if (offload && !job.all_submitted_.load()) return false;
  ++job.in_flight_;
  return true;
}

bool CopyQueue::end_check(CopyJob& job, std::exception_ptr error) noexcept {
  const std::lock_guard lock(job.mutex_);
  --job.in_flight_;
  job.unchecked_.store(false);
  if (error && !job.dropped_) {
    job.error_ = std::move(error);
    job.dropped_ = true;
    job.all_submitted_.store(true);
  }
  return finish_if_last(job);
}

CopyQueue::Times CopyQueue::settle(CopyJob& job) noexcept {
  Times times;
  CopyJob::Events ended;  // let go of outside the lock: events call the device when they die
  CopyJob::Jobs behind;
  std::shared_ptr<Event> started, last;
  bool failed = false;
  {
    const std::lock_guard lock(job.mutex_);
    failed = job.error_ != nullptr;
    ended.swap(job.stage_events_);
    behind.swap(job.behind_);
    started.swap(job.started_event_);
    last.swap(job.last_event_);
  }
  if (!started || !last || failed) return times;
  try {
    times = {started->reached_at(), last->reached_at()};
  } catch (...) {
    times = {};  // measuring never fails a transfer
  }
  return times;
}

CopyQueue::InFlight CopyQueue::in_flight() const {
  const std::lock_guard lock(mutex_);
  InFlight sum;
  for (const auto& lane : lanes_) {
    sum.bytes += lane->bytes;
    sum.descriptors += lane->descriptors;
    if (lane->owner != nullptr) ++sum.lanes_owned;
  }
  return sum;
}

}  // namespace kvmem
