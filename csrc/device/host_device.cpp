#include "device/host_device.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
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
constexpr std::size_t piece_bytes = std::size_t{512} << 10;
constexpr unsigned most_workers = 4;  // more do not make memory faster
constexpr std::size_t most_descriptors = std::size_t{1} << 20;

// Some descriptors of a copy; of the first and the last perhaps only some bytes.
struct Piece {
  ModelCopy* copy;
  std::size_t first, first_byte;
  std::size_t end, end_byte;

  std::size_t move_bytes() const noexcept {  // returns how many
    const CopyDescriptors& batch = copy->batch;
    std::size_t from = first_byte, moved = 0;
    for (std::size_t i = first; i < end; ++i, from = 0) {
      copy_bytes(batch.targets[i] + from, batch.sources[i] + from, batch.sizes[i] - from);
      moved += batch.sizes[i] - from;
    }
    if (end_byte > from) {
      copy_bytes(batch.targets[end] + from, batch.sources[end] + from, end_byte - from);
      moved += end_byte - from;
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
  void unpin(void* base, std::size_t bytes) noexcept override;

  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override;
  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override;

 private:
  void freed() override { wake_worker(); }
  void start_workers(unsigned count);
  void stop_workers() noexcept;
  void work() noexcept;
  [[nodiscard]] ModelCopy* copy_with_pieces() const noexcept;
  void copy_one_piece(ModelCopy& copy, Lock& held) noexcept;
  void wake_worker() noexcept;

  void hold_to_speed(std::size_t bytes, Nanoseconds since) const;

  const double most_bytes_per_second_;
  DeviceInfo info_;
  std::condition_variable work_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

CpuDevice::CpuDevice(const HostDeviceOptions& options)
    : ModelDevice("the host device"), most_bytes_per_second_(options.most_bytes_per_second) {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const unsigned wanted = options.workers > 0 ? options.workers : std::min(cores, most_workers);
  info_.kind = "host";
  info_.name = "host";
  info_.memory_bytes = machine_memory_bytes();
  info_.copy_engines = options.no_workers ? 0 : wanted;
  info_.max_descriptors = most_descriptors;
  info_.copy_kernel = copy_kernel_name();
  start_workers(info_.copy_engines);
}

// ---- copying ----
//
// No work is forgotten: whenever a copy has pieces that nobody took, a worker was notified after
// they appeared, or a worker that is awake looks again before it sleeps. One is notified at a time,
// and each passes it on when it leaves pieces behind, so a small copy wakes one worker only.

void CpuDevice::start_workers(unsigned count) {
  const SignalsBlocked blocked;
  try {
    for (unsigned i = 0; i < count; ++i) {
      workers_.emplace_back([this] { work(); });
      pthread_setname_np(workers_.back().native_handle(), "kvmem-copy");
    }
  } catch (const std::system_error& error) {
    stop_workers();
    throw Error(text("copy worker ", workers_.size(), " of ", count, ": ", error.what()));
  }
}

void CpuDevice::stop_workers() noexcept {
  {
    const std::lock_guard held(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void CpuDevice::work() noexcept {
  Lock held(mutex_);
  while (!stopping_) {
    if (ModelCopy* const copy = copy_with_pieces()) {
      copy_one_piece(*copy, held);
    } else {
      work_.wait(held);
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

void CpuDevice::copy_one_piece(ModelCopy& copy, Lock& held) noexcept {
  const Piece piece = take_piece(copy);
  const bool more = copy_with_pieces() != nullptr;
  held.unlock();
  if (more) wake_worker();
  const Nanoseconds since = now();
  const std::size_t moved = piece.move_bytes();
  if (most_bytes_per_second_ > 0) hold_to_speed(moved, since);
  held.lock();
  if (--copy.pieces_running > 0 || !all_taken(copy)) return;
  if (!model_.ended(&copy, now())) return;
  held.unlock();
  progress().bump();
  held.lock();
}

void CpuDevice::hold_to_speed(std::size_t bytes, Nanoseconds since) const {
  const double seconds = static_cast<double>(bytes) / most_bytes_per_second_;
  const auto end = since + static_cast<Nanoseconds>(seconds * 1e9);
  std::this_thread::sleep_for(std::chrono::nanoseconds(end - now()));
}

void CpuDevice::wake_worker() noexcept {
  if (workers_.empty()) {
    progress().bump();  // only a sleeper can take the work
  } else {
    work_.notify_one();
  }
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
  wake_worker();
}

void CpuDevice::sleep(std::uint64_t seen, Nanoseconds at_most, bool help) {
  mark_.expect_same_process("the host device");
  if (help && at_most > 0 && progress().value() == seen) {
    Lock held(mutex_);
    if (ModelCopy* const copy = copy_with_pieces()) {
      copy_one_piece(*copy, held);
      const bool more = copy_with_pieces() != nullptr;  // set free by the end of this one
      held.unlock();
      if (more) wake_worker();
      return;
    }
  }
  progress().sleep(seen, std::chrono::nanoseconds(at_most));
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

void CpuDevice::unpin(void* base, std::size_t bytes) noexcept {
  if (!mark_.forked()) unlock_memory(base, bytes);
}

}  // namespace

// Leaked whole where it must be: its locks may be in use by threads that no longer or still run.
std::shared_ptr<ModelDevice> make_host_device(const HostDeviceOptions& options) {
  return {new CpuDevice(options), [](CpuDevice* device) {
            if (!device->must_leak()) delete device;
          }};
}

}  // namespace kvmem
