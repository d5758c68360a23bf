#include "offload/transfer.hpp"

#include "offload/manager.hpp"

namespace kvmem {

Transfer::~Transfer() {
  if (job_->manager->mark_.must_leak()) return;
  HostBlocks unwanted;  // let go of outside the lock
  const std::lock_guard lock(job_->manager->mutex_);
  unwanted = std::move(job_->result);
}

void Transfer::wait(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt) {
  job_->manager->mark_.expect_same_process("the transfer");
  Runtime& runtime = *job_->manager->runtime();
  const auto deadline = runtime.deadline_after(timeout_seconds);
  if (!runtime.wait_until([this] { return done(); }, deadline, interrupt)) {
    throw TimedOut(
        timeout_seconds
            ? text("transfer ", job_->id, " had not ended after ", *timeout_seconds, " s")
            : text("transfer ", job_->id, " had not ended when the process began to exit"),
        {});
  }
  expect_done();
}

void Transfer::expect_done() const {
  switch (job_->ended.load()) {
    case TransferState::done:
      return;
    case TransferState::cancelled:
      throw Cancelled(text("transfer ", job_->id, " was cancelled"));
    case TransferState::failed:
      std::rethrow_exception(job_->error);
    default:
      throw NotDone(text("transfer ", job_->id, " has not ended"));
  }
}

std::shared_ptr<HostCopy> Transfer::result() {
  job_->manager->mark_.expect_same_process("the transfer");
  // It may have ended and only not been asked yet: a caller who saw a later end counts on that.
  if (!done()) job_->manager->runtime()->catch_up();
  expect_done();
  if (job_->kind == TransferKind::restore) return nullptr;
  const std::lock_guard lock(job_->manager->mutex_);
  if (!copy_) copy_ = std::make_shared<HostCopy>(job_->layout, std::move(job_->result));
  return copy_;
}

CancelOutcome Transfer::cancel() {
  job_->manager->mark_.expect_same_process("the transfer");
  return job_->manager->cancel(*job_);
}

void Transfer::wait_on(StreamHandle stream, std::optional<std::int64_t> stage,
                       const Runtime::Interrupt& interrupt) {
  Manager& manager = *job_->manager;
  manager.mark_.expect_same_process("the transfer");
  Device& device = manager.runtime()->device();
  static_cast<void>(device.stream_id(stream));  // the check
  const std::size_t stages = job_->batch().stage_ends().size();
  const std::size_t wanted = stage ? job_->layout->stage_index(*stage) : stages - 1;
  const std::size_t index = std::min(wanted, stages - 1);  // an offload is one stage

  CopyQueue::StagePoint point;
  const auto settled = [&] {
    point = CopyQueue::stage_point(*job_, index);
    return point.submitted || job_->all_submitted();
  };
  CopyQueue::hurry(*job_);
  if (!settled() && !manager.runtime()->wait_until(settled, std::nullopt, interrupt)) {
    throw NotDone(text("transfer ", job_->id, " was not submitted and the process is exiting"));
  }

  if (const auto error = CopyQueue::error(*job_)) std::rethrow_exception(error);
  if (job_->cancelled()) throw Cancelled(text("transfer ", job_->id, " was cancelled"));
  point = CopyQueue::stage_point(*job_, index);
  if (point.event) device.wait(stream, point.event->handle());
  if (!manager.config_.timeline) return;
  try {
    auto first_use = std::make_shared<Event>(manager.events_->acquire());
    first_use->record(stream);
    {
      const std::lock_guard lock(manager.mutex_);
      if (!job_->first_use) job_->first_use = first_use;
    }
    manager.timeline_.note_first_use(job_->id, std::move(first_use));  // where it has ended already
  } catch (...) {  // the wait was made: measuring never fails a transfer
  }
}

void Transfer::wake(std::shared_ptr<WakeList> list, std::uint64_t token) {
  job_->manager->mark_.expect_same_process("the transfer");
  Waker waker(std::move(list), token);
  {
    const std::lock_guard lock(job_->manager->mutex_);
    if (!done()) {
      job_->wakers.push_back(std::move(waker));
      return;
    }
  }
  waker.fire();
}

void Transfer::unwake(const std::shared_ptr<WakeList>& list, std::uint64_t token) {
  if (job_->manager->mark_.must_leak()) return;
  const std::lock_guard lock(job_->manager->mutex_);
  std::erase_if(job_->wakers, [&](const Waker& waker) { return waker.is(list, token); });
}

}  // namespace kvmem
