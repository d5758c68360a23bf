#include "device/virtual_device.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "base/process.hpp"
#include "device/fault_plan.hpp"
#include "device/host_memory.hpp"
#include "device/model.hpp"
#include "device/virtual_copies.hpp"

namespace kvmem {

namespace {

constexpr const char* name = "the virtual device";                 // in messages
constexpr std::size_t address_space_bytes = std::size_t{1} << 46;  // half of what a process has
// Real time, of a thread that waits for another thread; then it looks again.
constexpr std::chrono::milliseconds idle_sleep{1};
constexpr Nanoseconds for_ever = std::numeric_limits<Nanoseconds>::max();

class ModelledDevice final : public VirtualDevice {
 public:
  explicit ModelledDevice(const VirtualOptions& options);
  [[nodiscard]] bool must_leak() const noexcept { return mark_.must_leak(); }

  [[nodiscard]] const DeviceInfo& info() const noexcept override { return info_; }
  [[nodiscard]] Nanoseconds now() const noexcept override { return now_.load(); }

  [[nodiscard]] void* allocate(std::size_t bytes) override;
  void deallocate(void* base, std::size_t bytes) noexcept override;
  void pin(void* base, std::size_t bytes) override;
  bool unpin(void* base, std::size_t bytes) noexcept override;

  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override;
  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override;

  bool step() override;
  void advance(Nanoseconds by) override;
  [[nodiscard]] std::optional<Nanoseconds> next_time() override;

  void fail_nth(DeviceCall call, std::uint64_t nth, Fault how, std::uint64_t times) override;
  void forget_faults() override {
    const Lock held = lock();
    plan_.forget();
  }
  void pause_faults(bool paused) override {
    const Lock held = lock();
    plan_.pause(paused);
  }
  [[nodiscard]] std::uint64_t faults() const override {
    const Lock held = lock();
    return plan_.injected();
  }
  void lose() override;
  [[nodiscard]] bool lost() const override {
    const Lock held = lock();
    return lost_;
  }
  void hold_copies(std::uint64_t count) override {
    const Lock held = lock();
    copies_.hold(count);
  }
  void release_copies() override {
    const Lock held = lock();
    copies_.release();
  }

  [[nodiscard]] std::size_t pending_copies() const override {
    const Lock held = lock();
    return copies_.pending();
  }
  [[nodiscard]] std::size_t held_copies() const override {
    const Lock held = lock();
    return copies_.held();
  }

 private:
  [[nodiscard]] Entered enter(const Asked& asked) override;
  void freed_with_lock() override { start_runnable(); }
  void expect_pinned(const CopyDescriptors& batch, Direction direction) const;
  void start_runnable();
  // To the first end that is not after `until`; if there is none, to `until`. Says which.
  bool move_clock(Nanoseconds until);

  const VirtualOptions options_;
  DeviceInfo info_;
  VirtualCopies copies_;
  FaultPlan plan_;
  std::vector<ModelCopy*> started_;  // of those that the model calls runnable
  std::vector<std::pair<const std::byte*, std::size_t>> pinned_;
  std::size_t allocated_bytes_ = 0;
  bool lost_ = false;
  std::atomic<Nanoseconds> now_{0};
};

ModelledDevice::ModelledDevice(const VirtualOptions& options)
    : VirtualDevice(name), options_(options), copies_(options) {
  info_.kind = "virtual";
  info_.name = "virtual";
  info_.memory_bytes = options.moves_bytes ? machine_memory_bytes() : address_space_bytes;
  info_.copy_engines = options.shared_link ? 1 : 2;
  info_.needs_pinned_host = options.needs_pinned_host;
  info_.max_descriptors = options.max_descriptors;
  info_.copy_kernel = options.moves_bytes ? "in two parts" : "none";
  info_.virtual_time = true;
  info_.has_bytes = options.moves_bytes;
}

ModelledDevice::Entered ModelledDevice::enter(const Asked& asked) {
  Entered entered{lock()};
  if (const auto verdict = plan_.next(asked.call)) {
    entered.fails = true;
    entered.happens = *verdict == Fault::in_flight;
    if (*verdict == Fault::lost) lost_ = true;
  }
  if (lost_) throw DeviceLost("the virtual device is lost");
  return entered;
}

// ---- copies and time ----

void ModelledDevice::copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
                          StreamHandle stream) {
  const Entered entered = enter({DeviceCall::copy, stream});
  static_cast<void>(model_.stream_id(stream));
  if (batch.count > 0) expect_descriptors(batch, info_);
  if (options_.needs_pinned_host) expect_pinned(batch, direction);
  if (entered.happens && batch.count > 0) {
    ModelCopy queued;
    queued.batch = batch;
    queued.direction = direction;
    queued.access = access;
    queued.number = copies_.add(batch, direction, access);
    try {
      model_.copy(stream, queued);
    } catch (...) {
      copies_.remove(queued.number);
      throw;
    }
    start_runnable();
  }
  entered.end("copy");
}

// Hardware would read such memory while the host changes it, or block.
void ModelledDevice::expect_pinned(const CopyDescriptors& batch, Direction direction) const {
  for (std::size_t i = 0; i < batch.count; ++i) {
    const std::byte* const host =
        direction == Direction::to_host ? batch.targets[i] : batch.sources[i];
    const bool pinned = std::ranges::any_of(pinned_, [&](const auto& range) {
      return host >= range.first && host + batch.sizes[i] <= range.first + range.second;
    });
    KVMEM_EXPECTS(pinned, "copy ", i, " of the batch: host memory that is not pinned");
  }
}

void ModelledDevice::start_runnable() {
  // A copy keeps its place in runnable() until it has ended, so new ones come behind.
  for (ModelCopy* const copy : model_.runnable()) {
    if (std::ranges::find(started_, copy) != started_.end()) continue;
    started_.push_back(copy);
    copies_.start(copy, now());
  }
}

bool ModelledDevice::move_clock(Nanoseconds until) {
  for (;;) {
    copies_.serve(now());
    if (ModelCopy* const ended = copies_.take_ended(now())) {
      std::erase(started_, ended);
      model_.ended(ended, now());
      start_runnable();
      return true;
    }
    const auto next = copies_.next_time(now());
    if (!next || *next > until) {
      now_.store(std::max(now(), until));
      return false;
    }
    now_.store(*next);
  }
}

bool ModelledDevice::step() {
  {
    const Lock held = lock();
    for (bool ended = false; !ended;) {
      const auto next = copies_.next_time(now());
      if (!next) return false;
      ended = move_clock(*next);
    }
  }
  progress().bump();
  return true;
}

void ModelledDevice::advance(Nanoseconds by) {
  KVMEM_EXPECTS(by >= 0, "the clock cannot go back by ", -by, " ns");
  {
    const Lock held = lock();
    KVMEM_EXPECTS(by <= latest - now(), "the clock is at ", now(), " ns and cannot move by ", by,
                  " ns: it ends at ", latest);
    const Nanoseconds until = now() + by;
    while (move_clock(until)) {
    }
  }
  progress().bump();
}

std::optional<Nanoseconds> ModelledDevice::next_time() {
  const Lock held = lock();
  copies_.serve(now());
  return copies_.next_time(now());
}

void ModelledDevice::sleep(std::uint64_t seen, Nanoseconds at_most, bool help) {
  mark_.expect_same_process(name);
  if (!help) return progress().sleep(seen, std::chrono::nanoseconds(at_most));
  bool idle = false;
  {
    const Lock held = lock();
    if (progress().value() != seen) return;
    idle = (at_most == for_ever || now() == latest) && !copies_.next_time(now());
    if (!idle) move_clock(now() + std::clamp<Nanoseconds>(at_most, 0, latest - now()));
  }
  if (idle)
    progress().sleep(seen, idle_sleep);
  else
    progress().bump();
}

// ---- memory ----

void* ModelledDevice::allocate(std::size_t bytes) {
  const Entered entered = enter({DeviceCall::allocate});
  const std::size_t free = info_.memory_bytes - std::min(allocated_bytes_, info_.memory_bytes);
  const Shortage shortage{
      "bytes of the virtual device", bytes, free, info_.memory_bytes, allocated_bytes_, 0};
  if (entered.fails || bytes > free) throw CapacityError("cannot allocate device memory", shortage);
  void* const base = options_.moves_bytes ? map_memory(bytes) : map_addresses(bytes);
  allocated_bytes_ += bytes;
  return base;
}

void ModelledDevice::deallocate(void* base, std::size_t bytes) noexcept {
  if (mark_.forked()) return;
  {
    const Lock held(mutex_);
    if (model_.touches(base, bytes)) return;  // leaked, and still counted
    allocated_bytes_ -= bytes;
  }
  unmap_memory(base, bytes);
}

void ModelledDevice::pin(void* base, std::size_t bytes) {
  const Entered entered = enter({DeviceCall::pin});
  const auto* const first = static_cast<const std::byte*>(base);
  KVMEM_EXPECTS(bytes > 0 && bytes % slot_alignment_bytes == 0 &&
                    reinterpret_cast<std::uintptr_t>(base) % slot_alignment_bytes == 0,
                "only whole pages can be pinned, not ", bytes, " bytes at ", base);
  for (const auto& [other, size] : pinned_) {
    KVMEM_EXPECTS(first + bytes <= other || other + size <= first, bytes, " bytes at ", base,
                  " are pinned already, or some of them");
  }
  if (entered.fails) throw CapacityError("cannot pin memory", {"pins of the virtual device", 1});
  pinned_.emplace_back(first, bytes);
}

bool ModelledDevice::unpin(void* base, std::size_t bytes) noexcept {
  if (mark_.forked()) return true;
  const Lock held(mutex_);
  std::erase(pinned_, std::pair(static_cast<const std::byte*>(base), bytes));
  return true;
}

// ---- faults, and what is true ----

void ModelledDevice::fail_nth(DeviceCall call, std::uint64_t nth, Fault how, std::uint64_t times) {
  KVMEM_EXPECTS(nth > 0, "nth is 0: calls are counted from 1");
  KVMEM_EXPECTS(times > 0, "times is 0: at least 1");
  KVMEM_EXPECTS(call != DeviceCall::recorded, "recorded() cannot be made to fail here");
  const Lock held = lock();
  plan_.add(call, nth, how, times);
}

void ModelledDevice::lose() {
  {
    const Lock held = lock();
    lost_ = true;
  }
  progress().bump();
}

}  // namespace

std::shared_ptr<VirtualDevice> make_virtual_device(const VirtualOptions& options) {
  KVMEM_EXPECTS(options.bytes_per_second >= 1, "bytes_per_second is ", options.bytes_per_second,
                ", at least 1");
  KVMEM_EXPECTS(options.latency >= 0, "latency is ", options.latency, " ns, below 0");
  KVMEM_EXPECTS(options.max_descriptors > 0, "max_descriptors is 0");
  KVMEM_EXPECTS(options.moves_bytes || !options.needs_pinned_host,
                "needs_pinned_host without moves_bytes: there are no bytes to stage");
  // Leaked whole where it must be: a thread may sleep on its progress for ever.
  return {new ModelledDevice(options), [](ModelledDevice* device) {
            if (!device->must_leak()) delete device;
          }};
}

}  // namespace kvmem
