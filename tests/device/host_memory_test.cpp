#include "device/host_memory.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/child_process.hpp"

namespace kvmem {
namespace {

TEST(HostMemory, IsWholePagesOfZeros) {
  auto* const base = static_cast<std::byte*>(map_memory(5000));
  const std::span pages(base, 8192);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(base) % 4096, 0U);
  EXPECT_TRUE(std::ranges::all_of(pages, [](std::byte byte) { return byte == std::byte{0}; }));
  std::ranges::fill(pages, std::byte{1});
  unmap_memory(base, 5000);
}

TEST(HostMemory, ZeroBytesAreRefused) {
  EXPECT_THROW(static_cast<void>(map_memory(0)), InvalidArgument);
}

TEST(HostMemory, MoreThanIsAvailableIsRefusedWithTheNumbers) {
  const std::uint64_t all = machine_memory_bytes();
  ASSERT_GT(all, 0U);
  try {
    static_cast<void>(map_memory(2 * all));
    FAIL() << "twice the memory of the machine was mapped";
  } catch (const CapacityError& refusal) {
    EXPECT_EQ(refusal.shortage.bound, "MemAvailable bytes");
    EXPECT_EQ(refusal.shortage.wanted, 2 * all);
    EXPECT_GT(refusal.shortage.free, 0U);
    EXPECT_LT(refusal.shortage.free, all);
  }
}

TEST(HostMemory, OnlyWholePagesCanBeLocked) {
  auto* const base = static_cast<std::byte*>(map_memory(8192));
  EXPECT_THROW(lock_memory(base, 0), InvalidArgument);
  EXPECT_THROW(lock_memory(base, 100), InvalidArgument);
  EXPECT_THROW(lock_memory(base + 1, 4096), InvalidArgument);
  EXPECT_NO_THROW(lock_memory(base, 8192));
  unlock_memory(base, 8192);
  unmap_memory(base, 8192);
}

// Public failure 59: pinning failed and there was no way to go on without.
TEST(HostMemory, LockingOverTheLimitIsRefusedWithTheNumbers) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers ignore mlock";
#endif
  EXPECT_TRUE(test::true_in_child([] {
    constexpr std::size_t limit = 4 * 4096;
    const rlimit small{limit, limit};
    if (setrlimit(RLIMIT_MEMLOCK, &small) != 0) return false;
    if (geteuid() == 0 && setuid(65534) != 0) return false;  // root has no limit
    void* const base = map_memory(2 * limit);
    lock_memory(base, 4096);
    try {
      lock_memory(base, 2 * limit);
    } catch (const CapacityError& refusal) {
      const Shortage& numbers = refusal.shortage;
      return numbers.bound == "RLIMIT_MEMLOCK" && numbers.wanted == 2 * limit &&
             numbers.largest == limit && numbers.held == 4096 && numbers.free == limit - 4096;
    }
    return false;
  }));
}

}  // namespace
}  // namespace kvmem
