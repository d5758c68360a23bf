// Memory of pools and staging rings cannot be had, or not be pinned: a typed error, and nothing is
// left behind.
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "fault/scenario.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

std::size_t mapped_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}
std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// Until it goes: at most so much.
class Limit {
 public:
  Limit(__rlimit_resource resource, rlim_t most) : resource_(resource) {
    getrlimit(resource_, &before_);
    const rlimit now{.rlim_cur = most, .rlim_max = before_.rlim_max};
    set_ = setrlimit(resource_, &now) == 0;
  }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;
  ~Limit() { setrlimit(resource_, &before_); }
  [[nodiscard]] bool set() const noexcept { return set_; }

 private:
  __rlimit_resource resource_;
  rlimit before_{};
  bool set_ = false;
};

PoolOptions pool_of(std::size_t bytes, bool shared) {
  return {.block_bytes = MiB, .capacity_bytes = bytes, .region = {.shared = shared}};
}

class NoMapping : public ::testing::TestWithParam<bool> {  // shared
 protected:
  // What a process makes once: the arena of a touching thread, for one.
  void SetUp() override { BlockPool(device_, pool_of(MiB, GetParam())); }
  void TearDown() override {
    EXPECT_EQ(open_descriptors(), descriptors_);
    EXPECT_TRUE(device_->pinned().empty());
  }
  std::shared_ptr<ScriptedDevice> device_ = scenario_device({.memory = HostMemory::pinned});
  std::ptrdiff_t descriptors_ = open_descriptors();
};

TEST_P(NoMapping, APoolThatCannotBePinnedLeavesNothingBehind) {
  const std::size_t before = mapped_bytes();
  for (int times = 0; times < 8; ++times) {
    device_->fail(CallKind::pin, 1);
    EXPECT_THROW(BlockPool(device_, pool_of(16 * MiB, GetParam())), CapacityError);
  }
  EXPECT_LT(mapped_bytes(), before + 64 * MiB) << "of 128 MiB";
}

TEST_P(NoMapping, APoolBeyondAnyAddressSpaceIsRefused) {
  PoolOptions options = pool_of(0, GetParam());
  options.block_bytes = std::size_t{1} << 62;
  options.capacity_bytes = options.block_bytes;
  EXPECT_THROW(BlockPool(device_, options), CapacityError);
}

// As far as it comes: the mapping itself, the trimmed ends, the stacks of the touching threads.
TEST_P(NoMapping, WhateverAddressSpaceIsLeftAPoolIsMadeOrRefused) {
  if (sanitized) GTEST_SKIP() << "a sanitizer ends the process when it finds no address space";
  const auto make = [&] { BlockPool(device_, pool_of(8 * MiB, GetParam())); };
  const std::size_t before = mapped_bytes();
  std::size_t made = 0, refused = 0;
  for (std::size_t left = 0; left < 48 * MiB; left += MiB / 2) {
    const Limit limit(RLIMIT_AS, mapped_bytes() + left);
    ASSERT_TRUE(limit.set());
    try {
      make();
      ++made;
    } catch (const Error&) {
      ++refused;
    } catch (const std::bad_alloc&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 15U);
  EXPECT_GT(made, 15U);
  EXPECT_LT(mapped_bytes(), before + 128 * MiB) << "of 768 MiB";
}

TEST_P(NoMapping, AMissingDescriptorIsACapacityErrorForSharedMemoryOnly) {
  if (sanitized) GTEST_SKIP() << "UBSan looks at objects through a pipe and finds none";
  const Limit limit(RLIMIT_NOFILE, 0);
  ASSERT_TRUE(limit.set());
  if (GetParam())
    EXPECT_THROW(BlockPool(device_, pool_of(MiB, true)), CapacityError);
  else
    EXPECT_NO_THROW(BlockPool(device_, pool_of(MiB, false)));
  EXPECT_THROW(WakeList(), Error);
}

INSTANTIATE_TEST_SUITE_P(Memory, NoMapping, ::testing::Values(false, true),
                         [](const auto& shared) { return shared.param ? "Shared" : "Private"; });

// One ring for each direction, behind the pool that is not pinned.
TEST(NoPin, AManagerWhoseStagingRingCannotBePinnedLeavesNothingBehind) {
  const auto device = scenario_device({.memory = HostMemory::staged});
  const auto runtime = Runtime::make(device);
  const CacheMemory cache(4);
  PoolOptions options = pool_of(MiB, false);
  options.block_bytes = CacheMemory::block_bytes();
  options.pin = Pin::never;
  const auto pool = std::make_shared<BlockPool>(device, options);
  ManagerConfig config = without_reaper();
  config.staging_piece_bytes = 4 * MiB;  // 16 MiB a ring
  const std::size_t before = mapped_bytes();
  for (const std::size_t kth : {1U, 2U, 1U, 2U}) {
    device->fail(CallKind::pin, kth);
    EXPECT_THROW(static_cast<void>(Manager::make(runtime, cache.layout(), pool, config)),
                 CapacityError);
    EXPECT_TRUE(device->pinned().empty());
    EXPECT_EQ(device->live_streams(), 0);
  }
  EXPECT_LT(mapped_bytes(), before + 48 * MiB) << "of 96 MiB";
  device->heal();
  EXPECT_NO_THROW(static_cast<void>(Manager::make(runtime, cache.layout(), pool, config)));
  EXPECT_TRUE(device->pinned().empty());
}

}  // namespace
}  // namespace kvmem::test
