// Devices that are made without enough memory. The allocations of this program fail where a test
// says so.
#include <unistd.h>

#include <new>

#include <gtest/gtest.h>

#include "device/host_device.hpp"
#include "fault/allocation_operators.cpp"
#include "support/allocation_faults.hpp"
#include "support/child_process.hpp"

namespace kvmem::test {
namespace {

TEST(HostDeviceWithoutMemory, EndsItsWorkersWhicheverAllocationFails) {
  EXPECT_TRUE(true_in_child([] {
    alarm(60);  // a worker that nobody ends would hang the child
    std::size_t refused = 0;
    for (std::size_t kth = 1;; ++kth) {
      const ArmedAllocations armed;
      fail_allocation(kth);
      try {
        static_cast<void>(make_host_device({.workers = 4}));
        if (failed_allocations() == 0) return refused > 0;
      } catch (const std::bad_alloc&) {
        ++refused;
      }
    }
  }));
}

}  // namespace
}  // namespace kvmem::test
