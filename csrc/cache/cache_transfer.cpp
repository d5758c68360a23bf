#include "cache/cache_transfer.hpp"

#include <algorithm>

#include "cache/cache.hpp"

namespace kvmem {

namespace {

// Of a layout that lacks that stage, the last one before it; nothing when there is none.
std::optional<std::int64_t> stage_until(const KVLayout& layout, std::int64_t stage) {
  const auto behind = std::ranges::upper_bound(layout.stages(), stage);
  if (behind == layout.stages().begin()) return std::nullopt;
  return *std::prev(behind);
}

}  // namespace

void CacheTransfer::expect_done() const {
  switch (job_->ended.load()) {
    case TransferState::done:
      return;
    case TransferState::cancelled:
      throw Cancelled(text(name_of(job_->kind), " ", job_->id, " was cancelled"));
    case TransferState::failed:
      std::rethrow_exception(job_->error);
    default:
      throw NotDone(text(name_of(job_->kind), " ", job_->id, " has not ended"));
  }
}

void CacheTransfer::wait(std::optional<double> timeout_seconds,
                         const Runtime::Interrupt& interrupt) {
  job_->cache->mark_.expect_same_process("the transfer");
  Runtime& runtime = *job_->cache->runtime();
  const auto deadline = runtime.deadline_after(timeout_seconds);
  if (!runtime.wait_until([this] { return done(); }, deadline, interrupt)) {
    throw TimedOut(timeout_seconds ? text(name_of(job_->kind), " ", job_->id,
                                          " had not ended after ", *timeout_seconds, " s")
                                   : text(name_of(job_->kind), " ", job_->id,
                                          " had not ended when the process began to exit"),
                   {});
  }
  expect_done();
}

CancelOutcome CacheTransfer::cancel() {
  job_->cache->mark_.expect_same_process("the transfer");
  if (done()) return CancelOutcome::already_done;
  job_->cancelled = true;
  job_->cache->move_on();
  // It may go on without us for a moment: who waits for its end looks at state().
  return done() && !job_->begun ? CancelOutcome::not_submitted : CancelOutcome::draining;
}

void CacheTransfer::wait_on(StreamHandle stream, std::optional<std::int64_t> stage,
                            const Runtime::Interrupt& interrupt) {
  job_->cache->mark_.expect_same_process("the transfer");
  Runtime& runtime = *job_->cache->runtime();
  static_cast<void>(runtime.device().stream_id(stream));  // the check
  std::vector<std::pair<GroupIndex, std::shared_ptr<Transfer>>> transfers;
  std::exception_ptr error;
  const auto submitted = [&] {
    const std::lock_guard lock(job_->mutex);
    error = job_->error;
    if (done() || error) return true;
    return !job_->waits_for_keys && std::ranges::all_of(job_->parts, [](const CachePart& part) {
      return part.state >= CachePart::State::submitted;
    });
  };
  if (!submitted() && !runtime.wait_until(submitted, std::nullopt, interrupt)) {
    throw NotDone(
        text(name_of(job_->kind), " ", job_->id, " was not submitted and the process is exiting"));
  }
  if (error) std::rethrow_exception(error);
  if (job_->state() == TransferState::cancelled) expect_done();
  {
    const std::lock_guard lock(job_->mutex);
    if (job_->error) std::rethrow_exception(job_->error);  // meanwhile
    for (const CachePart& part : job_->parts) {
      if (part.transfer) transfers.emplace_back(part.group, part.transfer);
    }
  }
  for (const auto& [group, transfer] : transfers) {
    std::optional<std::int64_t> its = stage;
    if (stage) its = stage_until(*job_->cache->groups_[group].manager->layout(), *stage);
    if (!stage || its) transfer->wait_on(stream, its, interrupt);
  }
}

std::vector<std::size_t> CacheTransfer::failed_positions() const {
  if (job_->kind == CacheKind::store || !done()) return {};
  std::vector<std::size_t> failed;
  const std::lock_guard lock(job_->mutex);
  for (const CachePart& part : job_->parts) {
    if (!part.ok) failed.insert(failed.end(), part.positions.begin(), part.positions.end());
  }
  // Of one that was cancelled or never began nothing counts as there.
  const TransferState end = job_->ended.load();
  const bool nothing =
      end == TransferState::cancelled || (end == TransferState::failed && job_->parts.empty());
  const std::size_t all = job_->key_bytes == 0 ? 0 : job_->keys.size() / job_->key_bytes;
  for (std::size_t i = nothing ? 0 : job_->length.load(); i < all; ++i) failed.push_back(i);
  std::ranges::sort(failed);
  const auto rest = std::ranges::unique(failed);
  failed.erase(rest.begin(), rest.end());
  return failed;
}

std::span<const std::byte> CacheTransfer::key(std::size_t position) const {
  return job_->key_span(position);
}

void CacheTransfer::wake(std::shared_ptr<WakeList> list, std::uint64_t token) {
  job_->cache->mark_.expect_same_process("the transfer");
  Waker waker(std::move(list), token);
  {
    const std::lock_guard lock(job_->mutex);
    if (!done()) {
      job_->wakers.push_back(std::move(waker));
      return;
    }
  }
  waker.fire();
}

void CacheTransfer::unwake(const std::shared_ptr<WakeList>& list, std::uint64_t token) {
  if (job_->cache->mark_.must_leak()) return;
  const std::lock_guard lock(job_->mutex);
  std::erase_if(job_->wakers, [&](const Waker& waker) { return waker.is(list, token); });
}

}  // namespace kvmem
