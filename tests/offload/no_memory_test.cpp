// Managers with checksums that are made without enough memory. The allocations of this program fail
// where a test says so.
#include <filesystem>
#include <iterator>
#include <new>
#include <thread>

#include <gtest/gtest.h>

#include "fault/allocation_operators.cpp"
#include "support/allocation_faults.hpp"
#include "support/offload_world.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

std::ptrdiff_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(ChecksumsWithoutMemory, AManagerThatIsNotMadeLeavesNoThreadAndGivesItsPoolBack) {
  std::thread([] {}).join();  // TSan makes one of its own beside the first
  const std::ptrdiff_t before = threads_of_this_process();
  bool ran_out = true;
  for (std::size_t kth = 1; ran_out; ++kth) {
    ASSERT_LT(kth, 1000U);
    const auto device = still_device();
    const CacheMemory cache(8);
    const auto runtime = Runtime::make(device);
    PoolOptions options;
    options.block_bytes = CacheMemory::block_bytes();
    options.capacity_bytes = std::size_t{4} * 8192;
    const auto pool = std::make_shared<BlockPool>(device, options);
    ManagerConfig config = without_reaper();
    config.checksum = Checksum::always;
    config.checksum_workers = 4;
    {
      const ArmedAllocations armed;
      fail_allocation(kth);
      try {
        static_cast<void>(Manager::make(runtime, cache.layout("host"), pool, config));
      } catch (const std::bad_alloc&) {
      }
      ran_out = failed_allocations() > 0;
      heal_allocations();
    }
    ASSERT_TRUE(comes_true([&] {
      return pool.use_count() == 1 && threads_of_this_process() == before;
    })) << "allocation "
        << kth << ": the pool is used " << pool.use_count() << " times";
  }
}

}  // namespace
}  // namespace kvmem::test
