#include "offload/checksums.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "base/crc32c.hpp"
#include "base/signals.hpp"
#include "offload/transfer.hpp"

namespace kvmem {

namespace {

constexpr std::size_t bytes_at_a_time = std::size_t{1} << 20;
// A worker looks at the offloads first as often, so that they end whatever is restored.
constexpr std::uint64_t offloads_first_every = 8;

std::exception_ptr corrupt(std::size_t position, SlotIndex slot, std::uint32_t expected,
                           std::uint32_t found) noexcept {
  try {
    throw Corrupt(position, slot, expected, found);
  } catch (...) {  // without memory for the message it is bad_alloc
    return std::current_exception();
  }
}

}  // namespace

// ---- what the manager and the threads share ----

class Checksums::Core {
 public:
  explicit Core(std::shared_ptr<BlockPool> pool)
      : device_(pool->device()),
        pool_(std::move(pool)),
        at_a_time_(std::max<std::size_t>(bytes_at_a_time / pool_->block_bytes(), 1)) {}

  void open(const std::shared_ptr<Core>& self, std::size_t workers);
  void work() noexcept;
  void work_all() noexcept;  // by the caller itself
  void close() noexcept;

  void add(const std::shared_ptr<TransferJob>& job) noexcept;
  void withdraw(TransferJob& job) noexcept;
  [[nodiscard]] std::shared_ptr<TransferJob> take_ended() noexcept;
  [[nodiscard]] bool has_ended() const noexcept { return ended_count_.load() > 0; }
  [[nodiscard]] ChecksumStats stats() const;

 private:
  using Jobs = std::list<TransferJob*>;
  struct Found {  // in some of a job's blocks
    std::uint64_t summed = 0, verified = 0, corrupt = 0;
    std::size_t bad_position = 0;
    std::exception_ptr error;
    bool cancelled = false;
    Nanoseconds busy = 0;
  };

  [[nodiscard]] bool work_some(std::unique_lock<std::mutex>& lock) noexcept;
  [[nodiscard]] TransferJob* next_job() noexcept;  // with the lock, like all up to check()
  [[nodiscard]] std::span<const BlockCheck> take_some(TransferJob& job) noexcept;
  [[nodiscard]] bool settle(TransferJob& job, Found& found) noexcept;  // whether that ended it
  void leave(TransferJob& job, Jobs& list) noexcept;
  [[nodiscard]] Jobs& waiting_with(const TransferJob& job) noexcept {
    return job.kind == TransferKind::restore ? verifying_ : summing_;
  }
  [[nodiscard]] Found check(const TransferJob& job, std::span<const BlockCheck> blocks) noexcept;
  void check_one(const TransferJob& job, const BlockCheck& check, Found& found) noexcept;

  // None once it is closed.
  std::shared_ptr<Device> device_;
  std::shared_ptr<BlockPool> pool_;
  const std::size_t at_a_time_;  // blocks

  mutable std::mutex mutex_;  // over what follows; CopyQueue::begin_check() is below it
  std::condition_variable work_, worker_ended_;
  Jobs verifying_, summing_;  // with blocks that no worker has taken
  Jobs ended_;
  std::atomic<std::size_t> ended_count_{0};
  std::uint64_t turns_ = 0;
  std::size_t alive_ = 0;
  bool closed_ = false;
  ChecksumStats stats_;
  Nanoseconds busy_ = 0;
};

void Checksums::Core::open(const std::shared_ptr<Core>& self, std::size_t workers) {
  const SignalsBlocked blocked;
  const std::lock_guard lock(mutex_);
  try {
    // Detached: they hold the core, and nobody may join a thread while the process ends.
    for (; alive_ < workers; ++alive_) std::thread([self] { self->work(); }).detach();
  } catch (const std::system_error& error) {
    if (alive_ == 0) throw Error(text("cannot start a checksum worker: ", error.what()));
  } catch (const std::bad_alloc&) {
    if (alive_ == 0) throw;
  }
}

// A thread has its share of the core until a moment after it has said that it ends. Neither the
// pool nor the device must end there: the process may be at its exit by then, where both are
// leaked.
void Checksums::Core::close() noexcept {
  std::unique_lock lock(mutex_);
  closed_ = true;
  work_.notify_all();
  worker_ended_.wait(lock, [this] { return alive_ == 0; });
  const std::shared_ptr<BlockPool> pool = std::move(pool_);
  const std::shared_ptr<Device> device = std::move(device_);
  lock.unlock();
}

// ---- the lists ----

void Checksums::Core::add(const std::shared_ptr<TransferJob>& job) noexcept {
  BlockChecks& checks = job->checks;
  bool several = false;
  {
    const std::lock_guard lock(mutex_);
    const bool restore = job->kind == TransferKind::restore;
    // Whoever cancels it withdraws it behind that, so none stays here.
    if (restore && job->cancelled()) return;
    checks.self = job;
    checks.begun = !restore;
    waiting_with(*job).splice(waiting_with(*job).end(), checks.place);
    several = checks.blocks.size() > at_a_time_;
  }
  if (several)
    work_.notify_all();
  else
    work_.notify_one();
}

void Checksums::Core::withdraw(TransferJob& job) noexcept {
  std::shared_ptr<TransferJob> gone;  // let go of outside the lock
  const std::lock_guard lock(mutex_);
  if (!job.checks.self || job.checks.begun) return;
  if (job.checks.place.empty()) leave(job, verifying_);
  gone = std::move(job.checks.self);
}

void Checksums::Core::leave(TransferJob& job, Jobs& list) noexcept {
  const auto place = std::ranges::find(list, &job);  // mostly the first one
  job.checks.place.splice(job.checks.place.end(), list, place);
}

std::shared_ptr<TransferJob> Checksums::Core::take_ended() noexcept {
  if (!has_ended()) return nullptr;
  const std::lock_guard lock(mutex_);
  if (ended_.empty()) return nullptr;
  TransferJob& job = *ended_.front();
  leave(job, ended_);
  ended_count_.fetch_sub(1);
  return std::move(job.checks.self);
}

TransferJob* Checksums::Core::next_job() noexcept {
  for (;;) {
    const bool swapped = ++turns_ % offloads_first_every == 0;
    Jobs& first = swapped ? summing_ : verifying_;
    Jobs& second = swapped ? verifying_ : summing_;
    Jobs& list = first.empty() ? second : first;
    if (list.empty()) return nullptr;
    TransferJob& job = *list.front();
    if (job.checks.begun || CopyQueue::begin_check(job)) {
      job.checks.begun = true;
      return &job;
    }
    leave(job, list);  // cancelled; whoever did that withdraws it just now
  }
}

std::span<const BlockCheck> Checksums::Core::take_some(TransferJob& job) noexcept {
  BlockChecks& checks = job.checks;
  const std::span<const BlockCheck> all(checks.blocks);
  const std::size_t begin = checks.next;
  checks.next = std::min(begin + at_a_time_, all.size());
  ++checks.working;
  if (checks.next == all.size()) leave(job, waiting_with(job));
  return all.subspan(begin, checks.next - begin);
}

bool Checksums::Core::settle(TransferJob& job, Found& found) noexcept {
  stats_.blocks_summed += found.summed;
  stats_.blocks_verified += found.verified;
  stats_.blocks_corrupt += found.corrupt;
  busy_ += found.busy;
  BlockChecks& checks = job.checks;
  if (found.error && (!checks.error || found.bad_position < checks.bad_position)) {
    checks.error = std::move(found.error);
    checks.bad_position = found.bad_position;
  }
  // What is left of it is of no use.
  if ((checks.error || found.cancelled) && checks.next < checks.blocks.size()) {
    checks.next = checks.blocks.size();
    leave(job, waiting_with(job));
  }
  if (--checks.working > 0 || checks.next < checks.blocks.size()) return false;
  ended_.splice(ended_.end(), checks.place);
  ended_count_.fetch_add(1);
  return true;
}

ChecksumStats Checksums::Core::stats() const {
  const std::lock_guard lock(mutex_);
  ChecksumStats stats = stats_;
  stats.busy_total_us = static_cast<std::uint64_t>(busy_ / 1000);
  stats.waiting = verifying_.size() + summing_.size();
  return stats;
}

// ---- the work ----

void Checksums::Core::work() noexcept {
  std::unique_lock lock(mutex_);
  while (!closed_) {
    if (!work_some(lock)) work_.wait(lock);
  }
  --alive_;
  worker_ended_.notify_all();
}

void Checksums::Core::work_all() noexcept {
  std::unique_lock lock(mutex_);
  while (work_some(lock)) {
  }
}

bool Checksums::Core::work_some(std::unique_lock<std::mutex>& lock) noexcept {
  TransferJob* const job = next_job();
  if (job == nullptr) return false;
  const auto blocks = take_some(*job);
  lock.unlock();
  Found found = check(*job, blocks);
  lock.lock();
  if (!settle(*job, found)) return true;
  const std::shared_ptr<Device> device = device_;
  lock.unlock();
  device->progress().bump();  // the job may be gone by now, and all of this closed
  lock.lock();
  return true;
}

Checksums::Core::Found Checksums::Core::check(const TransferJob& job,
                                              std::span<const BlockCheck> blocks) noexcept {
  Found found;
  const Nanoseconds begin = device_->now();
  for (const BlockCheck& each : blocks) {
    found.cancelled = job.cancelled();
    if (found.cancelled || found.error) break;
    check_one(job, each, found);
  }
  found.busy = device_->now() - begin;
  return found;
}

void Checksums::Core::check_one(const TransferJob& job, const BlockCheck& check,
                                Found& found) noexcept {
  const SlotIndex slot = job.host_slots[check.position];
  const std::byte* const data = pool_->data() + std::size_t{slot} * pool_->slot_bytes();
  const std::uint32_t sum = crc32c(0, data, pool_->block_bytes());
  if (job.kind == TransferKind::offload) {
    pool_->set_sum(slot, sum);
    ++found.summed;
    return;
  }
  ++found.verified;
  if (sum == check.expected) return;
  ++found.corrupt;
  found.error = corrupt(check.position, slot, check.expected, sum);
  found.bad_position = check.position;
}

// ---- the outside ----

Checksums::Checksums(std::shared_ptr<BlockPool> pool, std::size_t workers)
    : core_(std::make_shared<Core>(std::move(pool))), has_threads_(workers > 0) {
  if (has_threads_) core_->open(core_, workers);
}

Checksums::~Checksums() { stop(); }

void Checksums::stop() noexcept {
  if (!mark_.must_leak()) core_->close();
}

void Checksums::prepare(TransferJob& job) { job.checks.place.assign(1, &job); }

void Checksums::start(const std::shared_ptr<TransferJob>& job) noexcept {
  core_->add(job);
  if (!has_threads_) core_->work_all();
}

void Checksums::withdraw(TransferJob& job) noexcept { core_->withdraw(job); }
std::shared_ptr<TransferJob> Checksums::take_ended() noexcept { return core_->take_ended(); }
bool Checksums::has_ended() const noexcept { return core_->has_ended(); }
std::exception_ptr Checksums::error(const TransferJob& job) noexcept { return job.checks.error; }
ChecksumStats Checksums::stats() const { return core_->stats(); }

// ---- by hand ----

std::size_t HostCopy::verify() const {
  const HostBlocks& held = blocks();
  std::size_t compared = 0;
  for (std::size_t i = 0; i < held.size(); ++i) {
    const auto expected = held.sum(i);
    if (!expected) continue;
    const std::uint32_t found = crc32c(0, held.data(i), held.block_bytes());
    if (found != *expected) throw Corrupt(i, held.slots()[i], *expected, found);
    ++compared;
  }
  return compared;
}

}  // namespace kvmem
