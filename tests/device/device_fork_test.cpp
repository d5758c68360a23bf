// Devices without threads of their own, let go of in a forked child. Of the host device that is in
// host_device_end_test.cpp.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "device/virtual_device.hpp"
#include "support/child_process.hpp"
#include "support/fake_cudart.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

void expect_that_a_fork_while_a_thread_sleeps_never_hangs_the_child(
    std::shared_ptr<Device> device) {
  constexpr Nanoseconds millisecond = 1'000'000;
  std::atomic<bool> stop{false};
  std::atomic<int> sleeps{0};
  std::thread sleeper([&, asleep = device.get()] {  // sleeps most of the time
    for (; !stop; ++sleeps)
      asleep->progress().sleep(asleep->progress().value(),
                               std::chrono::nanoseconds(10 * millisecond));
  });
  EXPECT_TRUE(comes_true([&] { return sleeps > 1; }));
  bool good = true;
  for (int i = 0; i < 20 && good; ++i) {
    good = true_in_child([&] {
      alarm(10);
      device.reset();  // the last owner, as far as the child knows
      return true;
    });
  }
  EXPECT_TRUE(good);
  stop = true;
  sleeper.join();
}

TEST(VirtualDeviceFork, AForkWhileAThreadSleepsNeverHangsTheChild) {
  expect_that_a_fork_while_a_thread_sleeps_never_hangs_the_child(make_virtual_device({}));
}

TEST(CudaDeviceFork, AForkWhileAThreadSleepsNeverHangsTheChild) {
  const FakeCudart fake(13);
  expect_that_a_fork_while_a_thread_sleeps_never_hangs_the_child(
      cuda::make_cuda_device(fake.runtime()));
}

}  // namespace
}  // namespace kvmem::test
