// Failures that users of other systems reported in public: blocks on their way back to the pool.
// docs/decisions/public-failures.md has the cases.
#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "device/host_device.hpp"
#include "recycle/runtime.hpp"
#include "support/scripted_device.hpp"
#include "support/stall.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t block_bytes = 4096;

std::unique_ptr<BlockPool> make_pool(const std::shared_ptr<Device>& device, std::size_t slots) {
  PoolOptions options;
  options.block_bytes = block_bytes;
  options.capacity_bytes = slots * block_bytes;
  return std::make_unique<BlockPool>(device, options);
}

// Public failure 32: a tight loop of allocate, copy and free outran the automatic reclaim, and the
// pool grew until the memory was gone. Each block is filled again as soon as it is had again; the
// bytes that its last copy brought must be those of its last owner.
TEST(PublicFailures, ATightCopyLoopGetsAlongWithFourBlocks) {
  constexpr std::size_t slots = 4, rounds = 100'000;
  const auto device = make_host_device({.workers = 2});
  const auto runtime = Runtime::make(device);
  const auto pool = make_pool(device, slots);
  const Stream streams[] = {Stream(device), Stream(device)};
  struct Copy {  // of one slot; free to be written again when the slot is
    std::byte* target;
    const std::byte* source;
    std::size_t bytes = 64;
    std::size_t round = 0;
  };
  std::vector<std::byte> arrived(slots * 64);
  std::vector<Copy> copies(slots);
  for (std::size_t round = 1; round <= rounds; ++round) {
    HostBlocks block = runtime->acquire(*pool, 1, runtime->deadline_after(60), {});
    Copy& copy = copies[block.slots()[0]];
    copy.target = arrived.data() + block.slots()[0] * 64;
    copy.source = block.data(0);
    std::size_t last = 0;
    std::memcpy(&last, copy.target, sizeof last);
    ASSERT_EQ(last, copy.round);
    copy.round = round;
    std::memcpy(block.data(0), &round, sizeof round);
    const StreamHandle stream = streams[round % 2].handle();
    device->copy({&copy.target, &copy.source, &copy.bytes, 1}, Direction::to_device,
                 SourceAccess::stream_order, stream);
    runtime->release_after(block, {runtime->mark_stream(stream)});
  }
  const auto home = [&] { return pool->stats().slots.free == slots; };
  EXPECT_TRUE(runtime->wait_until(home, runtime->deadline_after(60), {}));
  EXPECT_EQ(pool->stats().acquired, rounds);
  EXPECT_EQ(pool->stats().slots.capacity, slots);
  EXPECT_GT(pool->stats().peak_quarantined, 0U);
}

// Public failure 33: the scan for finished copies stopped at the first unfinished one, so one slow
// event held back all the memory that was freed after it.
TEST(PublicFailures, OneSlowEventHoldsBackItsOwnBlockOnly) {
  constexpr std::size_t count = 100;
  for (const std::size_t slow : {std::size_t{0}, count / 2, count - 1}) {
    const auto device = std::make_shared<ScriptedDevice>();
    const auto runtime = Runtime::make(device);
    const auto pool = make_pool(device, count);
    std::vector<StreamHandle> streams;
    for (std::size_t i = 0; i < count; ++i) streams.push_back(device->create_stream());
    Stall stall(device, streams[slow]);
    std::vector<HostBlocks> blocks;
    for (std::size_t i = 0; i < count; ++i) blocks.push_back(std::move(*pool->try_acquire(1)));
    const SlotIndex held_back = blocks[slow].slots()[0];
    for (std::size_t i = 0; i < count; ++i) {
      runtime->release_after(blocks[i], {runtime->mark_stream(streams[i])});
    }
    runtime->advance();
    EXPECT_EQ(pool->stats().slots.quarantined, 1U);
    const auto others = pool->try_acquire(count - 1);
    ASSERT_TRUE(others);
    EXPECT_EQ(std::ranges::count(others->slots(), held_back), 0);
    stall.open();
    runtime->advance();
    EXPECT_TRUE(pool->try_acquire(1));
  }
}

// Public failure 44: blocks that had been freed behind a stream were looked up by that stream's
// event after the stream was destroyed.
TEST(PublicFailures, BlocksComeBackFromStreamsThatAreGone) {
  const auto device = std::make_shared<ScriptedDevice>();
  const auto runtime = Runtime::make(device);
  const auto pool = make_pool(device, 8);
  std::list<Stall> stalls;
  for (int i = 0; i < 8; ++i) {
    const StreamHandle stream = device->create_stream();
    stalls.emplace_back(device, stream);
    auto block = pool->try_acquire(1);
    runtime->release_after(*block, {runtime->mark_stream(stream)});
    device->destroy_stream(stream);
  }
  for (std::size_t home = 0; home < 8; ++home) {
    runtime->advance();
    EXPECT_EQ(pool->stats().slots.free, home);
    stalls.front().open();
    stalls.pop_front();
  }
  const StreamHandle young = device->create_stream();
  auto all = runtime->acquire(*pool, 8, Nanoseconds{0}, {});
  runtime->release_after(all, {runtime->mark_stream(young)});
  runtime->advance();
  EXPECT_EQ(pool->stats().slots.free, 8U);
}

}  // namespace
}  // namespace kvmem::test
