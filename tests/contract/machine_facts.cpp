// Memory, the clock, and sleeping.
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>

#include "base/error.hpp"
#include "contract/device_contract.hpp"

namespace kvmem::contract {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Nanoseconds millisecond = 1'000'000;
constexpr Nanoseconds for_ever = std::numeric_limits<Nanoseconds>::max();

TEST_P(DeviceContract, ADeviceSaysWhatItIs) {
  const DeviceInfo& info = device().info();
  EXPECT_FALSE(info.kind.empty());
  EXPECT_EQ(info.name.rfind(info.kind, 0), 0U) << info.name;
  EXPECT_FALSE(info.copy_kernel.empty());
  EXPECT_GT(info.memory_bytes, 0U);
  EXPECT_GT(info.max_descriptors, 0U);
}

TEST_P(DeviceContract, DeviceMemoryIsAlignedTo256BytesAndOverlapsNoOther) {
  std::byte* const first = device_memory(5000);
  std::byte* const second = device_memory(5000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 256, 0U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second) % 256, 0U);
  write_device(first, pattern(5000, 1));
  write_device(second, pattern(5000, 2));
  EXPECT_EQ(read_device(first, 5000), pattern(5000, 1));
}

TEST_P(DeviceContract, ZeroBytesOfDeviceMemoryAreRefused) {
  EXPECT_THROW(static_cast<void>(device().allocate(0)), InvalidArgument);
}

TEST_P(DeviceContract, MoreDeviceMemoryThanThereIsIsRefusedWithTheNumbers) {
  for (const std::size_t bytes : {std::size_t{1} << 50, ~std::size_t{0}}) {
    try {
      static_cast<void>(device().allocate(bytes));
      ADD_FAILURE() << bytes << " bytes were given";
    } catch (const CapacityError& refusal) {
      EXPECT_EQ(refusal.shortage.wanted, bytes);
      EXPECT_LT(refusal.shortage.free, bytes);
    }
  }
  static_cast<void>(device_memory(4096));  // and nothing is broken by it
}

TEST_P(DeviceContract, HostMemoryCanBePinnedAgainAfterItWasUnpinned) {
  const std::unique_ptr<void, decltype(&std::free)> page(std::aligned_alloc(4096, 8192),
                                                         &std::free);
  for (int i = 0; i < 2; ++i) {
    device().pin(page.get(), 8192);
    device().unpin(page.get(), 8192);
  }
}

TEST_P(DeviceContract, TheClockNeverGoesBack) {
  Nanoseconds before = device().now();
  for (int i = 0; i < 100; ++i) {
    const Nanoseconds now = device().now();
    EXPECT_GE(now, before);
    before = now;
  }
}

TEST_P(DeviceContract, ASleeperReturnsAtOnceWhenProgressHasMovedMeanwhile) {
  const std::uint64_t seen = device().progress().value();
  device().progress().bump();
  device().sleep(seen, for_ever, false);
  device().sleep(seen, for_ever, true);
}

TEST_P(DeviceContract, ASleeperReturnsAfterItsTime) {
  const Clock::time_point start = Clock::now();
  for (const bool help : {false, true}) {
    device().sleep(device().progress().value(), 5 * millisecond, help);
    device().sleep(device().progress().value(), 0, help);
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
}

TEST_P(DeviceContract, ASleeperSeesAnEventThatWasReachedMeanwhile) {
  const StreamHandle stream = new_stream();
  stall(stream);
  const EventHandle event = record_now(stream);
  std::thread releasing([&] { unstall(stream); });
  while (true) {
    const std::uint64_t seen = device().progress().value();
    if (query(event) != EventState::pending) break;
    device().sleep(seen, 1000 * millisecond, false);
  }
  releasing.join();
  EXPECT_EQ(query(event), EventState::done);
}

TEST_P(DeviceContract, AnyoneMayMoveProgressToWakeASleeper) {
  const std::uint64_t seen = device().progress().value();
  std::thread waking([&] { device().progress().bump(); });
  while (device().progress().value() == seen) device().sleep(seen, for_ever, true);
  waking.join();
}

TEST_P(DeviceContract, ManySleepersSeeTheEndOfOneCopy) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(6'000'000, 1);
  std::byte* const memory = device_memory(source.size());
  stall(stream);
  to_device(memory, source, stream);
  const EventHandle event = record_now(stream);
  std::vector<std::thread> sleepers;
  std::atomic<int> woken{0};
  for (int i = 0; i < 4; ++i) {
    sleepers.emplace_back([&] {
      settle(event);
      ++woken;
    });
  }
  unstall(stream);
  for (std::thread& sleeper : sleepers) sleeper.join();
  EXPECT_EQ(woken, 4);
  EXPECT_TRUE(same(read_device(memory, source.size()), source));
}

}  // namespace
}  // namespace kvmem::contract
