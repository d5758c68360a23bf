// Makes operator new fail where a test says so. The operators that ask are in
// fault/allocation_operators.cpp; a program without that file is not affected.
//
// Only what is allocated inside ArmedAllocations is counted and may fail, and of that not what is
// inside UncountedAllocations: a test's own bookkeeping is none of its subject. Each thread has its
// own count.
#pragma once

#include <atomic>
#include <cstddef>

namespace kvmem::test {

struct AllocationFaults {
  std::size_t left = 0;   // until the one that fails; 0: none will
  std::size_t times = 0;  // how many fail in a row from there on
  std::size_t failed = 0;
  int armed = 0, uncounted = 0;

  [[nodiscard]] bool next_fails() noexcept {
    if (left == 0 || armed == 0 || uncounted > 0) return false;
    if (left > 1) {
      --left;
      return false;
    }
    if (--times == 0) left = 0;
    ++failed;
    return true;
  }
};
inline thread_local AllocationFaults allocation_faults;

// Given out and not taken back, in all threads.
inline std::atomic<std::ptrdiff_t> live_allocations{0};

// The kth allocation of this thread from now on fails, counted from 1, and those behind it.
inline void fail_allocation(std::size_t kth, std::size_t times = 1) noexcept {
  allocation_faults.left = kth;
  allocation_faults.times = times;
  allocation_faults.failed = 0;
}
inline void heal_allocations() noexcept { allocation_faults.left = 0; }
[[nodiscard]] inline std::size_t failed_allocations() noexcept { return allocation_faults.failed; }

class ArmedAllocations {
 public:
  ArmedAllocations() noexcept { ++allocation_faults.armed; }
  ArmedAllocations(const ArmedAllocations&) = delete;
  ArmedAllocations& operator=(const ArmedAllocations&) = delete;
  ~ArmedAllocations() { --allocation_faults.armed; }
};

class UncountedAllocations {
 public:
  UncountedAllocations() noexcept { ++allocation_faults.uncounted; }
  UncountedAllocations(const UncountedAllocations&) = delete;
  UncountedAllocations& operator=(const UncountedAllocations&) = delete;
  ~UncountedAllocations() { --allocation_faults.uncounted; }
};

}  // namespace kvmem::test
