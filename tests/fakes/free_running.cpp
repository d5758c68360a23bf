#include "fakes/free_running.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/signals.hpp"

namespace kvmem::fake {

namespace {

using Clock = std::chrono::steady_clock;
constexpr Nanoseconds shortest_nap = 20'000;
constexpr Nanoseconds longest_nap = 2'000'000;  // somebody may have used the model directly

// This library has a count of its own of the handles that its models give out: so it begins where
// those of the program, of which some may be attached, do not come.
std::shared_ptr<VirtualDevice> make_device() {
  constexpr int models_of_the_program = 1 << 14;
  static const bool passed_over = [] {
    for (int i = 0; i < models_of_the_program; ++i) static_cast<void>(StreamModel{});
    return true;
  }();
  return passed_over ? make_virtual_device({}) : nullptr;
}

}  // namespace

struct FreeRunning::Shared {
  const std::shared_ptr<VirtualDevice> device = make_device();
  const Clock::time_point start = Clock::now();
  std::mutex clock_mutex;  // of whoever moves the clock

  std::mutex mutex;
  std::condition_variable changed;
  bool woken = false, stops = false, ended = false;

  void catch_up() {
    const std::lock_guard lock(clock_mutex);
    const Nanoseconds now =
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    if (now > device->now()) device->advance(now - device->now());
  }

  void run() {
    for (;;) {
      catch_up();
      const auto next = device->next_time();
      const Nanoseconds nap = next ? *next - device->now() : longest_nap;
      std::unique_lock lock(mutex);
      changed.wait_for(lock, std::chrono::nanoseconds(std::clamp(nap, shortest_nap, longest_nap)),
                       [&] { return woken || stops; });
      woken = false;
      if (stops) break;
    }
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }
};

FreeRunning::FreeRunning() : shared_(std::make_shared<Shared>()) {
  // Detached: it may run until the process ends, which destroys nothing of the fake's.
  const SignalsBlocked blocked;
  std::thread([shared = shared_] { shared->run(); }).detach();
}

FreeRunning::~FreeRunning() {
  std::unique_lock lock(shared_->mutex);
  shared_->stops = true;
  shared_->changed.notify_all();
  shared_->changed.wait(lock, [&] { return shared_->ended; });
}

VirtualDevice& FreeRunning::device() noexcept { return *shared_->device; }

void FreeRunning::catch_up() { shared_->catch_up(); }

void FreeRunning::wake() noexcept {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->woken = true;
  }
  shared_->changed.notify_all();
}

}  // namespace kvmem::fake
