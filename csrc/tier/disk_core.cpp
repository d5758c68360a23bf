#include "tier/disk_core.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/check.hpp"
#include "base/error.hpp"

namespace kvmem::detail {

namespace {

double seconds_since(DiskClock::time_point then) {
  return std::chrono::duration<double>(DiskClock::now() - then).count();
}

// The file system is gone or going, whatever the slot.
bool is_of_the_volume(int error) {
  return error == ENOENT || error == ESTALE || error == ENODEV || error == ENXIO ||
         error == ENOTCONN || error == EROFS || error == ENOTDIR;
}

}  // namespace

DiskCore::DiskCore(const DiskOptions& options)
    : options_(options),
      geometry_(DiskGeometry::of(options)),
      calls_(options.workers > 0 ? static_cast<std::size_t>(options.workers) : SIZE_MAX) {
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
  stats_.superseded = scan.superseded;
  stats_.scanned = scan.headers;
  stats_.why_empty = volume_->why_empty();
  generation_ = scan.last_generation;
  found_ = std::move(scan.found);
}

void DiskCore::start() {
  const std::lock_guard lock(mutex_);
  // While some sum a block, which takes a tenth of the time of the calls, others are at these.
  const auto count = static_cast<std::size_t>(options_.workers + options_.workers / 4);
  workers_.resize(count);
  try {
    for (; alive_ < count; ++alive_)
      workers_[alive_].thread =
          std::thread([core = shared_from_this(), n = alive_] { core->work(n); });
  } catch (const std::system_error& error) {
    if (alive_ == 0) throw Error(text("disk tier: cannot start a worker: ", error.what()));
  }
  self_ = shared_from_this();
}

std::vector<FoundSlot> DiskCore::take_found() {
  const std::lock_guard lock(mutex_);
  return std::exchange(found_, {});
}

std::shared_ptr<Volume> DiskCore::volume() const {
  const std::lock_guard lock(mutex_);
  return volume_;
}

// --- the queue
// ------------------------------------------------------------------------------------

DiskSubmit DiskCore::submit(DiskCall& call) {
  {
    const std::lock_guard lock(mutex_);
    const DiskSubmit answer = admit(call);
    if (answer != DiskSubmit::accepted) {
      ++stats_.refused;
      return answer;
    }
    call.queued = DiskClock::now();
    if (!call.reads()) call.header.generation = generation_ + 1;
    std::deque<DiskCall>& queue = call.reads() ? reads_ : writes_;
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
    stats_.peak_queued = std::max(stats_.peak_queued, reads_.size() + writes_.size());
  }
  if (options_.workers == 0)
    work_now();
  else
    work_.notify_one();
  return DiskSubmit::accepted;
}

void DiskCore::work_now() {
  HeaderBlock block;
  DiskCall call;
  {
    const std::lock_guard lock(mutex_);
    std::deque<DiskCall>& queue = reads_.empty() ? writes_ : reads_;
    if (queue.empty()) return;  // another thread has done it
    call = std::move(queue.front());
    queue.pop_front();
  }
  finish(call, execute(call, block));
}

DiskSubmit DiskCore::admit(DiskCall& call) {
  if (closed_) return DiskSubmit::closed;
  const SlotUse& use = slots_[call.slot()];
  if (use.retired) return DiskSubmit::retired;
  if (use.writing || (!call.reads() && use.readers > 0)) return DiskSubmit::busy;
  if (use.readers == UINT16_MAX) return DiskSubmit::full;
  if ((call.reads() ? reads_ : writes_).size() >= options_.max_queued) return DiskSubmit::full;
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
  return static_cast<std::size_t>(
      std::count_if(workers_.begin(), workers_.end(), [](const Worker& w) { return w.busy; }));
}

// One by one, since a list of them would need memory.
std::size_t DiskCore::expire() {
  const auto limit = DiskClock::now() - options_.stall_after;
  for (std::size_t count = 0;; ++count) {
    DiskCall call;
    {
      const std::lock_guard lock(mutex_);
      std::deque<DiskCall>& queue =
          !reads_.empty() && reads_.front().queued <= limit ? reads_ : writes_;
      if (queue.empty() || queue.front().queued > limit) return count;
      call = std::move(queue.front());
      queue.pop_front();
    }
    finish(call, {{DiskOutcome::timed_out, 0, call.header.generation}, {}});
  }
}

// What the caller lent goes home with the callback.
void DiskCore::finish(DiskCall& call, Ended ended) noexcept {
  const DiskDone done = std::exchange(call.done, nullptr);
  {
    const std::lock_guard lock(mutex_);
    settle(call, ended);
  }
  if (done) done(ended.result);
}

// --- the workers
// ----------------------------------------------------------------------------------

void DiskCore::work(std::size_t number) {
  HeaderBlock block;
  DiskCall call;
  while (next(number, call)) {
    finish(call, execute(call, block));
    const std::lock_guard lock(mutex_);
    workers_[number].busy = false;
    if (closed_) quiet_.notify_all();
  }
  const std::lock_guard lock(mutex_);
  --alive_;
  quiet_.notify_all();
}

bool DiskCore::next(std::size_t number, DiskCall& call) {
  std::unique_lock lock(mutex_);
  work_.wait(lock, [&] { return closed_ || !reads_.empty() || !writes_.empty(); });
  if (reads_.empty() && writes_.empty()) return false;
  std::deque<DiskCall>& queue = reads_.empty() ? writes_ : reads_;
  call = std::move(queue.front());
  queue.pop_front();
  workers_[number].busy = true;
  workers_[number].since = DiskClock::now();
  return true;
}

void DiskCore::settle(const DiskCall& call, Ended& ended) noexcept {
  const DiskResult& result = ended.result;
  DiskCounts& counts = call.reads() ? stats_.reads : stats_.writes;
  ++counts.ended[static_cast<std::size_t>(result.outcome)];
  if (result.outcome == DiskOutcome::ok) {
    ++counts.calls;
    counts.bytes += call.header.payload_bytes;
  }
  if (call.reads()) {
    settle_read(result, slots_[call.slot()]);
  } else {
    slots_[call.slot()].writing = false;
    settle_write(call, ended);
  }
}

void DiskCore::settle_read(const DiskResult& result, SlotUse& use) noexcept {
  --use.readers;
  const bool failed = result.outcome == DiskOutcome::io_error;
  if (failed && is_of_the_volume(result.error)) {
    degrade({"reading", result.error, {}});
  } else if (!use.retired && (failed || result.outcome == DiskOutcome::bad_data_sum ||
                              result.outcome == DiskOutcome::bad_header_sum)) {
    use.retired = true;
    ++stats_.retired;
  }
}

void DiskCore::settle_write(const DiskCall& call, Ended& ended) noexcept {
  const DiskResult& result = ended.result;
  if (result.outcome == DiskOutcome::io_error)
    degrade({"writing", result.error, std::move(ended.trouble)});
  if (!call.probe) return;
  probing_ = false;
  next_probe_ = DiskClock::now() + options_.probe_after;
  if (result.outcome == DiskOutcome::ok) trouble_.doing = nullptr;
}

void DiskCore::degrade(Trouble trouble) noexcept {
  if (trouble_.doing == nullptr) ++stats_.degradations;
  trouble_ = std::move(trouble);
  next_probe_ = DiskClock::now() + options_.probe_after;
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
  stats.queued = reads_.size() + writes_.size();
  stats.running = running();
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
  DiskCloseReport report;
  std::deque<DiskCall> reads, writes;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    reads.swap(reads_);
    writes.swap(writes_);
  }
  work_.notify_all();
  for (std::deque<DiskCall>* dropped : {&reads, &writes}) {
    for (DiskCall& call : *dropped)
      finish(call, {{DiskOutcome::closed, 0, call.header.generation}, {}});
  }
  report.dropped = reads.size() + writes.size();

  std::unique_lock lock(mutex_);
  const auto most = std::min<std::chrono::nanoseconds>(within, std::chrono::hours(24));
  if (!quiet_.wait_for(lock, most, [&] { return running() == 0; })) {
    report.running = running();
    return report;
  }
  quiet_.wait(lock, [&] { return alive_ == 0; });  // they find nothing more to do
  std::vector<Worker> ended = std::exchange(workers_, {});
  const std::shared_ptr<Volume> volume = std::exchange(volume_, nullptr);
  const std::shared_ptr<DiskCore> last = std::exchange(self_, nullptr);
  lock.unlock();
  for (Worker& worker : ended) {
    if (worker.thread.joinable()) worker.thread.join();
  }
  if (volume && options_.sync == DiskSync::on_close) report.sync_error = volume->sync_all();
  return report;
}

void DiskCore::abandon() noexcept {
  const std::lock_guard lock(mutex_);
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.detach();
  }
  self_.reset();
}

}  // namespace kvmem::detail
