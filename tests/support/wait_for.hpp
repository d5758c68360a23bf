// Waiting for a condition that another thread makes true. A test that hangs fails instead.
#pragma once

#include <chrono>
#include <thread>

namespace kvmem::test {

template <class Condition>
[[nodiscard]] bool comes_true(Condition&& condition,
                              std::chrono::seconds at_most = std::chrono::seconds(30)) {
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace kvmem::test
