// What a cache owes to those who let go of it, evict, drop or close while something is under way.
#include <thread>

#include "cache/cache_faults.hpp"
#include "cache/group_memory.hpp"
#include "tier/file_gate.hpp"

namespace kvmem::test {
namespace {

// A call that has entered and not yet started anything when the cache is closed starts nothing.
TEST(CacheEnds, NothingIsCopiedIntoSlotsThatACloseHasGivenBack) {
  constexpr SlotIndex slots = 512;
  const Keys keys(numbers(0, slots));
  const auto pointers = keys.pointers();
  Cache::Blocks blocks(1);
  for (std::size_t i = 0; i < slots; ++i) blocks[0].push_back(static_cast<BlockId>(i));
  for (int round = 0; round < 30; ++round) {
    World world(make_host_device({}),
                {.device_blocks = slots, .slots = slots, .config = without_reaper()});
    CacheOptions options;
    options.key_bytes = Keys::bytes;
    options.groups = {{"full", {}, world.manager_ptr(), slots}};
    const auto cache = Cache::make(std::move(options));
    std::shared_ptr<CacheTransfer> store;
    std::atomic<bool> going{false};
    std::thread user([&] {
      going = true;
      try {
        store =
            cache->try_store({.keys = pointers, .key_bytes = Keys::bytes, .owner = "a"}, blocks);
      } catch (const Closed&) {
      }
    });
    while (!going) {
    }
    for (int i = 0; i < round * 40; ++i) static_cast<void>(cache->index().key_bytes());
    const CacheCloseReport report = cache->close(0);
    if (report.in_flight == 0) {
      std::optional<HostBlocks> mine = world.pool().try_acquire(slots);
      if (mine) std::memset(world.pool().data(), 0xEE, slots * world.pool().slot_bytes());
      user.join();
      for (std::size_t i = 0; mine && i < slots; ++i)
        ASSERT_EQ(*mine->data(i), std::byte{0xEE}) << "round " << round;
    } else {
      user.join();
    }
    ASSERT_TRUE(comes_true([&] { return cache->poll() == 0; }));
  }
}

TEST(CacheEnds, TargetsAreInUseUntilTheLoadHasEnded) {
  int seen = 0;
  for (int round = 0; seen < 5 && round < 2000; ++round) {
    CacheWorld world(checksummed({}));
    world.store(numbers(0, 8));
    damage_in_host_memory(world, 5);
    CacheHit hit = world.reserve(numbers(0, 8));
    const auto load = world.load(hit, 10);
    const std::vector<BlockId> targets{10, 11, 12, 13, 14, 15, 16, 17};
    Manager& manager = world.world().manager();
    EXPECT_TRUE(comes_true([&] {  // the first restore has ended; the load goes on with its prefix
      manager.submit_ready();
      return manager.stats().directions[1].failed > 0;
    }));
    const std::size_t busy = manager.busy(targets).size();
    if (!load->done()) {
      EXPECT_EQ(busy, targets.size());
      ++seen;
    }
    EXPECT_THROW(load->wait(10), Corrupt);
    EXPECT_EQ(load->loaded(), 5);
    EXPECT_TRUE(manager.busy(targets).empty());
  }
  EXPECT_GT(seen, 0);
}

// The entry of the write is not free then, only no longer to be found.
TEST(CacheEnds, WhatIsEvictedWhileAHitWaitsForItsWriteDoesNotComeBack) {
  FileGate gate;
  CacheWorld world({.disk_slots = 8});
  world.files->set_plan(gate.plan("write"));
  world.store({0});
  static_cast<void>(world.cache().poll());
  ASSERT_TRUE(gate.has_seen(1));
  world.evict({0}, GroupIndex{0});
  CacheHit hit = world.reserve({0}, "b", Pending::attach);
  ASSERT_EQ(hit.length(), 1);
  const Keys key{0};
  EXPECT_EQ(world.cache().evict(key.pointers(), Keys::bytes), 1);
  gate.open();
  EXPECT_TRUE(comes_about(world, [](const CacheStats& stats) { return stats.feed->writing == 0; }));
  hit.release();
  EXPECT_TRUE(world.cache().flush(10));
  world.reopen();
  EXPECT_EQ(world.load_all({0}, 10), 0);
}

TEST(CacheEnds, WhatIsEvictedAfterItsSlotWentBadDoesNotComeBack) {
  for (const bool again : {true, false}) {
    CacheWorld world({.disk_slots = 8});
    world.store({0});
    world.to_disk({0});
    world.files->set_plan(failing("read", EIO, 1));
    EXPECT_EQ(world.load_all({0}, 10), 0);
    EXPECT_EQ(world.cache().stats().disk->retired, 1);
    if (again) world.store({0});
    EXPECT_TRUE(world.cache().flush(10));
    const Keys key{0};
    EXPECT_EQ(world.cache().evict(key.pointers(), Keys::bytes), again ? 2 : 0);
    EXPECT_TRUE(world.cache().flush(10));
    world.reopen();
    EXPECT_EQ(world.load_all({0}, 10), 0);
  }
}

TEST(CacheEnds, ABadSlotThatCannotBeErasedIsLeftAlone) {
  CacheWorld world({.disk_slots = 8});
  world.store({0});
  world.to_disk({0});
  world.files->set_plan([](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
    if (call.path.ends_with(".kv") && call.at < CacheWorld::disk_slot_bytes()) return -EIO;
    return std::nullopt;
  });
  EXPECT_EQ(world.load_all({0}, 10), 0);
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(
      world.cache().stats().disk->writes.ended[static_cast<std::size_t>(DiskOutcome::io_error)], 1);
  EXPECT_EQ(world.cache().stats().disk->degraded, std::nullopt);
  world.store({1});
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->written, 2);
  world.files->set_plan(nullptr);
}

TEST(CacheEnds, AGroupOverItsMarkIsWrittenWhateverOtherGroupsAreAt) {
  auto files = std::make_shared<MemoryFiles>();
  auto device = still_device();
  auto runtime = Runtime::make(device);
  GroupMemory full{device, 64, 0}, window{device, 64, 1};
  const auto manager_of = [&](const GroupMemory& memory) {
    PoolOptions pool;
    pool.block_bytes = memory.block_bytes();
    pool.capacity_bytes = 128 * slot_alignment_bytes;
    return Manager::make(runtime, memory.layout(), std::make_shared<BlockPool>(device, pool),
                         without_reaper());
  };
  CacheOptions options;
  options.key_bytes = Keys::bytes;
  options.groups = {{"full", {}, manager_of(full), 100},
                    {"window", {NeedKind::last, 2}, manager_of(window), 8}};
  options.disk.emplace();
  options.disk->write = DiskWrite::back;
  options.disk->write_back_free = 0.5;
  options.disk->landing_blocks = 2;
  options.disk->options.path = "/cache";
  options.disk->options.files = files;
  options.disk->options.workers = 2;
  options.disk->options.capacity_bytes = 256 * CacheWorld::disk_slot_bytes();
  const auto cache = Cache::make(std::move(options));
  const auto keys_of = [](std::uint64_t chain) { return Keys(numbers(100 * chain, 4)); };
  for (std::uint64_t chain = 0; chain < 10; ++chain) {
    const Keys keys = keys_of(chain);
    const Cache::Blocks blocks{{0, 1, 2, 3}, {-1, -1, 2, 3}};
    for (BlockId i = 0; i < 4; ++i) {
      full.fill(i, 100 * chain + static_cast<std::uint64_t>(i));
      window.fill(i, 100 * chain + static_cast<std::uint64_t>(i));
    }
    const auto pointers = keys.pointers();
    cache->try_store({.keys = pointers, .key_bytes = Keys::bytes, .owner = "a"}, blocks)->wait(10);
    EXPECT_TRUE(comes_true([&] {  // the window's share that is not written stays at the mark
      static_cast<void>(cache->poll());
      const CacheStats stats = cache->stats();
      return stats.feed->writing == 0 && stats.feed->written + 4 >= 2 * (chain + 1);
    }));
  }
  EXPECT_TRUE(cache->flush(10));
  for (std::uint64_t chain = 0; chain < 10; ++chain)
    EXPECT_EQ(cache->index().peek(keys_of(chain).pointers(), Keys::bytes), 4) << chain;
  EXPECT_EQ(cache->stats().feed->unwritten, 0);
  EXPECT_TRUE(cache->close(10).quiet);
}

TEST(CacheEnds, AnOwnerThatWasDroppedStaysDropped) {
  CacheWorldOptions options{.slots = 16};
  options.cache.max_owners = 3;
  CacheWorld world(options);
  for (std::uint64_t request = 0; request < 4; ++request) {
    Stall stall(world.world().device_ptr());
    const std::string owner = text("request ", request);
    const auto store =
        world.try_store({request}, 0, owner, world.world().after_event(stall.event()));
    EXPECT_TRUE(world.cache().owner(owner).has_value());
    world.cache().drop_owner(owner);
    stall.open();
    store->wait(10);
    EXPECT_FALSE(world.cache().owner(owner).has_value());
  }
  world.cache().note_tokens("live", 1);
  EXPECT_TRUE(world.cache().owner("live").has_value());
}

// Without workers a try is made by whoever moves the cache on.
TEST(CacheEnds, AShortageThatLastsKeepsNobody) {
  auto files = std::make_shared<MemoryFiles>();
  World world(still_device(), {.device_blocks = 8, .slots = 10, .config = without_reaper()});
  CacheOptions options;
  options.key_bytes = Keys::bytes;
  options.groups = {{"full", {}, world.manager_ptr(), 8}};
  options.disk.emplace();
  options.disk->landing_blocks = 2;
  options.disk->options.path = "/cache";
  options.disk->options.files = files;
  options.disk->options.workers = 0;
  options.disk->options.capacity_bytes = 8 * CacheWorld::disk_slot_bytes();
  const auto cache = Cache::make(std::move(options));
  files->set_plan(failing("write", EAGAIN, 1000000));
  const Keys keys{0};
  const auto pointers = keys.pointers();
  const auto store =
      cache->try_store({.keys = pointers, .key_bytes = Keys::bytes, .owner = "a"}, {{0}});
  store->wait(30);
  EXPECT_FALSE(cache->flush(0));
  files->set_plan(nullptr);
  EXPECT_TRUE(cache->flush(30));
  EXPECT_EQ(cache->stats().feed->written, 1);
  EXPECT_TRUE(cache->close(30).quiet);
}

}  // namespace
}  // namespace kvmem::test
