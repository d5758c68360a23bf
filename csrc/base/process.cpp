#include "base/process.hpp"

#include <pthread.h>

#include <cstdlib>

#include "base/error.hpp"

namespace kvmem {

namespace detail {
constinit std::atomic<std::uint32_t> fork_generation{0};
constinit std::atomic<bool> exiting{false};
}  // namespace detail

namespace {
// Registered once, at load: a child must find the generation moved on before it can touch an
// object.
const int handlers_installed = [] {
  pthread_atfork(nullptr, nullptr,
                 [] { detail::fork_generation.fetch_add(1, std::memory_order_relaxed); });
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

void set_process_exiting() noexcept { detail::exiting.store(true, std::memory_order_release); }

}  // namespace kvmem
