// The operators of this program: they fail where support/allocation_faults.hpp says so.
#include <cstdlib>
#include <new>

#include "support/allocation_faults.hpp"

// Not inlined: the compiler would see malloc() and free() and take them for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (kvmem::test::allocation_faults.next_fails()) throw std::bad_alloc();
  void* const memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  ++kvmem::test::live_allocations;
  return memory;
}
// The sanitizers bring one of their own, which goes with their own operator delete.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return ::operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (memory != nullptr) --kvmem::test::live_allocations;
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  ::operator delete(memory);
}
