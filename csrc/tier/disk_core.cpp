#include "tier/disk_core.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/check.hpp"
#include "base/error.hpp"
#include "base/signals.hpp"

namespace kvmem::detail {

namespace {

double seconds_since(DiskClock::time_point then) {
  return std::chrono::duration<double>(DiskClock::now() - then).count();
}

// A relative path follows the program when it changes its folder: another tier would be made there.
DiskOptions with_whole_path(DiskOptions options) {
  if (options.path.empty()) return options;  // which is refused
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(options.path, error);
  if (error)
    throw Error(text("disk tier: cannot tell where ", options.path, " is: ", error.message()));
  options.path = whole.string();
  return options;
}

}  // namespace

DiskCore::DiskCore(const DiskOptions& options)
    : options_(with_whole_path(options)), geometry_(DiskGeometry::of(options)) {
  const auto begin = DiskClock::now();
  volume_ = Volume::open(options_, geometry_);
  slots_.resize(geometry_.slots);
  const auto scan_begin = DiskClock::now();
  SlotScan scan = scan_slots(*volume_, options_);
  stats_.scan_seconds = seconds_since(scan_begin);
  stats_.open_seconds = seconds_since(begin);
  for (const SlotIndex slot : scan.unreadable) slots_[slot].retired = true;
  stats_.retired = scan.unreadable.size();
  stats_.slots = geometry_.slots;
  stats_.slot_bytes = geometry_.slot_bytes;
  stats_.recovered = scan.found.size();
  stats_.superseded = scan.superseded.size();
  stats_.scanned = scan.headers;
  stats_.why_empty = volume_->why_empty();
  generation_ = scan.last_generation;
  found_ = std::move(scan.found);
  superseded_ = std::move(scan.superseded);
}

void DiskCore::start() {
  const std::lock_guard lock(mutex_);
  // While some sum a block, which takes a fourth of the time of a call, others are at these.
  const auto count = static_cast<std::size_t>(options_.workers + (options_.workers + 3) / 4);
  workers_.resize(count);
  const SignalsBlocked blocked;
  try {
    for (; alive_ < count; ++alive_)
      workers_[alive_].thread =
          std::thread([core = shared_from_this(), n = alive_] { core->work(n); });
  } catch (const std::exception& error) {  // of the system, or no memory
    if (alive_ == 0) throw Error(text("disk tier: cannot start a worker: ", error.what()));
  }
  self_ = shared_from_this();
}

std::vector<FoundSlot> DiskCore::take_found() {
  const std::lock_guard lock(mutex_);
  return std::exchange(found_, {});
}

std::vector<FoundSlot> DiskCore::take_superseded() {
  const std::lock_guard lock(mutex_);
  return std::exchange(superseded_, {});
}

// --- the queue
// ------------------------------------------------------------------------------------

DiskSubmit DiskCore::submit(DiskCall& call) {
  DiskCalls now;
  std::shared_ptr<DiskCore> self;  // outlives the call, whoever destroys the tier beside it
  bool more = false;
  {
    const std::lock_guard lock(mutex_);
    const DiskSubmit answer = admit(call);
    if (answer != DiskSubmit::accepted) {
      ++stats_.refused;
      return answer;
    }
    call.queued = DiskClock::now();
    if (!call.reads()) call.header.generation = generation_ + 1;
    DiskCalls& queue = options_.workers == 0   ? now
                       : call.reads()          ? reads_
                       : is_summed_apart(call) ? unsummed_
                                               : writes_;
    queue.push_back(std::move(call));  // may throw; nothing has changed by then
    const DiskCall& taken = queue.back();
    SlotUse& use = slots_[taken.slot()];
    if (taken.reads()) {
      ++use.readers;
    } else {
      use.writing = true;
      ++generation_;
      probing_ |= taken.probe;
    }
    stats_.peak_queued = std::max(stats_.peak_queued, reads_.size() + writes_waiting());
    more = is_more_ready();
    if (!now.empty()) {
      self = shared_from_this();
      ++callers_;
    }
  }
  if (!now.empty()) work_now(now);
  if (more) work_.notify_one();
  return DiskSubmit::accepted;
}

// By the calling thread.
void DiskCore::work_now(DiskCalls& one) {
  HeaderBlock block;
  Ended ended = move(one.front(), block);
  finish(one.front(), std::move(ended));
}

DiskSubmit DiskCore::admit(DiskCall& call) {
  if (closed_) return DiskSubmit::closed;
  const SlotUse& use = slots_[call.slot()];
  if (use.retired && call.kind != DiskCall::Kind::erase) return DiskSubmit::retired;
  if (use.writing || (!call.reads() && use.readers > 0)) return DiskSubmit::busy;
  if (use.readers == UINT16_MAX) return DiskSubmit::full;
  const std::size_t waiting = call.reads() ? reads_.size() : writes_waiting();
  if (waiting >= options_.max_queued) return DiskSubmit::full;
  if (is_stalled()) return DiskSubmit::degraded;
  if (call.reads() || trouble_.doing == nullptr) return DiskSubmit::accepted;
  if (probing_ || DiskClock::now() < next_probe_) return DiskSubmit::degraded;
  call.probe = true;
  return DiskSubmit::accepted;
}

bool DiskCore::is_stalled() const {
  const auto now = DiskClock::now();
  return std::any_of(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    return worker.busy && now - worker.since >= options_.stall_after;
  });
}

std::size_t DiskCore::running() const {
  const auto busy =
      std::count_if(workers_.begin(), workers_.end(), [](const Worker& w) { return w.busy; });
  return static_cast<std::size_t>(busy) + unverified_.size() + callers_ + (syncing_ ? 1 : 0);
}

// For their turn at the disk.
std::size_t DiskCore::writes_waiting() const {
  return writes_.size() + summed_.size() + unsummed_.size() + summing_;
}

std::size_t DiskCore::expire() {
  const auto limit = DiskClock::now() - options_.stall_after;
  const auto is_late = [&](const DiskCall& call) { return call.queued <= limit; };
  for (std::size_t count = 0;; ++count) {
    DiskCalls one;
    {
      const std::lock_guard lock(mutex_);
      for (DiskCalls* const queue : {&reads_, &writes_, &summed_, &unsummed_}) {
        const auto late = std::ranges::find_if(*queue, is_late);
        if (late == queue->end()) continue;
        one.splice(one.begin(), *queue, late);
        ++callers_;
        break;
      }
    }
    if (one.empty()) return count;
    finish(one.front(), {{DiskOutcome::timed_out, 0, 0}, {}});
  }
}

void DiskCore::finish(DiskCall& call, Ended ended) noexcept {
  {
    const std::lock_guard lock(mutex_);
    settle(call, ended);
  }
  tell(call, ended.result);
  const std::lock_guard lock(mutex_);
  --callers_;
  quiet_.notify_all();
}

// What the caller lent goes home with the callback.
void DiskCore::tell(DiskCall& call, DiskResult result) noexcept {
  result.generation = call.header.generation;
  if (const DiskDone done = std::exchange(call.done, nullptr)) done(result);
}

// --- the workers
// ----------------------------------------------------------------------------------

void DiskCore::work(std::size_t number) {
  HeaderBlock block;
  for (DiskStep step; next(number, step);) take(step, block);
  const std::lock_guard lock(mutex_);
  --alive_;
  quiet_.notify_all();
}

bool DiskCore::next(std::size_t number, DiskStep& step) {
  std::unique_lock lock(mutex_);
  Worker& self = workers_[number];
  while (!begin(step)) {
    self.busy = false;
    if (closed_) {
      quiet_.notify_all();
      return false;
    }
    work_.wait(lock);
  }
  self.busy = true;
  self.since = DiskClock::now();
  const bool more = is_more_ready();
  lock.unlock();
  if (more) work_.notify_one();
  return true;
}

// The disk comes first: it is what everybody waits for. But what was read does not wait for it, and
// reading stops where too much is to be verified.
DiskCalls* DiskCore::ready(DiskStep::Kind& kind) {
  const auto most = static_cast<std::size_t>(options_.workers);
  kind = DiskStep::Kind::move;
  const bool others_verify = unverified_.empty() || moving_ + 1 < alive_;
  if (moving_ < most && unverified_.size() <= most && others_verify) {
    if (!reads_.empty()) return &reads_;
    if (DiskCalls& writes = next_write(); !writes.empty()) return &writes;
  }
  kind = DiskStep::Kind::sum;
  if (!unverified_.empty()) return &unverified_;
  return unsummed_.empty() || !may_sum_write() ? nullptr : &unsummed_;
}

// Neither kind waits for the last of the other.
DiskCalls& DiskCore::next_write() {
  if (summed_.empty()) return writes_;
  if (writes_.empty()) return summed_;
  return writes_.front().queued <= summed_.front().queued ? writes_ : summed_;
}

bool DiskCore::may_sum_write() const {
  constexpr std::size_t ahead = 2;
  const auto most = static_cast<std::size_t>(options_.workers);
  const bool disk_is_at_work = moving_ > 0 && 4 * moving_ >= most;
  return summed_.size() < ahead && summing_ < (disk_is_at_work ? 1 : most - moving_);
}

bool DiskCore::begin(DiskStep& step) {
  DiskCalls* const from = ready(step.kind);
  if (from == nullptr) return false;
  step.one.splice(step.one.begin(), *from, from->begin());
  if (step.kind == DiskStep::Kind::move) ++moving_;
  if (from == &unsummed_) ++summing_;
  return true;
}

bool DiskCore::is_more_ready() {
  DiskStep::Kind kind;
  return ready(kind) != nullptr;
}

void DiskCore::take(DiskStep& step, HeaderBlock& block) noexcept {
  DiskCall& call = step.one.front();
  const bool moves = step.kind == DiskStep::Kind::move;
  Ended ended = moves ? move(call, block) : Ended{sum(call), {}};
  bool goes_on =
      ended.result.outcome == DiskOutcome::ok && is_summed_apart(call) && call.reads() == moves;
  {
    const std::lock_guard lock(mutex_);
    if (moves) --moving_;
    if (!moves && !call.reads()) --summing_;
    if (goes_on && !moves && closed_) {  // it waits for its turn like those that close() drops
      ended.result = {DiskOutcome::closed, 0, 0};
      goes_on = false;
    }
    if (goes_on) {
      DiskCalls& next = moves ? unverified_ : summed_;
      next.splice(next.end(), step.one);
      return;
    }
    settle(call, ended);
  }
  tell(call, ended.result);
  step.one.clear();
}

// --- the end
// --------------------------------------------------------------------------------------

bool DiskCore::is_retired(SlotIndex slot) const {
  const std::lock_guard lock(mutex_);
  return slots_[slot].retired;
}

DiskStats DiskCore::stats() const {
  const std::lock_guard lock(mutex_);
  DiskStats stats = stats_;
  stats.queued = reads_.size() + writes_waiting();
  stats.running = running() - summing_;
  if (trouble_.doing != nullptr) {
    stats.degraded = trouble_.words.empty()
                         ? text(trouble_.doing, ": ", std::strerror(trouble_.error))
                         : trouble_.words;
  } else if (is_stalled()) {
    stats.degraded = "a call to the file system does not come back";
  }
  if (volume_) {
    stats.direct = volume_->direct();
    stats.why_not_direct = volume_->why_not_direct();
  }
  return stats;
}

DiskCloseReport DiskCore::close(std::chrono::nanoseconds within) {
  constexpr std::chrono::nanoseconds day = std::chrono::hours(24);
  const auto deadline = DiskClock::now() + std::min(within, day);
  DiskCloseReport report;
  DiskCalls dropped;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (DiskCalls* const queue : {&reads_, &writes_, &summed_, &unsummed_})
      dropped.splice(dropped.end(), *queue);
    callers_ += dropped.size();
  }
  work_.notify_all();
  for (DiskCall& call : dropped) finish(call, {{DiskOutcome::closed, 0, 0}, {}});
  report.dropped = dropped.size();

  std::unique_lock lock(mutex_);
  if (!quiet_.wait_until(lock, deadline, [&] { return running() == 0; })) {
    report.running = running();
    return report;
  }
  quiet_.wait(lock, [&] { return alive_ == 0; });  // they find nothing more to do
  std::vector<Worker> ended = std::exchange(workers_, {});
  std::shared_ptr<Volume> volume = std::exchange(volume_, nullptr);
  const std::shared_ptr<DiskCore> last = std::exchange(self_, nullptr);
  const bool syncs = volume && options_.sync == DiskSync::on_close;
  syncing_ |= syncs;
  lock.unlock();
  for (Worker& worker : ended) {
    if (worker.thread.joinable()) worker.thread.join();
  }
  if (syncs) sync_beside(std::move(volume));
  volume.reset();
  lock.lock();
  quiet_.wait_until(lock, deadline, [&] { return running() == 0; });
  report.running = running();
  report.sync_error = sync_error_;
  return report;
}

// By a thread of its own, for which close() waits no longer than it may.
void DiskCore::sync_beside(std::shared_ptr<Volume> volume) {
  const auto given = std::make_shared<std::shared_ptr<Volume>>(std::move(volume));
  const auto sync = [core = shared_from_this(), given] {
    const int error = (*given)->sync_all();
    given->reset();  // and the folder is free
    const std::lock_guard lock(core->mutex_);
    core->sync_error_ = error;
    core->syncing_ = false;
    core->quiet_.notify_all();
  };
  const SignalsBlocked blocked;
  try {
    std::thread(sync).detach();
  } catch (const std::exception&) {  // no thread to be had: then it takes what it takes
    sync();
  }
}

void DiskCore::abandon() noexcept {
  const std::lock_guard lock(mutex_);
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.detach();
  }
  self_.reset();
}

}  // namespace kvmem::detail
