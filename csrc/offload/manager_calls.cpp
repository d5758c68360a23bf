// The manager's calls beside the data path: reports, statistics, drain, rebind, close.
#include <algorithm>
#include <thread>

#include "base/check.hpp"
#include "offload/manager.hpp"

namespace kvmem {

namespace {

void count(DirectionStats& stats, const TimelineRecord& ended) noexcept {
  const bool done = ended.state == TransferState::done;
  ++(done ? stats.done : ended.state == TransferState::failed ? stats.failed : stats.cancelled);
  if (done) {
    stats.blocks_done += ended.blocks;
    stats.bytes_done += ended.bytes;
    if (ended.staged) stats.bytes_staged += ended.bytes;
  }
  if (ended.submitted < 0) return;
  const auto delay_us = static_cast<std::uint64_t>((ended.submitted - ended.requested) / 1000);
  stats.queue_delay_total_us += delay_us;
  stats.queue_delay_max_us = std::max(stats.queue_delay_max_us, delay_us);
  stats.guard_wait_total_us +=
      static_cast<std::uint64_t>((ended.observed - ended.submitted) / 1000);
}

}  // namespace

void Manager::record(const TransferJob& job, TransferState state, Nanoseconds observed,
                     const CopyQueue::Times& times) noexcept {
  const TimelineRecord entry{job.id,
                             job.kind,
                             job.priority(),
                             state,
                             job.staged(),
                             job.device_blocks.size(),
                             job.batch().bytes(),
                             job.requested,
                             job.submitted_at(),
                             times.started,
                             times.completed,
                             observed,
                             -1,
                             job.checked};
  std::shared_ptr<Event> first_use;
  {
    const std::lock_guard lock(mutex_);
    count(side(job.batch().direction()).stats, entry);
    first_use = job.first_use;
  }
  timeline_.add(entry, std::move(first_use));
}

std::vector<Report> Manager::poll() {
  mark_.expect_same_process("the manager");
  runtime_->advance();
  std::vector<Report> reports;
  {
    const std::lock_guard lock(mutex_);
    reports.assign(std::make_move_iterator(reports_.begin()),
                   std::make_move_iterator(reports_.end()));
    reports_.clear();  // and keeps its room
  }
  report_places_.give_back(reports.size());
  return reports;
}

std::vector<BlockId> Manager::busy(std::span<const BlockId> blocks) const {
  mark_.expect_same_process("the manager");
  const std::lock_guard lock(mutex_);
  layout_->expect_blocks(blocks, false);
  std::vector<BlockId> used;
  for (const BlockId block : blocks) {
    if (device_uses_.in_use(static_cast<std::size_t>(block))) used.push_back(block);
  }
  return used;
}

ManagerStats Manager::stats() const {
  mark_.expect_same_process("the manager");
  ManagerStats stats;
  for (std::size_t i = 0; i < sides_.size(); ++i) {
    const Side& each = sides_[i];
    DirectionStats& direction = stats.directions[i];
    {
      const std::lock_guard lock(mutex_);
      direction = each.stats;
    }
    const CopyQueue::InFlight in_flight = each.queue->in_flight();
    direction.active = direction.accepted - direction.done - direction.failed - direction.cancelled;
    direction.waiting = each.queue->waiting();
    direction.queued_bytes = each.bytes->taken();
    direction.window_bytes = in_flight.bytes;
    direction.window_descriptors = in_flight.descriptors;
    direction.lanes_owned = in_flight.lanes_owned;
    stats.waiters += each.bytes->waiting() + each.transfers->waiting();
  }
  stats.waiters += report_places_.waiting();
  stats.reports_taken = report_places_.taken();
  if (checksums_) stats.checksum = checksums_->stats();
  const std::lock_guard lock(mutex_);
  stats.restoration_slots = device_uses_.written();
  stats.reports_waiting = reports_.size();
  stats.smallest_segment_bytes = layout_->smallest_segment_bytes();
  return stats;
}

std::vector<TimelineRecord> Manager::timeline() {
  mark_.expect_same_process("the manager");
  return timeline_.read();
}

CancelOutcome Manager::cancel(TransferJob& job) noexcept {
  switch (side(job).queue->drop(job)) {
    case CopyQueue::Dropped::too_late:
      // Another thread is between the last end and the terminal state: a few stores, no device to
      // wait for.
      while (!is_terminal(job.ended.load())) std::this_thread::yield();
      return CancelOutcome::already_done;
    case CopyQueue::Dropped::draining: {
      // The owner is gone; the copy still holds them. Let go of outside the lock.
      HostBlocks unwanted;
      const std::lock_guard lock(mutex_);
      unwanted = std::move(job.result);
      return CancelOutcome::draining;
    }
    case CopyQueue::Dropped::finished:
      break;
  }
  if (job.has_checks()) checksums_->withdraw(job);
  const bool submitted = job.begun();  // and all of that has been observed to end
  finish(job);
  // The queue lets go of it: until then it would keep its manager alive.
  submit_some(side(job), Turn::skip);
  // What ran behind it, or wants its lane, may be of another side or manager: somebody is to look.
  runtime_->device().progress().bump();
  return submitted ? CancelOutcome::draining : CancelOutcome::not_submitted;
}

bool Manager::drain(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt) {
  mark_.expect_same_process("the manager");
  const auto deadline = runtime_->deadline_after(timeout_seconds);
  const auto quiet = [this] {  // also no call that is just being accepted
    const std::lock_guard lock(mutex_);
    return active_.empty() && claims_.empty() && gate_.empty();
  };
  return runtime_->wait_until(quiet, deadline, interrupt);
}

void Manager::rebind(KVLayout layout) {
  const auto pass = enter();
  const std::lock_guard lock(mutex_);
  if (!claims_.empty())
    throw Busy("rebind needs a drained manager: device blocks are claimed for transfers to come",
               claims_.front()->blocks_.empty() ? -1 : *claims_.front()->blocks_.begin(), 0);
  if (!active_.empty()) {
    const auto& [id, job] = *active_.begin();
    throw Busy(text("rebind needs a drained manager: ", active_.size(),
                    " transfers are unfinished, one is ", id),
               job->device_blocks.front(), id);
  }
  auto differing = layout_->geometry_differences(layout);
  if (!differing.empty()) {
    const std::string first = differing.front();
    throw Incompatible(text("rebind needs equal geometry: ", first), std::move(differing));
  }
  layout_ = std::make_shared<const KVLayout>(std::move(layout));
}

CloseReport Manager::close(std::optional<double> timeout_seconds,
                           const Runtime::Interrupt& interrupt) {
  mark_.expect_same_process("the manager");
  gate_.close();
  for (Side& each : sides_) {
    each.bytes->close();
    each.transfers->close();
  }
  report_places_.close();

  CloseReport report;
  report.quiet = drain(timeout_seconds, interrupt);
  if (!report.quiet) {
    std::vector<std::shared_ptr<TransferJob>> left;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [id, job] : active_) left.push_back(job);
    }
    for (const auto& job : left) {
      if (cancel(*job) != CancelOutcome::already_done) ++report.cancelled;
    }
  }
  std::unique_ptr<Runtime::ReaperLease> lease;  // dropped outside the lock: it waits for the thread
  {
    const std::lock_guard lock(mutex_);
    report.in_flight = active_.size();
    if (active_.empty()) lease = std::move(reaper_);
  }
  lease.reset();
  if (report.in_flight == 0 && checksums_) checksums_->stop();
  report.slots = pool_->stats().slots;
  return report;
}

}  // namespace kvmem
