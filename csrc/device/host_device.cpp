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

constexpr const char* name = "the host device";  // in messages
// Enough to hide the hand-over between threads, small enough that a batch feeds all workers.
constexpr std::size_t piece_bytes = std::size_t{512} << 10;
constexpr unsigned most_workers = 4;  // more do not make memory faster
constexpr std::size_t most_descriptors = std::size_t{1} << 20;

// Some descriptors of a copy; of the first and the last perhaps only some bytes.
struct Piece {
  ModelCopy* copy;
  std::size_t first, first_byte;
  std::size_t end, end_byte;

  void move_bytes() const noexcept {
    const CopyDescriptors& batch = copy->batch;
    std::size_t from = first_byte;
    for (std::size_t i = first; i < end; ++i, from = 0) {
      copy_bytes(batch.targets[i] + from, batch.sources[i] + from, batch.sizes[i] - from);
    }
    if (end_byte > from) {
      copy_bytes(batch.targets[end] + from, batch.sources[end] + from, end_byte - from);
    }
    store_fence();
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

void check_descriptors(const CopyDescriptors& batch) {
  KVMEM_EXPECTS(batch.count <= most_descriptors, "a batch of ", batch.count,
                " copies exceeds max_descriptors ", most_descriptors);
  KVMEM_EXPECTS(batch.targets && batch.sources && batch.sizes, "a batch without arrays");
  for (std::size_t i = 0; i < batch.count; ++i) {
    KVMEM_EXPECTS(batch.targets[i] && batch.sources[i], "copy ", i, " of the batch has no address");
    KVMEM_EXPECTS(batch.sizes[i] > 0, "copy ", i, " of the batch has no bytes");
  }
}

class CpuDevice final : public HostDevice {
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

  [[nodiscard]] StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) noexcept override;
  [[nodiscard]] std::uint64_t stream_id(StreamHandle stream) override;

  [[nodiscard]] EventHandle create_event(bool timing) override;
  void destroy_event(EventHandle event) noexcept override;
  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  [[nodiscard]] EventState query(EventHandle event) noexcept override;
  [[nodiscard]] bool recorded(EventHandle event) const override;
  [[nodiscard]] Nanoseconds event_time(EventHandle event) override;
  void record_unsignalled(EventHandle event) override;
  void signal(EventHandle event) override;

  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override;
  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Every use of the model. In a forked child the mutex may be locked for ever.
  [[nodiscard]] Lock lock() const {
    mark_.expect_same_process(name);
    return Lock(mutex_);
  }
  void start_workers(unsigned count);
  void stop_workers() noexcept;
  void work() noexcept;
  [[nodiscard]] ModelCopy* copy_with_pieces() const noexcept;
  void copy_one_piece(ModelCopy& copy, Lock& held) noexcept;
  void wake_worker() noexcept;

  const ProcessMark mark_;
  DeviceInfo info_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  StreamModel model_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

CpuDevice::CpuDevice(const HostDeviceOptions& options) {
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
  piece.move_bytes();
  held.lock();
  if (--copy.pieces_running > 0 || !all_taken(copy)) return;
  if (!model_.ended(&copy, now())) return;
  held.unlock();
  progress().bump();
  held.lock();
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
  if (batch.count > 0) check_descriptors(batch);
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
  mark_.expect_same_process(name);
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

// ---- streams and events ----

Nanoseconds CpuDevice::now() const noexcept {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count();
}

StreamHandle CpuDevice::create_stream() {
  const Lock held = lock();
  return model_.create_stream();
}

void CpuDevice::destroy_stream(StreamHandle stream) noexcept {
  if (mark_.forked()) return;
  const Lock held(mutex_);
  try {
    model_.destroy_stream(stream);
  } catch (const InvalidArgument&) {
    KVMEM_INVARIANT(!"a stream is destroyed once");
  }
}

std::uint64_t CpuDevice::stream_id(StreamHandle stream) {
  const Lock held = lock();
  return model_.stream_id(stream);
}

EventHandle CpuDevice::create_event(bool timing) {
  const Lock held = lock();
  return model_.create_event(timing);
}

void CpuDevice::destroy_event(EventHandle event) noexcept {
  if (mark_.forked()) return;
  const Lock held(mutex_);
  try {
    model_.destroy_event(event);
  } catch (const InvalidArgument&) {
    KVMEM_INVARIANT(!"an event is destroyed once");
  }
}

void CpuDevice::record(EventHandle event, StreamHandle stream) {
  Lock held = lock();
  const bool reached = model_.record(event, stream, now());
  held.unlock();
  if (reached) progress().bump();
}

void CpuDevice::wait(StreamHandle stream, EventHandle event) {
  const Lock held = lock();
  model_.wait(stream, event);
}

EventState CpuDevice::query(EventHandle event) noexcept {
  if (mark_.forked()) return EventState::lost;
  const Lock held(mutex_);
  try {
    return model_.done(event) ? EventState::done : EventState::pending;
  } catch (const InvalidArgument&) {
    return EventState::failed;
  }
}

bool CpuDevice::recorded(EventHandle event) const {
  const Lock held = lock();
  return model_.recorded(event);
}

Nanoseconds CpuDevice::event_time(EventHandle event) {
  const Lock held = lock();
  return model_.reached_at(event);
}

void CpuDevice::record_unsignalled(EventHandle event) {
  const Lock held = lock();
  model_.record_unsignalled(event);
}

void CpuDevice::signal(EventHandle event) {
  {
    const Lock held = lock();
    model_.signal(event, now());
  }
  progress().bump();
  wake_worker();
}

// ---- memory ----

void* CpuDevice::allocate(std::size_t bytes) {
  mark_.expect_same_process(name);
  return map_memory(bytes);
}

void CpuDevice::deallocate(void* base, std::size_t bytes) noexcept {
  if (!mark_.forked()) unmap_memory(base, bytes);
}

void CpuDevice::pin(void* base, std::size_t bytes) {
  mark_.expect_same_process(name);
  lock_memory(base, bytes);
}

void CpuDevice::unpin(void* base, std::size_t bytes) noexcept {
  if (!mark_.forked()) unlock_memory(base, bytes);
}

}  // namespace

// Leaked whole where it must be: its locks may be in use by threads that no longer or still run.
std::shared_ptr<HostDevice> make_host_device(const HostDeviceOptions& options) {
  return {new CpuDevice(options), [](CpuDevice* device) {
            if (!device->must_leak()) delete device;
          }};
}

}  // namespace kvmem
