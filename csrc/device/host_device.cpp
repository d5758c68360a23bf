#include "device/host_device.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "base/process.hpp"
#include "base/signals.hpp"
#include "device/host_copy.hpp"
#include "device/host_memory.hpp"
#include "device/model.hpp"

namespace kvmem {

namespace {

// Enough to hide the hand-over between threads, small enough that a batch feeds all workers.
constexpr std::size_t piece_bytes = std::size_t{256} << 10;
constexpr unsigned most_workers = 4;  // more do not make memory faster
constexpr std::size_t most_descriptors = std::size_t{1} << 20;

// Some descriptors of a copy; of the first and the last perhaps only some bytes.
struct Piece {
  ModelCopy* copy;
  std::size_t first, first_byte;
  std::size_t end, end_byte;

  std::size_t move_bytes() const noexcept {  // returns how many
    const CopyDescriptors& batch = copy->batch;
    const std::size_t last = end_byte > 0 ? end : end - 1;
    std::size_t from = first_byte, moved = 0;
    for (std::size_t i = first; i <= last; ++i, from = 0) {
      const std::size_t bytes = (i == end ? end_byte : batch.sizes[i]) - from;
      const std::byte* const source = batch.sources[i] + from;
      const std::byte* next = nullptr;  // also of the next piece, which this thread may get
      if (i == end) {
        next = source + bytes;
      } else if (i + 1 < batch.count) {
        next = batch.sources[i + 1];
      }
      copy_bytes(batch.targets[i] + from, source, bytes, next);
      moved += bytes;
    }
    store_fence();
    return moved;
  }
};

bool all_taken(const ModelCopy& copy) { return copy.next_descriptor == copy.batch.count; }

Piece take_piece(ModelCopy& copy) {
  Piece piece{&copy, copy.next_descriptor, copy.next_byte, 0, 0};
  for (std::size_t taken = 0; taken < piece_bytes && !all_taken(copy);) {
    const std::size_t left = copy.batch.sizes[copy.next_descriptor] - copy.next_byte;
    if (left >= 2 * piece_bytes) {
      copy.next_byte += piece_bytes;
      taken += piece_bytes;
    } else {
      ++copy.next_descriptor;
      copy.next_byte = 0;
      taken += left;
    }
  }
  piece.end = copy.next_descriptor;
  piece.end_byte = copy.next_byte;
  ++copy.pieces_running;
  return piece;
}

// The processors that this thread may run on; none where the kernel does not say.
std::vector<std::size_t> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<std::size_t> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// The part of worker `i` of `count`: neighbours, which share caches and memory; one of them, in
// turn, where there are fewer processors than workers.
cpu_set_t part_of(const std::vector<std::size_t>& cpus, unsigned i, unsigned count) {
  cpu_set_t part;
  CPU_ZERO(&part);
  const std::size_t n = cpus.size();
  if (n == 0) return part;
  const std::size_t first = n >= count ? i * n / count : i % n;
  const std::size_t end = n >= count ? (i + 1) * n / count : first + 1;
  for (std::size_t at = first; at < end; ++at) CPU_SET(cpus[at], &part);
  return part;
}

class CpuDevice final : public ModelDevice {
 public:
  explicit CpuDevice(const HostDeviceOptions& options);
  ~CpuDevice() override { stop_workers(); }
  [[nodiscard]] bool must_leak() const noexcept { return mark_.must_leak(); }

  [[nodiscard]] const DeviceInfo& info() const noexcept override { return info_; }
  [[nodiscard]] Nanoseconds now() const noexcept override;

  [[nodiscard]] void* allocate(std::size_t bytes) override;
  void deallocate(void* base, std::size_t bytes) noexcept override;
  void pin(void* base, std::size_t bytes) override;
  bool unpin(void* base, std::size_t bytes) noexcept override;

  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override;
  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override;

 private:
  struct Worker {
    std::thread thread;
    std::condition_variable called;
    cpu_set_t cpus = {};  // where it may run; empty: anywhere
    bool sleeps = false;  // and nobody has called it yet; under mutex_
  };

  void freed() override { share_work(); }
  void start_workers(unsigned count);
  void stop_workers() noexcept;
  void work(Worker& self) noexcept;
  [[nodiscard]] ModelCopy* copy_with_pieces() const noexcept;
  // True: it was the last of a copy, and its end is to be told.
  [[nodiscard]] bool copy_one_piece(ModelCopy& copy, Lock& held) noexcept;
  void share_work() noexcept;
  [[nodiscard]] Worker* pick_worker() noexcept;  // with mutex_ held; null: nobody sleeps

  void hold_to_speed(std::size_t bytes, Nanoseconds since, Lock& held);

  const double most_bytes_per_second_;
  DeviceInfo info_;
  bool stopping_ = false;
  std::list<Worker> workers_;
  std::size_t moving_ = 0;  // threads that move bytes just now
};

CpuDevice::CpuDevice(const HostDeviceOptions& options)
    : ModelDevice("the host device"), most_bytes_per_second_(options.most_bytes_per_second) {
  const unsigned cores = std::max(1U, static_cast<unsigned>(allowed_cpus().size()));
  const unsigned wanted = options.workers > 0 ? options.workers : std::min(cores, most_workers);
  info_.kind = "host";
  info_.name = "host";
  info_.memory_bytes = machine_memory_bytes();
  info_.copy_engines = options.no_workers ? 0 : wanted;
  info_.max_descriptors = most_descriptors;
  info_.copy_kernel = copy_kernel_name();
  try {
    start_workers(info_.copy_engines);
  } catch (const std::system_error& error) {
    throw Error(
        text("copy worker ", workers_.size(), " of ", info_.copy_engines, ": ", error.what()));
  }
}

// ---- copying ----
//
// No work is forgotten: whenever a copy has pieces that nobody took, a thread is moving bytes,
// which looks again behind its piece, or a worker was notified. One is notified at a time: each
// calls for more when it leaves pieces behind and there are not as many at it as there are workers.
// So a small copy wakes one worker only, and one that comes while others move costs its caller no
// wake-up at all.
//
// Each worker has a part of the processors to itself, and the one that is woken runs on another
// part than the thread that wakes it: a worker that woke on the same processor would take it away
// from a caller who only wanted to submit.

void CpuDevice::start_workers(unsigned count) {
  const SignalsBlocked blocked;
  const std::vector<std::size_t> cpus = allowed_cpus();
  try {
    for (unsigned i = 0; i < count; ++i) {
      Worker& worker = workers_.emplace_back();
      worker.cpus = part_of(cpus, i, count);
      worker.thread = std::thread([this, &worker] { work(worker); });
      pthread_setname_np(worker.thread.native_handle(), "kvmem-copy");
      if (pthread_setaffinity_np(worker.thread.native_handle(), sizeof worker.cpus, &worker.cpus) !=
          0)
        CPU_ZERO(&worker.cpus);
    }
  } catch (...) {
    if (!workers_.empty() && !workers_.back().thread.joinable()) workers_.pop_back();
    stop_workers();
    throw;
  }
}

void CpuDevice::stop_workers() noexcept {
  {
    const std::lock_guard held(mutex_);
    stopping_ = true;
  }
  for (Worker& worker : workers_) worker.called.notify_one();
  for (Worker& worker : workers_) worker.thread.join();
}

void CpuDevice::work(Worker& self) noexcept {
  Lock held(mutex_);
  while (!stopping_) {
    if (ModelCopy* const copy = copy_with_pieces()) {
      if (!copy_one_piece(*copy, held)) continue;
      held.unlock();
      progress().bump();
      held.lock();
    } else {
      self.sleeps = true;
      self.called.wait(held);
      self.sleeps = false;
    }
  }
}

// Copies before it that are all taken are few: each has a thread that is still copying.
ModelCopy* CpuDevice::copy_with_pieces() const noexcept {
  for (ModelCopy* const copy : model_.runnable()) {
    if (!all_taken(*copy)) return copy;
  }
  return nullptr;
}

// Once the process exits, what is taken is never moved: the program's memory may be gone.
bool CpuDevice::copy_one_piece(ModelCopy& copy, Lock& held) noexcept {
  const Piece piece = take_piece(copy);
  ++moving_;
  Worker* const helper = moving_ < workers_.size() && copy_with_pieces() ? pick_worker() : nullptr;
  held.unlock();
  if (helper) helper->called.notify_one();
  const Nanoseconds since = now();
  std::optional<std::size_t> moved;
  {
    const DeviceWork work;
    if (DeviceWork::may_begin()) moved = piece.move_bytes();
  }
  held.lock();
  --moving_;
  if (!moved) return false;
  if (most_bytes_per_second_ > 0) hold_to_speed(*moved, since, held);
  if (--copy.pieces_running > 0 || !all_taken(copy)) return false;
  return model_.ended(&copy, now());
}

void CpuDevice::hold_to_speed(std::size_t bytes, Nanoseconds since, Lock& held) {
  held.unlock();
  share_work();  // what came meanwhile may not count on this thread
  const double seconds = static_cast<double>(bytes) / most_bytes_per_second_;
  const auto end = since + static_cast<Nanoseconds>(seconds * 1e9);
  std::this_thread::sleep_for(std::chrono::nanoseconds(end - now()));
  held.lock();
}

CpuDevice::Worker* CpuDevice::pick_worker() noexcept {
  const int here = sched_getcpu();
  Worker* picked = nullptr;
  for (Worker& worker : workers_) {
    if (!worker.sleeps) continue;
    picked = &worker;
    if (here < 0 || !CPU_ISSET(static_cast<std::size_t>(here), &worker.cpus)) break;
  }
  if (picked) picked->sleeps = false;
  return picked;
}

void CpuDevice::share_work() noexcept {
  Worker* worker = nullptr;
  {
    const Lock held(mutex_);
    if (moving_ > 0 || !copy_with_pieces()) return;
    worker = pick_worker();
  }
  if (worker) worker->called.notify_one();
  if (workers_.empty()) progress().bump();  // only a sleeper can take the work
}

void CpuDevice::copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
                     StreamHandle stream) {
  if (batch.count > 0) expect_descriptors(batch, info_);
  {
    const Lock held = lock();
    static_cast<void>(model_.stream_id(stream));
    if (batch.count == 0) return;
    ModelCopy queued;
    queued.batch = batch;
    queued.direction = direction;
    queued.access = access;
    model_.copy(stream, queued);
  }
  share_work();
}

void CpuDevice::sleep(std::uint64_t seen, Nanoseconds at_most, bool help) {
  mark_.expect_same_process("the host device");
  if (help && at_most > 0 && progress().value() == seen) {
    Lock held(mutex_);
    if (ModelCopy* const copy = copy_with_pieces()) {
      const bool told = copy_one_piece(*copy, held);
      held.unlock();
      if (told) progress().bump_for_waiters();  // the caller looks at all the rest
      share_work();                             // what the end of this one has set free
      return;
    }
  }
  progress().sleep(seen, std::chrono::nanoseconds(at_most),
                   help ? Progress::Sleeper::waiter : Progress::Sleeper::reaper);
}

// ---- the clock ----

Nanoseconds CpuDevice::now() const noexcept {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count();
}

// ---- memory ----

void* CpuDevice::allocate(std::size_t bytes) {
  mark_.expect_same_process("the host device");
  return map_memory(bytes);
}

void CpuDevice::deallocate(void* base, std::size_t bytes) noexcept {
  if (mark_.forked()) return;
  {
    const Lock held(mutex_);
    if (model_.touches(base, bytes)) return;  // leaked
  }
  unmap_memory(base, bytes);  // the kernel takes its time for gigabytes
}

void CpuDevice::pin(void* base, std::size_t bytes) {
  mark_.expect_same_process("the host device");
  lock_memory(base, bytes);
}

bool CpuDevice::unpin(void* base, std::size_t bytes) noexcept {
  if (!mark_.forked()) unlock_memory(base, bytes);
  return true;  // unmapping undoes it too
}

}  // namespace

// Leaked whole where it must be: its locks may be in use by threads that no longer or still run.
std::shared_ptr<ModelDevice> make_host_device(const HostDeviceOptions& options) {
  return {new CpuDevice(options), [](CpuDevice* device) {
            if (!device->must_leak()) delete device;
          }};
}

}  // namespace kvmem
