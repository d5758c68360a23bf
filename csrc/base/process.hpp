// The two facts about the process that change what a destructor may do: it is a forked child, or it
// is exiting.
//
// In a forked child no thread of ours exists and a lock may be held for ever, so nothing of the
// parent's may be used: public calls throw Forked and destructors leak. While the process exits,
// other threads may still run and drivers may be unloaded, so destructors make no device call, join
// nothing, unmap nothing: the kernel reclaims it.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvmem {

namespace detail {  // read by every call, so they are read in place
extern std::atomic<std::uint32_t> fork_generation;
extern std::atomic<bool> exiting;
extern std::atomic<std::uint32_t> device_work;
[[noreturn]] void throw_forked(const char* what);
}  // namespace detail

[[nodiscard]] inline bool process_is_exiting() noexcept {
  return detail::exiting.load(std::memory_order_acquire);
}
// Also called by an atexit handler of ours. Waits, at most a second, for what devices have under
// way: a driver may be torn down next, or memory freed that is copied.
void set_process_exiting() noexcept;

// A thread is in a call of a driver, or moves bytes, for as long as this lives; or it finds that
// the exit has begun.
class DeviceWork {
 public:
  DeviceWork() noexcept { detail::device_work.fetch_add(1); }
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;
  ~DeviceWork() { detail::device_work.fetch_sub(1); }
  [[nodiscard]] static bool may_begin() noexcept { return !detail::exiting.load(); }
};

class ProcessMark {  // made by the process that may use the object that carries it
 public:
  ProcessMark() noexcept;
  // This is a child of the process that made the mark.
  [[nodiscard]] bool forked() const noexcept {
    return generation_ != detail::fork_generation.load(std::memory_order_relaxed);
  }
  void expect_same_process(const char* what) const {  // throws Forked
    if (forked()) detail::throw_forked(what);
  }
  // Forked, or exiting: touch nothing.
  [[nodiscard]] bool must_leak() const noexcept { return forked() || process_is_exiting(); }

 private:
  std::uint32_t generation_;
};

}  // namespace kvmem
