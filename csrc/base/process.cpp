#include "base/process.hpp"

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "base/error.hpp"

namespace kvmem {

namespace detail {
constinit std::atomic<std::uint32_t> fork_generation{0};
constinit std::atomic<bool> exiting{false};
constinit std::atomic<std::uint32_t> device_work{0};
}  // namespace detail

namespace {
// Registered once, at load: a child must find the generation moved on before it can touch an
// object.
const int handlers_installed = [] {
  pthread_atfork(nullptr, nullptr, [] {
    detail::fork_generation.fetch_add(1, std::memory_order_relaxed);
    detail::device_work.store(0);  // of threads that are not here
  });
  std::atexit([] { set_process_exiting(); });
  return 1;
}();
}  // namespace

ProcessMark::ProcessMark() noexcept
    : generation_(detail::fork_generation.load(std::memory_order_relaxed)) {
  static_cast<void>(handlers_installed);
}

void detail::throw_forked(const char* what) {
  throw Forked(text(what, " belongs to the parent process: a forked child cannot use it"));
}

void set_process_exiting() noexcept {
  detail::exiting.store(true);
  for (int ms = 0; ms < 1000 && detail::device_work.load() > 0; ++ms)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace kvmem
