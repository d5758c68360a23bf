// Who looks next when something may go on. A test that hangs here found nobody.
#include <atomic>
#include <chrono>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/host_device.hpp"
#include "device/virtual_device.hpp"
#include "support/offload_world.hpp"
#include "support/stall.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

// The lanes are full of what waits for a stall, so a first transfer waits in kvmem, and a second
// one, of the other direction, runs behind it. Cancelling the first sets the second free, and
// nobody but the reaper can look.
void expect_that_a_cancel_sets_free_what_ran_behind(bool somebody_waits_meanwhile) {
  World world(make_host_device({.workers = 1}), {.slots = 8, .config = {}});
  const auto copy = world.stored(31, 500);
  Stall stall(world.device_ptr());
  std::vector<HostBlocks> targets;
  for (int i = 0; i < 5; ++i) targets.push_back(world.pool().try_acquire(1).value());
  // The reaper looks around for a tenth of a second before it sleeps soundly.
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  std::thread waiter;
  std::atomic<bool> leaves{false};
  if (somebody_waits_meanwhile) {
    waiter = std::thread([&] {
      struct Leaves {};
      const auto interrupt = [&] {
        if (leaves) throw Leaves();
      };
      EXPECT_THROW(
          static_cast<void>(world.runtime().acquire(world.pool(), 8, std::nullopt, interrupt)),
          Leaves);
    });
    EXPECT_TRUE(comes_true([&] { return world.pool().stats().waiters == 1; }));
  }
  std::vector<std::shared_ptr<Transfer>> stalled;
  for (BlockId block = 0; block < 5; ++block) {
    stalled.push_back(
        world.offload_into({.blocks = {block}, .after = world.after_event(stall.event())},
                           std::move(targets[static_cast<std::size_t>(block)])));
  }
  const auto second = world.restore({.blocks = {20},
                                     .after = world.after_transfer(*stalled.back()),
                                     .priority = Priority::background},
                                    *copy);
  leaves = true;
  if (waiter.joinable()) waiter.join();
  EXPECT_EQ(stalled.back()->cancel(), CancelOutcome::not_submitted);
  EXPECT_TRUE(comes_true([&] { return second->done(); })) << "nobody looked";
}

TEST(Waking, ACancelSetsFreeWhatRanBehindIt) {
  expect_that_a_cancel_sets_free_what_ran_behind(false);
}

// A thread that waits is woken instead of the reaper; when it leaves, the reaper must know.
TEST(Waking, WhoLeavesOffWaitingHandsOverToTheReaper) {
  expect_that_a_cancel_sets_free_what_ran_behind(true);
}

// What runs behind a transfer that is being checked waits in kvmem, here in the other direction.
TEST(Waking, TheEndOfACheckSetsFreeWhatRanBehindIt) {
  ManagerConfig config;
  config.checksum = Checksum::always;
  World world(make_host_device({.workers = 1}), {.slots = 8, .config = config});
  const auto copy = world.stored(31, 500);
  const auto first = world.offload({.blocks = {20}});
  const auto second = world.restore({.blocks = {20}, .after = world.after_transfer(*first)}, *copy);
  EXPECT_TRUE(comes_true([&] { return second->done(); })) << "nobody looked";
  EXPECT_TRUE(first->done());
  EXPECT_TRUE(CacheMemory::holds(first->result()->blocks(), 0, 20));
  EXPECT_TRUE(world.cache().holds(20, 500));
}

// Who asks for a result reaps, and what that made room for must go on.
TEST(Waking, AskingForAResultSubmitsWhatItMadeRoomFor) {
  const auto device = make_virtual_device({.moves_bytes = false});  // no reaper of its own
  Region region;
  region.address = std::uint64_t{1} << 46;  // addresses only
  region.stride_bytes = region.payload_bytes = 4096;
  region.block_count = 100;
  region.memory = device->info().name;
  PoolOptions options;
  options.block_bytes = 4096;
  options.capacity_bytes = std::size_t{100} * 4096;
  const auto pool = std::make_shared<BlockPool>(device, options);
  ManagerConfig config;
  config.window_bytes = smallest_window_bytes;
  const auto manager = Manager::make(Runtime::make(device), KVLayout({region}), pool, config);
  TransferRequest request;
  request.blocks.resize(100);
  std::iota(request.blocks.begin(), request.blocks.end(), BlockId{0});
  Admission admission = manager->admit(TransferKind::offload, request, true);
  ASSERT_TRUE(admission.try_take());
  const auto transfer = manager->offload(request, std::move(admission));
  for (int tries = 0; tries < 1000 && !transfer->done(); ++tries) {
    while (device->step()) {
    }
    try {
      EXPECT_NE(transfer->result(), nullptr);
    } catch (const NotDone&) {
    }
  }
  EXPECT_TRUE(transfer->done()) << "it reaped and submitted nothing";
}

}  // namespace
}  // namespace kvmem::test
