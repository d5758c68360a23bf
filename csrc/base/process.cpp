#include "base/process.hpp"

#include <pthread.h>

#include <atomic>
#include <cstdlib>

#include "base/error.hpp"

namespace kvmem {

namespace {
std::atomic<std::uint32_t> fork_generation{0};
std::atomic<bool> exiting{false};

// Registered once, at load: a child must find the generation moved on before it can touch an
// object.
const int handlers_installed = [] {
  pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
  std::atexit([] { set_process_exiting(); });
  return 1;
}();
}  // namespace

ProcessMark::ProcessMark() noexcept : generation_(fork_generation.load(std::memory_order_relaxed)) {
  static_cast<void>(handlers_installed);
}

bool ProcessMark::forked() const noexcept {
  return generation_ != fork_generation.load(std::memory_order_relaxed);
}

void ProcessMark::expect_same_process(const char* what) const {
  if (forked())
    throw Forked(text(what, " belongs to the parent process: a forked child cannot use it"));
}

bool ProcessMark::must_leak() const noexcept { return forked() || process_is_exiting(); }

bool process_is_exiting() noexcept { return exiting.load(std::memory_order_acquire); }
void set_process_exiting() noexcept { exiting.store(true, std::memory_order_release); }

}  // namespace kvmem
