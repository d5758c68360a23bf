// Counts what operator new gives out. Include it from one file of a test program: it replaces the
// operators.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace kvmem::test {
inline std::atomic<std::size_t> allocations{0};
inline std::atomic<std::size_t> largest_allocation_bytes{0};
}  // namespace kvmem::test

// Not inlined: the compiler would see malloc() and free() and take them for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++kvmem::test::allocations;
  kvmem::test::largest_allocation_bytes =
      std::max(kvmem::test::largest_allocation_bytes.load(), bytes);
  if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
