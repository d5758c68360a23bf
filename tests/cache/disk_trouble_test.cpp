// A disk of which one slot, one group or one moment is bad: the rest of the cache goes on, what was
// evicted stays away, and flush() and close() say what is so.
#include <atomic>
#include <chrono>
#include <thread>

#include "cache/cache_faults.hpp"
#include "cache/group_memory.hpp"
#include "tier/file_gate.hpp"

namespace kvmem::test {
namespace {

using std::chrono::milliseconds;

// Nobody but poll() moves the cache on, so that a load that nobody would ever end is found.
bool ends(CacheWorld& world, const std::shared_ptr<CacheTransfer>& transfer) {
  return comes_about(world, [&](const CacheStats&) { return transfer->done(); });
}

std::size_t evict(Cache& cache, const std::vector<std::uint64_t>& numbers) {
  const Keys keys(numbers);
  const auto pointers = keys.pointers();
  return cache.evict(pointers, Keys::bytes);
}

EntryState state_in(CacheWorld& world, std::uint64_t number, GroupIndex group) {
  const Keys keys{number};
  return world.cache().index().state(keys.pointers()[0], Keys::bytes, group);
}

// Writes of the first slot fail, as where a sector has gone bad.
MemoryFiles::Plan first_slot_is_bad() {
  return [](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
    const bool here = std::string(call.what) == "write" && call.path.ends_with(".kv") &&
                      call.at < CacheWorld::disk_slot_bytes();
    return here ? std::optional<std::int64_t>(-EIO) : std::nullopt;
  };
}

CacheWorldOptions stalling_soon() {
  CacheWorldOptions options{.disk_slots = 32};
  options.cache.disk.emplace();
  options.cache.disk->options.stall_after = milliseconds(300);
  options.cache.disk->options.close_within = milliseconds(100);
  return options;
}

// ---- a slot that cannot be written ----

TEST(DiskTrouble, ASlotThatCannotBeErasedDoesNotStopTheWrites) {
  CacheWorld world({.disk_slots = 8});
  world.store(numbers(0, 2));
  ASSERT_TRUE(world.cache().flush(10));
  world.files->set_plan(first_slot_is_bad());
  EXPECT_EQ(evict(world.cache(), {0, 1}), 4U);
  world.store({2});
  EXPECT_TRUE(comes_about(world, [](const CacheStats& stats) {
    return stats.feed->written == 3 && stats.feed->erasing == 0;
  }));
  EXPECT_TRUE(comes_about(world, [](const CacheStats& stats) {
    return stats.index.groups[1].retired == 1;
  })) << "it is never used again";
  world.store({3});
  EXPECT_TRUE(world.cache().flush(10)) << "the disk is well, but for one slot";
}

// ---- a group that has no room ----

class TwoGroupsOnDisk : public ::testing::Test {
 protected:
  TwoGroupsOnDisk() {
    CacheOptions options;
    options.key_bytes = Keys::bytes;
    options.groups = {{"state", {NeedKind::state}, manager_of(state_), 4},
                      {"full", {}, manager_of(full_), 100}};
    options.disk.emplace();
    options.disk->landing_blocks = 2;
    options.disk->options.path = "/cache";
    options.disk->options.files = files_;
    options.disk->options.workers = 2;
    options.disk->options.probe_after = std::chrono::nanoseconds(0);
    options.disk->options.capacity_bytes = 16 * CacheWorld::disk_slot_bytes();
    cache_ = Cache::make(std::move(options));
  }
  std::shared_ptr<Manager> manager_of(const GroupMemory& memory) {
    PoolOptions pool;
    pool.block_bytes = memory.block_bytes();
    pool.capacity_bytes = 128 * slot_alignment_bytes;
    return Manager::make(runtime_, memory.layout(), std::make_shared<BlockPool>(device_, pool),
                         without_reaper());
  }
  void store(std::uint64_t chain) {
    const Keys keys(numbers(100 * chain, 4));
    const auto pointers = keys.pointers();
    cache_
        ->try_store({.keys = pointers, .key_bytes = Keys::bytes, .owner = "a"},
                    {{-1, -1, -1, 3}, {0, 1, 2, 3}})
        ->wait(10);
  }
  bool comes_to_be_written(std::size_t blocks) {
    return comes_true([&] {
      static_cast<void>(cache_->poll());
      return cache_->stats().index.groups[3].ready == blocks;
    });
  }

  std::shared_ptr<MemoryFiles> files_ = std::make_shared<MemoryFiles>();
  std::shared_ptr<ModelDevice> device_ = still_device();
  std::shared_ptr<Runtime> runtime_ = Runtime::make(device_);
  GroupMemory state_{device_, 64, 0}, full_{device_, 64, 1};
  std::shared_ptr<Cache> cache_;
};

TEST_F(TwoGroupsOnDisk, OneWithoutRoomDoesNotKeepTheOtherFromBeingWritten) {
  store(0);
  ASSERT_TRUE(cache_->flush(10));
  ASSERT_EQ(cache_->stats().index.groups[2].slots, 1U) << "the disk has room for one state";
  const Keys keys(numbers(0, 4));
  const auto pointers = keys.pointers();
  static_cast<void>(cache_->index().remove(pointers, Keys::bytes, GroupIndex{0}));
  CacheHit hit = cache_->reserve(pointers, Keys::bytes, "b");
  ASSERT_EQ(hit.disk_blocks(), 1U);
  store(1);
  EXPECT_TRUE(comes_to_be_written(8));
  EXPECT_EQ(cache_->stats().feed->queued, 1U) << "its own state waits for the hit";
  EXPECT_FALSE(cache_->flush(0.01));
  hit.release();
  EXPECT_TRUE(cache_->flush(10));
  EXPECT_TRUE(cache_->close(10).quiet);
}

// ---- reads ----

TEST(DiskTrouble, ALoadFromDiskEndsThoughItsManagerIsClosed) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 6));
  world.to_disk(numbers(0, 6));
  FileGate gate;
  world.files->set_plan(gate.plan("read"));
  CacheHit hit = world.reserve(numbers(0, 6));
  const auto load = world.load(hit, 10);
  ASSERT_TRUE(gate.has_seen(2)) << "both landing blocks are in use";
  static_cast<void>(world.world().manager().close(0, {}));
  gate.open();
  EXPECT_TRUE(ends(world, load));
  EXPECT_EQ(load->state(), TransferState::failed);
  EXPECT_EQ(world.cache().stats().landing_free, 2U);
  world.files->set_plan(nullptr);
}

TEST(DiskTrouble, ALoadThatWaitsForALandingBlockOfAStalledDiskEnds) {
  const CacheWorldOptions patient{.disk_slots = 32};
  CacheWorld world(patient);
  world.store(numbers(0, 6));
  world.to_disk(numbers(0, 6));
  world.options = stalling_soon();
  world.reopen();
  FileGate gate;
  world.files->set_plan(gate.plan("read"));
  CacheHit hit = world.reserve(numbers(0, 2)), other = world.reserve(numbers(2, 4));
  const auto load = world.load(hit, 10);
  ASSERT_TRUE(gate.has_seen(2)) << "both landing blocks are in use, and both workers";
  const auto behind = world.load(other, 20);
  EXPECT_TRUE(ends(world, load));
  EXPECT_TRUE(ends(world, behind));
  EXPECT_EQ(behind->state(), TransferState::failed);
  gate.open();
  EXPECT_TRUE(comes_about(world, [](const CacheStats& stats) { return stats.landing_free == 2; }));
  world.files->set_plan(nullptr);
  world.options = patient;
  world.reopen();
  EXPECT_EQ(world.load_all(numbers(2, 4), 10), 4U) << "nothing was wrong with the blocks";
}

TEST(DiskTrouble, AHiccupOfTheMountForgetsNoKey) {
  for (const int error : {ESTALE, ENOTCONN}) {
    CacheWorld world({.disk_slots = 16});
    world.store(numbers(0, 6));
    world.to_disk(numbers(0, 6));
    world.files->set_plan(failing("read", error, 6));
    EXPECT_EQ(world.load_all(numbers(0, 6), 10), 0U);
    world.files->set_plan(nullptr);
    EXPECT_EQ(world.load_all(numbers(0, 6), 10), 6U);
    EXPECT_GT(evict(world.cache(), numbers(0, 6)), 0U);
    EXPECT_TRUE(comes_true([&] { return world.cache().flush(1); }));
    world.reopen();
    EXPECT_EQ(world.reserve(numbers(0, 6)).length(), 0U) << "evicted on demand, and back";
  }
}

TEST(DiskTrouble, WhatCouldNotBeReadIsNotFoundByTheNextCacheEither) {
  CacheWorld world({.disk_slots = 8});
  world.store({0});
  world.to_disk({0});
  world.files->set_plan(failing("read", 0, 1));  // the file ends early, which retires no slot
  EXPECT_EQ(world.load_all({0}, 10), 0U);
  world.files->set_plan(nullptr);  // and now it could be
  EXPECT_TRUE(world.cache().flush(10));
  world.reopen();
  EXPECT_EQ(world.reserve({0}).length(), 0U);
}

TEST(DiskTrouble, AFailedReadOfAnOldSlotLeavesTheNewOneAlone) {
  CacheWorld world({.disk_slots = 8});
  world.store({0});
  world.to_disk({0});
  CacheHit old = world.reserve({0}, "b");
  ASSERT_EQ(old.disk_blocks(), 1U);
  evict(world.cache(), {0});
  world.store({0});
  ASSERT_TRUE(comes_about(world, [](const CacheStats& stats) { return stats.feed->written == 2; }));
  EXPECT_EQ(world.evict({0}, GroupIndex{0}), 1U);
  world.files->set_plan(failing("read", EIO, 1));
  const auto load = world.load(old, 10);
  EXPECT_THROW(load->wait(10), Error);
  world.files->set_plan(nullptr);
  EXPECT_EQ(state_in(world, 0, 1), EntryState::ready);
  EXPECT_EQ(world.load_all({0}, 20), 1U);
  evict(world.cache(), {0});
  EXPECT_TRUE(comes_true([&] { return world.cache().flush(1); }));
  world.reopen();
  EXPECT_EQ(world.reserve({0}).length(), 0U);
}

// As it is at this moment, for a process that finds it behind one that was killed.
std::shared_ptr<MemoryFiles> copy_of(MemoryFiles& files) {
  auto copy = std::make_shared<MemoryFiles>();
  static_cast<void>(copy->make_folder("/cache"));
  for (const std::string& name : files.look("/cache").names) {
    const auto made = copy->open("/cache/" + name);
    auto& bytes = files.contents("/cache/" + name);
    const iovec part{bytes.data(), bytes.size()};
    static_cast<void>(made.file->write({&part, 1}, 0));
  }
  return copy;
}

TEST(DiskTrouble, WhatWasRemovedDoesNotComeBackFromAnOlderSlotOfIt) {
  CacheWorld world({.disk_slots = 2});
  world.store({0});
  ASSERT_TRUE(world.cache().flush(10));
  world.store({1});
  ASSERT_TRUE(world.cache().flush(10));
  FileGate gate;
  world.files->set_plan([&, first = std::make_shared<std::atomic<bool>>(true),
                         held = gate.plan("write")](const MemoryFiles::Call& call) {
    const bool holds = std::string(call.what) == "write" && first->exchange(false);
    return holds ? held(call) : std::nullopt;
  });
  world.store({2});  // into the slot of key 0, and the write does not get there
  ASSERT_TRUE(gate.has_seen(1));
  ASSERT_EQ(world.evict({0}, GroupIndex{0}), 1U);
  world.store({0});
  ASSERT_TRUE(comes_about(world, [](const CacheStats& stats) { return stats.feed->written == 3; }));
  const auto killed = copy_of(*world.files);
  gate.open();
  world.close();
  world.files = killed;
  world.reopen();
  EXPECT_EQ(world.cache().stats().disk->superseded, 1U);
  EXPECT_EQ(evict(world.cache(), {0}), 1U);
  EXPECT_TRUE(world.cache().flush(10));
  world.reopen();
  EXPECT_EQ(world.reserve({0}).length(), 0U);
}

// ---- flush and close ----

TEST(DiskTrouble, AKeyThatStaysInHostMemoryIsWrittenHoweverManyComeAndGo) {
  CacheWorldOptions options{.slots = 6, .disk_slots = 32};
  options.cache.disk.emplace();
  options.cache.disk->max_writes = 1;
  CacheWorld world(options);
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  world.store({99});
  ASSERT_TRUE(gate.has_seen(1));
  world.store({0});
  for (std::uint64_t key = 1; key <= 40; ++key) {
    static_cast<void>(world.reserve({0}));  // a system prompt: every request uses it
    world.store({key});
  }
  ASSERT_EQ(state_in(world, 0, 0), EntryState::ready);
  EXPECT_LE(world.cache().stats().feed->queued, 12U) << "and the queue does not grow";
  gate.open();
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(state_in(world, 0, 1), EntryState::ready);
  const DiskFeedStats feed = *world.cache().stats().feed;
  EXPECT_EQ(feed.written + feed.unwritten, 42U);
}

TEST(DiskTrouble, FlushWithoutADeadlineReturnsWhenTheDiskIsForEverShortOfSomething) {
  CacheWorldOptions options{.disk_slots = 8};
  options.cache.disk.emplace();
  options.cache.disk->max_writes = 1;
  CacheWorld world(options);
  world.files->set_plan(failing("write", EAGAIN, 1 << 30));
  world.store({0});
  EXPECT_FALSE(world.cache().flush(std::nullopt));
  world.files->set_plan(nullptr);
  EXPECT_TRUE(world.cache().flush(10));
  world.files->set_plan(failing("write", EAGAIN, 1 << 30));
  evict(world.cache(), {0});
  EXPECT_FALSE(world.cache().flush(std::nullopt)) << "nor an erasure";
  world.files->set_plan(nullptr);
  EXPECT_TRUE(world.cache().flush(10));
}

TEST(DiskTrouble, FlushDoesNotCallWrittenWhatACloseHasDropped) {
  CacheWorldOptions options = stalling_soon();
  options.cache.disk->options.stall_after = std::chrono::seconds(10);
  CacheWorld world(options);
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  world.store(numbers(0, 6));
  ASSERT_TRUE(gate.has_seen(2));
  std::atomic<bool> asks{false};
  bool said = true;
  std::thread flushing([&] {
    asks = true;
    said = world.cache().flush(std::nullopt);
  });
  EXPECT_TRUE(comes_true([&] { return asks.load(); }));
  const CacheCloseReport report = world.cache().close(0);
  EXPECT_GT(report.disk->dropped + report.unwritten, 0U);
  gate.open();
  flushing.join();
  EXPECT_FALSE(said);
  EXPECT_FALSE(world.cache().flush(0.0)) << "nor later";
  world.files->set_plan(nullptr);
}

TEST(DiskTrouble, NothingIsQueuedBehindAClose) {
  for (int round = 0; round < 100; ++round) {
    CacheWorldOptions options{.slots = 8, .disk_slots = 8};
    CacheWorld world(options);
    world.files->set_plan(failing("write", EIO, 1 << 30));
    world.store(numbers(0, 6));
    std::atomic<bool> stop{false};
    std::thread mover([&] {
      while (!stop) world.cache().submit_ready();
    });
    const CacheCloseReport report = world.cache().close(0);
    EXPECT_TRUE(comes_true([&] { return !world.cache().has_waiting(); }));
    stop = true;
    mover.join();
    EXPECT_EQ(world.cache().stats().feed->queued, 0U);
    // A write that fails just then is told of twice, and none is left out.
    EXPECT_GE(report.unwritten + report.disk->dropped + report.disk->running, 6U);
    world.files->set_plan(nullptr);
  }
}

TEST(DiskTrouble, CloseBesideAMoverLeavesNothingInFlightThatWasNotBegun) {
  World world(still_device(), {.device_blocks = 8, .slots = 10, .config = without_reaper()});
  const auto files = std::make_shared<MemoryFiles>();
  CacheOptions options;
  options.key_bytes = Keys::bytes;
  options.groups = {{"full", {}, world.manager_ptr(), 8}};
  options.disk.emplace();
  options.disk->landing_blocks = 2;
  options.disk->options.path = "/cache";
  options.disk->options.files = files;
  options.disk->options.workers = 0;  // whoever moves the cache on stands in the write
  options.disk->options.capacity_bytes = 8 * CacheWorld::disk_slot_bytes();
  const auto cache = Cache::make(std::move(options));
  FileGate gate;
  files->set_plan(gate.plan("write"));
  const Keys first{0}, second{1};
  const auto its = first.pointers(), others = second.pointers();
  std::thread mover([&] {
    cache->try_store({.keys = its, .key_bytes = Keys::bytes, .owner = "a"}, {{0}})->wait(30);
  });
  ASSERT_TRUE(gate.has_seen(1));
  const auto late =
      cache->try_store({.keys = others, .key_bytes = Keys::bytes, .owner = "a"}, {{1}});
  std::thread opener([&] {
    EXPECT_TRUE(comes_true([&] { return late->job().cancelled.load(); }));
    gate.open();
  });
  const CacheCloseReport report = cache->close(0);
  opener.join();
  mover.join();
  EXPECT_EQ(report.in_flight, 0U);
  EXPECT_EQ(late->state(), TransferState::cancelled);
  EXPECT_EQ(world.slots().free, 10U);
}

// Nobody but the reaper looks, and it sleeps soundly where nothing is to be done.
TEST(DiskTrouble, AnErasureThatAHitHoldsUpIsMadeWhenTheHitGoes) {
  CacheWorldOptions options{.disk_slots = 8, .config = {}};
  CacheWorld world(options, make_host_device({.workers = 1}));
  world.store({0});
  world.to_disk({0});
  CacheHit hit = world.reserve({0});
  ASSERT_EQ(hit.disk_blocks(), 1U);
  // The reaper looks around for a tenth of a second before it sleeps soundly.
  std::this_thread::sleep_for(milliseconds(250));
  EXPECT_EQ(evict(world.cache(), {0}), 1U);
  EXPECT_EQ(world.cache().stats().feed->erasing, 1U);
  hit.release();
  EXPECT_TRUE(comes_true([&] { return world.cache().stats().feed->erasing == 0; }));
}

}  // namespace
}  // namespace kvmem::test
