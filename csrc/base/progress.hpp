// A counter that moves whenever something happened that a sleeper may be waiting for, and a place
// to sleep on it.
//
// Read value(), look at the state, then sleep with the value read before looking: a change in
// between is never missed. One per device; the device, its pools and its managers move it. Any
// thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace kvmem {

class Progress {
 public:
  [[nodiscard]] std::uint64_t value() const noexcept {
    return value_.load(std::memory_order_acquire);
  }

  void bump() noexcept {
    {
      const std::lock_guard lock(mutex_);
      value_.fetch_add(1, std::memory_order_release);
      if (sleepers_ == 0) return;
    }
    moved_.notify_all();
  }

  // Returns early when the counter is no longer `seen`, and after an hour: the caller looks again
  // anyway, and a longer time could overflow the clock.
  void sleep(std::uint64_t seen, std::chrono::nanoseconds at_most) {
    const auto most = std::min<std::chrono::nanoseconds>(at_most, std::chrono::hours(1));
    std::unique_lock lock(mutex_);
    ++sleepers_;
    moved_.wait_for(lock, most, [&] { return value_.load(std::memory_order_relaxed) != seen; });
    --sleepers_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable moved_;
  std::atomic<std::uint64_t> value_{0};
  int sleepers_ = 0;
};

}  // namespace kvmem
