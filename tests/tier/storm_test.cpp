// Threads that write, read, erase and wait, on files that now and then refuse: every block that is
// read is right, every call that was accepted ends once. Most useful under TSan.
#include <cerrno>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "tier/disk_world.hpp"

namespace kvmem::test {
namespace {

struct Known {  // of one slot
  std::mutex mutex;
  std::uint64_t generation = 0;  // 0: nothing that must be there
};

// Small blocks, which a worker sums itself, and large ones.
struct DiskStorm : testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Bytes, DiskStorm, testing::Values(World::payload, std::size_t{256} << 10));

TEST_P(DiskStorm, EveryAcceptedCallEndsOnceAndNoWrongBlockIsRead) {
  constexpr SlotIndex slots = 20;
  const std::size_t payload = GetParam();
  const unsigned calls_each = payload == World::payload ? 1500 : 150;
  World world;
  world.options.block_bytes = payload;
  world.options.capacity_bytes = slots * (payload + 2 * disk_page_bytes);
  world.options.file_bytes = world.options.capacity_bytes / 3;
  world.options.workers = 3;
  world.options.max_queued = 8;
  DiskSlots& tier = world.open();
  std::atomic<unsigned> calls{0};
  world.files->set_plan([&](const MemoryFiles::Call&) -> std::optional<std::int64_t> {
    const unsigned number = ++calls;
    if (number % 101 == 0) return -ENOSPC;
    if (number % 13 == 0) return -EINTR;
    return std::nullopt;
  });
  std::vector<Known> known(slots);
  std::atomic<std::uint64_t> accepted{0}, ended{0}, right{0};
  const auto user = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (unsigned i = 0; i < calls_each; ++i) {
      const auto slot = static_cast<SlotIndex>(random() % slots);
      const DiskKey key = key_of(slot);
      const auto lent = std::make_shared<Buffer>(payload);
      const unsigned kind = random() % 8;
      Known& mine = known[slot];
      DiskSubmit answer = DiskSubmit::full;
      if (kind == 0) {
        answer = tier.try_erase(slot, [&](const DiskResult&) { ++ended; });
      } else if (kind < 4) {
        lent->fill(slot, 0, payload);
        answer = tier.try_write(slot, record_of(key, payload), lent->data(),
                                [&, lent](const DiskResult& result) {
                                  if (result.outcome == DiskOutcome::ok) {
                                    const std::lock_guard lock(mine.mutex);
                                    mine.generation = result.generation;
                                  }
                                  ++ended;
                                });
      } else {
        const std::uint64_t generation = [&] {
          const std::lock_guard lock(mine.mutex);
          return mine.generation;
        }();
        answer = tier.try_read(slot, record_of(key, payload), generation, lent->data(),
                               [&, slot, lent](const DiskResult& result) {
                                 if (result.outcome == DiskOutcome::ok) {
                                   EXPECT_TRUE(lent->holds(slot, 0, payload));
                                   ++right;
                                 }
                                 ++ended;
                               });
      }
      if (answer == DiskSubmit::accepted) {
        ++accepted;
      } else {
        std::this_thread::yield();
      }
      if (i % 100 == 0) static_cast<void>(tier.stats());
    }
  };
  std::vector<std::thread> users;
  for (unsigned seed = 0; seed < 3; ++seed) users.emplace_back(user, seed);
  for (std::thread& thread : users) thread.join();
  EXPECT_EQ(tier.close(std::chrono::hours(1)).running, 0);
  EXPECT_EQ(ended, accepted);
  EXPECT_GT(right, calls_each / 30);
  EXPECT_EQ(tier.stats().queued, 0);
}

TEST(DiskStormAtTheEnd, ClosingBesideThoseWhoCallLosesNoCompletion) {
  for (int round = 0; round < 30; ++round) {
    World world;
    world.options.workers = 2;
    DiskSlots& tier = world.open();
    std::atomic<std::uint64_t> accepted{0}, ended{0};
    std::thread user([&] {
      const DiskKey key = key_of(1);
      for (SlotIndex i = 0;; ++i) {
        const auto lent = std::make_shared<Buffer>(World::payload);
        const DiskSubmit answer =
            tier.try_write(i % 20, record_of(key, World::payload), lent->data(),
                           [&, lent](const DiskResult&) { ++ended; });
        if (answer == DiskSubmit::closed) return;
        if (answer == DiskSubmit::accepted) ++accepted;
      }
    });
    EXPECT_TRUE(comes_true([&] { return accepted > 3; }));
    std::thread closer([&] { EXPECT_EQ(tier.close(std::chrono::hours(1)).running, 0); });
    EXPECT_EQ(tier.close(std::chrono::hours(1)).running, 0);
    closer.join();
    user.join();
    EXPECT_EQ(ended, accepted);
  }
}

}  // namespace
}  // namespace kvmem::test
