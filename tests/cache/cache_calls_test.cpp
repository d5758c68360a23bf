// What a cache promises to others while it is at work, and what it counts.
#include <atomic>
#include <thread>

#include "cache/cache_world.hpp"
#include "cache/group_memory.hpp"

namespace kvmem {
namespace {

using test::CacheWorld;
using test::CacheWorldOptions;
using test::comes_true;
using test::Keys;
using test::numbers;
using test::ScriptedDevice;
using test::Stall;
using test::still_device;
using test::World;

std::shared_ptr<ScriptedDevice> scripted_device() {
  return std::make_shared<ScriptedDevice>(test::ScriptedOptions{.runs_in_sleep = true});
}

// ---- blocks of the device that are spoken for ----

struct Claimed : testing::Test {
  CacheWorld world{{.spare_slots = 4}};
  Stall stall{world.world().device_ptr()};
  // Keys 0 and 1 are in flight, and a load of them waits with blocks 10 and 11 as its targets.
  std::shared_ptr<CacheTransfer> stored =
      world.try_store(numbers(0, 2), 0, "a", world.world().after_event(stall.event()));
  CacheHit hit = world.reserve(numbers(0, 2), "b", Pending::attach);
  std::shared_ptr<CacheTransfer> load = world.load(hit, 10);

  [[nodiscard]] std::vector<BlockId> busy(const std::vector<BlockId>& blocks) {
    return world.world().manager().busy(blocks);
  }
};

TEST_F(Claimed, TargetsOfALoadThatWaitsAreBusyForEverybodyElse) {
  EXPECT_TRUE(hit.pending());
  EXPECT_EQ(load->state(), TransferState::queued);
  EXPECT_EQ(busy({9, 10, 11}), (std::vector<BlockId>{10, 11}));
  EXPECT_THROW(world.world().offload({.blocks = {10}}), Busy);
  EXPECT_THROW(world.try_store({7}, 11), Busy);
  CacheHit other = world.reserve(numbers(0, 2), "c", Pending::attach);
  EXPECT_THROW(world.load(other, 11), Busy);
  EXPECT_EQ(other.length(), 2) << "what was refused is as it was";
  EXPECT_NO_THROW(world.load(other, 12)->cancel());
  stall.open();
  load->wait(10);
  EXPECT_TRUE(world.held(numbers(0, 2), 10));
  EXPECT_TRUE(busy({10, 11}).empty());
}

TEST_F(Claimed, AManagerIsNotReboundUnderThem) {
  const KVLayout layout = *world.world().manager().layout();
  EXPECT_THROW(world.world().manager().rebind(layout), Busy);
  EXPECT_FALSE(world.world().manager().drain(0, {}));
  stall.open();
  load->wait(10);
  EXPECT_NO_THROW(world.world().manager().rebind(layout));
}

TEST_F(Claimed, ALoadThatIsCancelledBeforeItBeganIsOverAtOnce) {
  EXPECT_EQ(load->cancel(), CancelOutcome::not_submitted);
  EXPECT_EQ(load->cancel(), CancelOutcome::already_done);
  EXPECT_THROW(load->wait(10), Cancelled);
  EXPECT_EQ(load->loaded(), 0);
  EXPECT_EQ(load->failed_positions(), (std::vector<std::size_t>{0, 1}));
  EXPECT_TRUE(busy({10, 11}).empty());
  EXPECT_EQ(world.cache().stats().keys_loaded, 0);
  stall.open();
  stored->wait(10);
  EXPECT_EQ(world.load_all(numbers(0, 2), 10), 2);
}

TEST_F(Claimed, ALoadWhoseOwnerWasDroppedMeanwhileFails) {
  EXPECT_EQ(world.cache().drop_owner("b"), 1);
  stall.open();
  EXPECT_THROW(load->wait(10), InvalidArgument);
  EXPECT_EQ(load->loaded(), 0);
  EXPECT_EQ(load->failed_positions(), (std::vector<std::size_t>{0, 1}));
  EXPECT_TRUE(busy({10, 11}).empty());
}

TEST_F(Claimed, WhatWasStoredBeforeIsLoadedWhenTheStoreThatItWaitsForFails) {
  stall.open();
  load->wait(10);
  Stall again(world.world().device_ptr());
  const auto more =
      world.try_store(numbers(0, 4), 0, "a", world.world().after_event(again.event()));
  CacheHit longer = world.reserve(numbers(0, 4), "b", Pending::attach);
  ASSERT_EQ(longer.length(), 4);
  const auto waiting = world.load(longer, 20);
  EXPECT_EQ(more->cancel(), CancelOutcome::draining);
  EXPECT_FALSE(waiting->done());
  again.open();
  EXPECT_THROW(waiting->wait(10), CopyFailed);
  EXPECT_EQ(waiting->loaded(), 2);
  EXPECT_TRUE(world.held(numbers(0, 2), 20));
  EXPECT_EQ(waiting->failed_positions(), (std::vector<std::size_t>{2, 3}));
  EXPECT_EQ(world.cache().stats().keys_loaded, 4) << "two, twice";
}

TEST(CacheCalls, BlocksThatAStoreHasYetToReadAreNotWritten) {
  CacheWorldOptions options{.spare_slots = 1};
  options.config.max_queued_bytes = test::CacheMemory::block_bytes();  // one block at a time
  CacheWorld world(options);
  const auto copy = world.world().stored(5, 77);
  Stall stall(world.world().device_ptr());
  const auto stored =
      world.try_store(numbers(0, 3), 0, "a", world.world().after_event(stall.event()));
  EXPECT_THROW(world.world().restore({.blocks = {2}}, *copy), Busy);
  EXPECT_NO_THROW(world.try_store({9}, 8)->cancel());
  stall.open();
  stored->wait(10);
  EXPECT_EQ(world.load_all(numbers(0, 3), 10), 3);
}

// ---- a shorter hit may need what a longer one does not ----

struct Windowed : testing::Test {
  static constexpr std::size_t blocks = 16;
  std::shared_ptr<ModelDevice> device = still_device();
  std::shared_ptr<Runtime> runtime = Runtime::make(device);
  test::GroupMemory full{device, blocks, 0}, window{device, blocks, 1};
  std::shared_ptr<Manager> managers[2] = {make(full), make(window)};
  std::shared_ptr<Cache> cache = open();
  Stall stall{device};

  std::shared_ptr<Manager> make(const test::GroupMemory& memory) {
    PoolOptions pool;
    pool.block_bytes = memory.block_bytes();
    pool.capacity_bytes = blocks * slot_alignment_bytes;
    return Manager::make(runtime, memory.layout(), std::make_shared<BlockPool>(device, pool),
                         test::without_reaper());
  }
  std::shared_ptr<Cache> open() {
    CacheOptions options;
    options.groups = {{"full", {}, managers[0]}, {"window", {NeedKind::last, 2}, managers[1]}};
    return Cache::make(std::move(options));
  }
  std::shared_ptr<CacheTransfer> store(std::size_t count, After after = {}) {
    const Keys keys(numbers(0, count));
    Cache::Blocks from(2);
    for (std::size_t i = 0; i < count; ++i) {
      full.fill(static_cast<BlockId>(i), i);
      window.fill(static_cast<BlockId>(i), i);
      for (auto& each : from) each.push_back(static_cast<BlockId>(i));
    }
    return cache->try_store({.keys = keys.pointers(), .key_bytes = Keys::bytes, .after = after},
                            from);
  }
  // Five keys, of which the store of the last two fails, into the blocks from 8 on.
  std::shared_ptr<CacheTransfer> load_what_fails(bool targets_of_all) {
    store(3)->wait(10);
    After after;
    managers[0]->add_event(after, stall.event());
    const auto fails = store(5, after);
    const Keys keys(numbers(0, 5));
    CacheHit hit = cache->reserve(keys.pointers(), Keys::bytes, "b", Pending::attach);
    EXPECT_EQ(hit.length(), 5);
    Cache::Blocks to{{8, 9, 10, 11, 12}, {-1, -1, -1, 11, 12}};
    if (targets_of_all) to[1] = to[0];
    auto load = cache->load(hit, to, {});
    static_cast<void>(fails->cancel());
    stall.open();
    EXPECT_THROW(load->wait(10), Error);
    return load;
  }
};

TEST_F(Windowed, WhatAShorterHitNeedsIsLoadedIntoTheBlocksThatWereGivenForIt) {
  const auto load = load_what_fails(true);
  ASSERT_EQ(load->loaded(), 3);
  for (const BlockId i : {0, 1, 2}) EXPECT_TRUE(full.holds(8 + i, static_cast<std::size_t>(i)));
  for (const BlockId i : {1, 2}) EXPECT_TRUE(window.holds(8 + i, static_cast<std::size_t>(i)));
  EXPECT_EQ(load->failed_positions(), (std::vector<std::size_t>{3, 4}));
  EXPECT_TRUE(managers[1]->busy(std::vector<BlockId>{8, 9, 10, 11, 12}).empty());
}

TEST_F(Windowed, NothingIsLoadedWhereNoBlocksWereGivenForIt) {
  const auto load = load_what_fails(false);
  EXPECT_EQ(load->loaded(), 0);
  EXPECT_THROW(load->expect_done(), CopyFailed);
  EXPECT_EQ(load->failed_positions().size(), 5);
  EXPECT_EQ(cache->stats().keys_loaded, 0);
  EXPECT_TRUE(managers[0]->busy(std::vector<BlockId>{8, 9, 10, 11, 12}).empty());
}

// ---- what fails leaves nothing behind ----

TEST(CacheCalls, AStoreWhoseCopyFailsIsNotFoundAndMayBeRepeated) {
  const auto device = scripted_device();
  CacheWorld world({.slots = 4}, device);
  device->fail(DeviceCall::copy, 1, test::Failure::in_flight);
  const auto failed = world.try_store(numbers(0, 4));
  EXPECT_THROW(failed->wait(10), CopyFailed);
  EXPECT_EQ(world.reserve(numbers(0, 4)).length(), 0);
  EXPECT_EQ(world.why_miss(0).why, MissReason::store_failed);
  EXPECT_EQ(world.cache().stats().index.groups[0].free, 4);
  EXPECT_EQ(world.cache().stats().stores_failed, 1);
  EXPECT_EQ(world.cache().stats().blocks_stored, 0);
  EXPECT_EQ(world.store(numbers(0, 4))->job().covered, 4);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
}

TEST(CacheCalls, AFailedLoadCountsNoKeyThatDidNotArrive) {
  const auto device = scripted_device();
  CacheWorldOptions options;
  options.config.max_queued_bytes = 4 * test::CacheMemory::block_bytes();  // a transfer a block
  CacheWorld world(options, device);
  world.store(numbers(0, 4));
  CacheHit hit = world.reserve(numbers(0, 4));
  device->fail(DeviceCall::copy, 5);  // two of a block, for its stages
  const auto load = world.load(hit, 10);
  EXPECT_THROW(load->wait(10), CopyFailed);
  EXPECT_EQ(load->loaded(), 2);
  EXPECT_EQ(load->failed_positions(), std::vector<std::size_t>{2});
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.keys_loaded, 2);
  EXPECT_EQ(stats.blocks_from_host, 3);
  EXPECT_EQ(stats.loads, 0);
  EXPECT_EQ(stats.loads_failed, 1);
  EXPECT_EQ(stats.index.blocks_loaded, 0);
  EXPECT_EQ(world.load_all(numbers(0, 4), 20), 4) << "they are there all the same";
}

TEST(CacheCalls, WhatIsRemovedWhileItIsStoredIsNotFoundLater) {
  CacheWorld world;
  Stall stall(world.world().device_ptr());
  const auto stored =
      world.try_store(numbers(0, 3), 0, "a", world.world().after_event(stall.event()));
  const Keys keys(numbers(1, 2));
  EXPECT_EQ(world.cache().evict(keys.pointers(), Keys::bytes), 2);
  stall.open();
  stored->wait(10);
  EXPECT_EQ(world.reserve(numbers(0, 3)).length(), 1);
}

TEST(CacheCalls, ACacheThatWasDroppedLivesUntilItsTransfersHaveEnded) {
  CacheWorld world;
  Stall stall(world.world().device_ptr());
  auto stored = world.try_store(numbers(0, 2), 0, "a", world.world().after_event(stall.event()));
  const std::weak_ptr<Cache> left = world.drop();
  stored.reset();
  EXPECT_FALSE(left.expired());
  EXPECT_EQ(world.world().slots().free, 0);
  stall.open();
  EXPECT_TRUE(world.world().manager().drain(10, {}));
  EXPECT_TRUE(world.world().runtime().wait_until([&] { return left.expired(); },
                                                 world.world().runtime().deadline_after(10), {}));
  EXPECT_EQ(world.world().slots().free, 16);
}

TEST(CacheCalls, ClosingAtOnceCancelsWhatIsUnfinishedAndRefusesMore) {
  CacheWorld world;
  Stall stall(world.world().device_ptr());
  const auto stored =
      world.try_store(numbers(0, 2), 0, "a", world.world().after_event(stall.event()));
  CacheHit hit = world.reserve(numbers(0, 2), "a", Pending::attach);
  const auto load = world.load(hit, 10);
  const CacheCloseReport report = world.cache().close(0);
  EXPECT_FALSE(report.quiet);
  EXPECT_EQ(report.cancelled, 2);
  EXPECT_EQ(report.in_flight, 1) << "its copy was submitted";
  EXPECT_EQ(load->state(), TransferState::cancelled);
  EXPECT_THROW(world.try_store({9}), Closed);
  EXPECT_THROW(world.reserve({0}), Closed);
  stall.open();
  EXPECT_THROW(stored->wait(10), Cancelled);
}

// ---- bounds, and what they say ----

TEST(CacheCalls, AStoreThatFindsNoRoomSaysWhoHoldsIt) {
  CacheWorld world({.slots = 4});
  world.store(numbers(0, 4));
  CacheHit hit = world.reserve(numbers(0, 4), "request 7");
  ASSERT_EQ(hit.length(), 4);
  EXPECT_EQ(world.try_store({8}), nullptr);
  EXPECT_EQ(world.why_miss(8).why, MissReason::no_room);
  const Keys keys{8};
  try {
    static_cast<void>(world.cache().store(
        {.keys = keys.pointers(), .key_bytes = Keys::bytes, .owner = "b"}, {{8}}, 0));
    FAIL() << "it found room";
  } catch (const PoolExhausted& error) {
    EXPECT_NE(std::string(error.what()).find("'request 7': 4"), std::string::npos) << error.what();
  }
  hit.release();
  EXPECT_NE(world.try_store({8}), nullptr);
}

TEST(CacheCalls, AtMostMaxTransfersAreUnfinished) {
  CacheWorldOptions options;
  options.cache.max_transfers = 2;
  CacheWorld world(options);
  world.store({9});
  Stall stall(world.world().device_ptr());
  const After after = world.world().after_event(stall.event());
  const auto first = world.try_store({0}, 0, "a", after),
             second = world.try_store({1}, 1, "a", after);
  EXPECT_EQ(world.try_store({2}, 2), nullptr);
  CacheHit hit = world.reserve({9});
  EXPECT_THROW(world.load(hit, 10), PoolExhausted);
  EXPECT_EQ(hit.length(), 1);
  stall.open();
  first->wait(10);
  second->wait(10);
  world.load(hit, 10)->wait(10);
  EXPECT_TRUE(world.held({9}, 10));
}

TEST(CacheCalls, AHitThatExpiredOrWhoseOwnerWasDroppedIsNotLoaded) {
  CacheWorld world;
  world.store(numbers(0, 2));
  const Keys keys(numbers(0, 2));
  CacheHit expired = world.cache().reserve(keys.pointers(), Keys::bytes, "a", Pending::stop, 0.0);
  CacheHit dropped = world.reserve(numbers(0, 2), "b");  // and looks what has expired
  EXPECT_THROW(world.load(expired, 10), InvalidArgument);
  EXPECT_EQ(world.cache().drop_owner("b"), 1);
  EXPECT_THROW(world.load(dropped, 10), InvalidArgument);
  EXPECT_TRUE(world.world().manager().busy(std::vector<BlockId>{10, 11}).empty());
  EXPECT_EQ(world.cache().stats().index.reservations, 0);
  CacheHit good = world.reserve(numbers(0, 2), "c");
  good.release();
  EXPECT_THROW(good.release(), AlreadyReleased);
  EXPECT_THROW(world.load(good, 10), AlreadyReleased);
}

TEST(CacheCalls, AHitThatIsALoadsDoesNotExpireWhileItWaits) {
  CacheWorld world;
  Stall stall(world.world().device_ptr());
  const auto store =
      world.try_store(numbers(0, 2), 0, "a", world.world().after_event(stall.event()));
  const Keys keys(numbers(0, 2));
  const auto pointers = keys.pointers();
  CacheHit hit = world.cache().reserve(pointers, Keys::bytes, "b", Pending::attach, 0.0005);
  ASSERT_EQ(hit.length(), 2U);
  const auto load = world.load(hit, 10);
  CacheHit other = world.cache().reserve(pointers, Keys::bytes, "c", Pending::attach, 0.001);
  ASSERT_TRUE(comes_true([&] {  // anybody's call looks for what has expired
    static_cast<void>(world.reserve({9}));
    return world.cache().stats().index.expired == 1;
  }));
  stall.open();
  store->wait(10);
  load->wait(10);
  EXPECT_TRUE(world.held(numbers(0, 2), 10));
}

TEST(CacheCalls, AStoreThatIsRefusedBecauseABlockIsBusyEvictsNothing) {
  CacheWorldOptions options{.slots = 4, .spare_slots = 1};
  options.cache.admit_after = 2;
  CacheWorld world(options);
  for (int i = 0; i < 2; ++i) world.store(numbers(0, 4));
  const auto copy = world.world().stored(9, 77);
  Stall stall(world.world().device_ptr());
  const auto restore = world.world().restore(
      {.blocks = {9}, .after = world.world().after_event(stall.event())}, *copy);
  EXPECT_THROW(static_cast<void>(world.try_store({7}, 9)), Busy);
  EXPECT_EQ(world.reserve(numbers(0, 4)).length(), 4U);
  stall.open();
  restore->wait(10);
  EXPECT_EQ(world.store({7}, 9)->job().covered, 0U) << "what was refused was not offered";
}

TEST(CacheCalls, AValueThatIsNoneIsRefusedBeforeTheKeyCountsAsOffered) {
  CacheWorldOptions options;
  options.cache.admit_after = 2;
  CacheWorld world(options);
  const Keys keys{7};
  const auto pointers = keys.pointers();
  EXPECT_THROW(static_cast<void>(world.cache().try_store(
                   {.keys = pointers, .key_bytes = Keys::bytes, .value = -1}, {{0}})),
               InvalidArgument);
  EXPECT_EQ(world.store({7})->job().covered, 0U);
}

TEST(CacheCalls, MaxTransfersIsABoundHoweverManyThreadsAsk) {
  CacheWorldOptions options;
  options.cache.max_transfers = 1;
  for (int round = 0; round < 50; ++round) {
    CacheWorld world(options);
    Stall stall(world.world().device_ptr());
    const After after = world.world().after_event(stall.event());
    std::atomic<int> ready{0};
    std::vector<std::shared_ptr<CacheTransfer>> stores(3);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < stores.size(); ++i) {
      threads.emplace_back([&, i] {
        ++ready;
        while (ready < 3) {
        }
        stores[i] = world.try_store({i}, static_cast<BlockId>(i), "a", after);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(world.cache().stats().transfers, 1U);
    stall.open();
    for (const auto& store : stores) {
      if (store) store->wait(10);
    }
  }
}

// ---- what is counted, and decided by it ----

TEST(CacheCalls, AFailedLoadDoesNotMakeTheBytesBeforeItUnused) {
  OwnerBooks books({}, 4);
  books.open("a");
  books.note_restore("a", 1, 100);
  books.note_restore("a", 0, 0);
  books.note_tokens("a", 5);
  EXPECT_EQ(books.of("a")->unused_bytes, 0U);
}

TEST(CacheCalls, WhoIsRefusedForThrashingCopiesNothingThatIsOnDiskAlone) {
  CacheWorldOptions options{.disk_slots = 8};
  options.cache.thrash.max_bytes_per_token = 1;
  options.cache.thrash.least_bytes = 0;
  CacheWorld world(options);
  world.store(numbers(0, 2));
  world.to_disk(numbers(0, 2));
  EXPECT_FALSE(world.store({5})->job().refused.empty());
  EXPECT_FALSE(world.store(numbers(0, 2))->job().refused.empty());
  EXPECT_EQ(world.cache().owner("a")->offloads, 2U);
  EXPECT_EQ(world.why_miss(0).why, MissReason::none) << "it can be loaded";
}

TEST(CacheCalls, AMissSaysWhatBecameOfThisKey) {
  CacheWorld world({.slots = 2});
  const Keys keys{5};
  const auto pointers = keys.pointers();
  EXPECT_EQ(world.cache().evict(pointers, Keys::bytes), 0U);
  EXPECT_EQ(world.why_miss(5).why, MissReason::never_stored) << "it was not there to be removed";
  EXPECT_EQ(world.store(numbers(0, 3))->job().covered, 2U);
  EXPECT_EQ(world.why_miss(2).why, MissReason::no_room);
}

// Public failure 138: exact values, of each counter.
TEST(CacheCalls, TheStatisticsSayExactlyWhatHappened) {
  constexpr std::uint64_t block = 1500 + 700 + 2048;
  CacheWorld world({.slots = 8});
  world.store(numbers(0, 4), 0, "a");
  world.store(numbers(0, 6), 0, "b");  // two of them are new
  EXPECT_EQ(world.load_all(numbers(0, 8), 10), 6);
  world.cache().note_tokens("a", 10);
  EXPECT_EQ(world.load_all(numbers(4, 2), 10), 2);
  EXPECT_EQ(world.load_all(numbers(4, 1), 10), 1);
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.stores, 2);
  EXPECT_EQ(stats.blocks_stored, 6);
  EXPECT_EQ(stats.loads, 3);
  EXPECT_EQ(stats.keys_loaded, 9);
  EXPECT_EQ(stats.blocks_from_host, 9);
  EXPECT_EQ(stats.index.keys_asked, 11);
  EXPECT_EQ(stats.index.keys_reserved, 9);
  EXPECT_EQ(stats.index.blocks_present, 4);
  const OwnerCounts a = world.cache().owner("a").value();
  EXPECT_EQ(a.offloads, 4);
  EXPECT_EQ(a.offloaded_bytes, 4 * block);
  EXPECT_EQ(a.restores, 9);
  EXPECT_EQ(a.restored_bytes, 9 * block);
  EXPECT_EQ(a.unused_bytes, 2 * block) << "restored again before a token came of them";
  EXPECT_EQ(a.tokens, 10);
  EXPECT_EQ(a.bytes_per_token(), 13 * static_cast<double>(block) / 10);
  EXPECT_EQ(world.cache().owner("b")->offloads, 2);
  EXPECT_EQ(stats.owners.offloads, 6);
  world.cache().drop_owner("a");
  EXPECT_FALSE(world.cache().owner("a").has_value());
  EXPECT_EQ(world.cache().stats().owners.unused_bytes, 3 * block);
}

// Public failure 137: and what is asked twice in one call counts twice at most.
TEST(CacheCalls, AHitIsNeverLongerThanWhatWasAskedFor) {
  CacheWorld world;
  world.store(numbers(0, 8));
  CacheHit hit = world.reserve(numbers(0, 3));
  EXPECT_EQ(hit.length(), 3);
  EXPECT_EQ(hit.keep(5), 3);
  EXPECT_EQ(hit.keep(2), 2);
  const auto load = world.load(hit, 10);
  load->wait(10);
  EXPECT_EQ(load->loaded(), 2);
  EXPECT_EQ(world.reserve({1, 1, 9}).length(), 2);
  EXPECT_EQ(world.cache().stats().keys_loaded, 2);
}

TEST(CacheCalls, WhoThrashesIsRefusedUntilAllIsWellBelowTheBudget) {
  CacheWorldOptions options;
  options.cache.thrash.max_bytes_per_token = 1.5 * 4248;
  options.cache.thrash.least_bytes = 0;
  CacheWorld world(options);
  world.cache().note_tokens("a", 1);
  world.store(numbers(0, 2));
  const auto refused = world.store(numbers(0, 4));
  EXPECT_EQ(refused->job().covered, 2);
  EXPECT_NE(refused->job().refused.find("thrash"), std::string::npos);
  EXPECT_EQ(world.why_miss(2).why, MissReason::thrash);
  world.cache().note_tokens("a", 1);  // within the budget again, and not far enough
  EXPECT_EQ(world.store(numbers(0, 4))->job().covered, 2);
  EXPECT_EQ(world.cache().stats().keys_refused, 4);
  EXPECT_EQ(world.cache().owner("a")->refused, 4);
  EXPECT_EQ(world.store({8}, 0, "b")->job().covered, 1) << "it is nobody else's budget";
  world.cache().note_tokens("a", 1);
  EXPECT_EQ(world.store(numbers(0, 4))->job().covered, 4);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
}

// Public failure 162.
TEST(CacheCalls, WhatIsOfferedOnceIsNotStoredWhereTwiceIsAskedFor) {
  CacheWorldOptions options{.device_blocks = 64, .slots = 64};
  options.cache.admit_after = 2;
  CacheWorld world(options);
  for (std::uint64_t once = 100; once < 120; ++once) world.store({once});
  EXPECT_EQ(world.cache().stats().blocks_stored, 0);
  EXPECT_EQ(world.why_miss(100).why, MissReason::not_admitted);
  EXPECT_EQ(world.store(numbers(0, 3))->job().covered, 0);
  EXPECT_EQ(world.store(numbers(0, 5))->job().covered, 3);
  EXPECT_EQ(world.load_all(numbers(0, 5), 10), 3);
  EXPECT_EQ(world.cache().stats().keys_not_admitted, 25);
}

TEST(CacheCalls, AdviceFollowsWhatARecomputationCosts) {
  CacheWorld world;
  world.store(numbers(0, 4));
  const Keys keys(numbers(0, 6));
  const auto advise = [&](double tokens_per_second) {
    return world.cache().advise(keys.pointers(), Keys::bytes, tokens_per_second, 16);
  };
  const Advice slow = advise(1);
  EXPECT_EQ(slow.kind, AdviceKind::restore);
  EXPECT_EQ(slow.restorable, 4);
  EXPECT_EQ(slow.pending, 0);
  EXPECT_DOUBLE_EQ(slow.recompute_seconds, 6 * 16);
  EXPECT_NEAR(slow.restore_seconds, 2 * 16, 1);
  EXPECT_EQ(advise(1e15).kind, AdviceKind::recompute);
  Stall stall(world.world().device_ptr());
  const auto more =
      world.try_store(numbers(0, 6), 0, "a", world.world().after_event(stall.event()));
  const Advice waits = advise(1);
  EXPECT_EQ(waits.kind, AdviceKind::wait);
  EXPECT_EQ(waits.pending, 2);
  EXPECT_LT(waits.wait_seconds, waits.restore_seconds);
  stall.open();
  more->wait(10);
  EXPECT_EQ(advise(1).restorable, 6);
  EXPECT_EQ(world.cache().stats().index.keys_asked, 0) << "advice is nobody's hit";
}

// A reaper's thread moves everything, and nobody waits with it.
TEST(CacheCalls, AReaperMovesStoresLoadsAndTheDiskOn) {
  CacheWorldOptions options{.disk_slots = 16};
  options.config.reaper = true;
  CacheWorld world(options, make_host_device({}));
  Stall stall(world.world().device_ptr());
  const auto stored =
      world.try_store(numbers(0, 4), 0, "a", world.world().after_event(stall.event()));
  CacheHit hit = world.reserve(numbers(0, 4), "b", Pending::attach);
  const auto load = world.load(hit, 10);
  stall.open();
  EXPECT_TRUE(test::comes_true([&] { return load->done() && stored->done(); }));
  EXPECT_NO_THROW(load->expect_done());
  EXPECT_TRUE(world.held(numbers(0, 4), 10));
  EXPECT_TRUE(test::comes_true([&] { return world.cache().stats().feed->written == 4; }));
  EXPECT_EQ(world.evict(numbers(0, 4), GroupIndex{0}), 4);
  CacheHit from_disk = world.reserve(numbers(0, 4));
  EXPECT_EQ(from_disk.disk_blocks(), 4);
  const auto again = world.load(from_disk, 20);
  EXPECT_TRUE(test::comes_true([&] { return again->done(); }));
  EXPECT_NO_THROW(again->expect_done());
  EXPECT_TRUE(world.held(numbers(0, 4), 20));
}

}  // namespace
}  // namespace kvmem
