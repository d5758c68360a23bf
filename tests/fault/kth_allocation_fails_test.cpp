// Host memory runs out: the k-th allocation inside kvmem fails, for every k of the scenario, alone
// and with the one behind it.
//
// The call throws bad_alloc or a typed error, or works all the same. What cannot throw does not
// allocate, or the process would end here.
#include <cstdio>

#include "fault/scenario.hpp"

namespace kvmem::test {
namespace {

struct Lack {
  ScenarioOptions scenario;
  std::size_t times, stride;
  const char* name;
};
void PrintTo(const Lack& lack, std::ostream* out) { *out << lack.name; }

class KthAllocationFails : public ::testing::TestWithParam<Lack> {
 protected:
  // False: the scenario allocates less often.
  static bool run(std::size_t k) {
    const ScenarioOptions& options = GetParam().scenario;
    const std::ptrdiff_t live_before = live_allocations;
    auto device = scenario_device(options);
    std::weak_ptr<Manager> manager;
    fail_allocation(k, GetParam().times);
    try {
      Scenario scenario(device, options);
      manager = scenario.weak_manager();
      scenario.run();
      if (!HasFailure()) scenario.finish();
      if (failed_allocations() == 0) scenario.expect_that_it_did_much();
    } catch (const Error&) {  // a manager that cannot be made leaves nothing behind
      EXPECT_GT(failed_allocations(), 0U);
    } catch (const std::bad_alloc&) {
      EXPECT_GT(failed_allocations(), 0U);
    }
    heal_allocations();
    EXPECT_TRUE(manager.expired()) << "the manager leaked";
    manager.reset();
    EXPECT_EQ(device->live_events(), 0);
    EXPECT_EQ(device->live_streams(), 0);
    EXPECT_TRUE(device->pinned().empty());
    device.reset();
    EXPECT_EQ(live_allocations - live_before, 0) << "leaked";
    return failed_allocations() > 0;
  }
};

TEST_P(KthAllocationFails, ForEveryK) {
  run(0);  // what is made once in a process
  const std::size_t stride = stride_of_many * GetParam().stride;
  std::size_t k = 1;
  for (; run(k); k += stride) ASSERT_FALSE(HasFailure()) << "where allocation " << k << " fails";
  std::printf("             %zu allocations, every %zu\n", k - 1, stride);
  EXPECT_GT(k, 2000U) << "the scenario is too small";
}

INSTANTIATE_TEST_SUITE_P(
    Memory, KthAllocationFails,
    ::testing::Values(Lack{{.timeline = true}, 1, 1, "Ordinary"},
                      Lack{{.memory = HostMemory::staged}, 1, 1, "Staged"},
                      Lack{{.timeline = true, .checksum = true}, 1, 3, "Checksums"},
                      Lack{{.memory = HostMemory::staged, .timeline = true}, 2, 9, "Twice"}),
    [](const auto& lack) { return lack.param.name; });

}  // namespace
}  // namespace kvmem::test
