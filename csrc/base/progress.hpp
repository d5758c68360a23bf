// A counter that moves whenever something happened that a sleeper may be waiting for, and a place
// to sleep on it.
//
// Read value(), look at the state, then sleep with the value read before looking: a change in
// between is never missed. One per device; the device, its pools and its managers move it. Any
// thread.
//
// Waking a thread costs the waker several microseconds, so none is woken for nothing: a waiter
// that wakes does what is to be done for all before it looks at its own, and the reaper is there
// for when nobody waits.
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

  enum class Sleeper : std::uint8_t { waiter, reaper };

  // There may be something to do: the waiters are woken, and where there is none the reaper.
  void bump() noexcept { move(Wakes::waiters_or_reaper); }
  // Something for those who wait, and nothing to do.
  void bump_for_waiters() noexcept { move(Wakes::waiters); }
  void bump_for_all() noexcept { move(Wakes::all); }

  // Returns early when the counter is no longer `seen`, and after an hour: the caller looks again
  // anyway, and a longer time could overflow the clock.
  void sleep(std::uint64_t seen, std::chrono::nanoseconds at_most, Sleeper who = Sleeper::waiter) {
    const auto most = std::min<std::chrono::nanoseconds>(at_most, std::chrono::hours(1));
    Sleepers& mine = who == Sleeper::waiter ? waiters_ : reapers_;
    std::unique_lock lock(mutex_);
    ++mine.count;
    mine.moved.wait_for(lock, most, [&] { return value_.load(std::memory_order_relaxed) != seen; });
    --mine.count;
  }

 private:
  struct Sleepers {
    std::condition_variable moved;
    int count = 0;
  };
  enum class Wakes : std::uint8_t { waiters, waiters_or_reaper, all };

  void move(Wakes wakes) noexcept {
    bool waiters = false, reapers = false;
    {
      const std::lock_guard lock(mutex_);
      value_.fetch_add(1, std::memory_order_release);
      waiters = waiters_.count > 0;
      reapers = reapers_.count > 0 &&
                (wakes == Wakes::all || (wakes == Wakes::waiters_or_reaper && !waiters));
    }
    if (waiters) waiters_.moved.notify_all();
    if (reapers) reapers_.moved.notify_all();
  }

  std::mutex mutex_;
  Sleepers waiters_, reapers_;
  std::atomic<std::uint64_t> value_{0};
};

}  // namespace kvmem
