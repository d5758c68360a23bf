// A cache and its disk: what goes there and comes back, and what the disk may do meanwhile.

#include "cache/cache_faults.hpp"
#include "tier/file_gate.hpp"

namespace kvmem {
namespace {

using test::CacheWorld;
using test::CacheWorldOptions;
using test::checksummed;
using test::comes_about;
using test::comes_true;
using test::damage_in_host_memory;
using test::failing;
using test::FileGate;
using test::Keys;
using test::MemoryFiles;
using test::numbers;
using test::slot_file;
using test::written_back;

TEST(Cache, WhatWasStoredComesBack) {
  CacheWorld world;
  const auto stored = world.store(numbers(0, 5));
  EXPECT_EQ(stored->job().covered, 5);
  EXPECT_EQ(world.load_all(numbers(0, 8), 10), 5);
  EXPECT_EQ(world.store(numbers(0, 5))->job().present, 5);
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.blocks_stored, 5);
  EXPECT_EQ(stats.blocks_from_host, 5);
  EXPECT_EQ(stats.keys_loaded, 5);
}

TEST(Cache, WhatIsOnDiskAloneComesBackAndStays) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 6));
  ASSERT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.evict(numbers(1, 4), GroupIndex{0}), 4);
  CacheHit hit = world.reserve(numbers(0, 6));
  EXPECT_EQ(hit.length(), 6);
  EXPECT_EQ(hit.host_blocks(), 2);
  EXPECT_EQ(hit.disk_blocks(), 4);
  hit.release();
  EXPECT_EQ(world.load_all(numbers(0, 6), 10), 6);
  EXPECT_EQ(world.cache().stats().blocks_from_disk, 4);
  EXPECT_EQ(world.cache().stats().disk_promoted, 4);
  EXPECT_EQ(world.reserve(numbers(0, 6)).host_blocks(), 6);
  EXPECT_EQ(world.load_all(numbers(0, 6), 20), 6) << "from where it is in host memory now";
  EXPECT_EQ(world.cache().stats().landing_free, 2);
}

TEST(Cache, ANewProcessFindsWhatTheDiskHas) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 6));
  world.reopen();
  EXPECT_EQ(world.load_all(numbers(0, 6), 10), 6);
  EXPECT_EQ(world.cache().stats().blocks_from_disk, 6);
}

TEST(Cache, AWrongByteOnDiskCutsThePrefixAndIsAMissFromThen) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 6));
  ASSERT_TRUE(world.cache().flush(10));
  world.evict(numbers(0, 6), GroupIndex{0});
  // Slots are given in turn, to the tail first: key 3 of 6 is in the third.
  const std::size_t at = 2 * CacheWorld::disk_slot_bytes() + disk_page_bytes + 100;
  world.files->contents(slot_file).at(at) ^= std::byte{4};
  CacheHit hit = world.reserve(numbers(0, 6));
  ASSERT_EQ(hit.length(), 6);
  const auto load = world.load(hit, 10);
  EXPECT_THROW(load->wait(10), CopyFailed);
  EXPECT_EQ(load->loaded(), 3);
  EXPECT_EQ(load->failed_positions(), std::vector<std::size_t>{3});
  EXPECT_EQ(world.reserve(numbers(0, 6)).length(), 3);
  EXPECT_EQ(world.why_miss(3).why, MissReason::disk_failed);
  EXPECT_EQ(world.why_miss(3).disk, DiskOutcome::bad_data_sum);
  EXPECT_EQ(world.cache().stats().keys_loaded, 3);
}

// ---- writing ----

// Public failure 120.
TEST(Cache, WhatIsStoredIsWrittenAndTheStatisticsShowIt) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 6));
  EXPECT_TRUE(comes_about(world, [](const CacheStats& stats) { return stats.feed->written == 6; }));
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.disk->writes.calls, 6);
  EXPECT_EQ(stats.disk->writes.bytes, 6 * test::CacheMemory::block_bytes());
  EXPECT_EQ(stats.index.groups[1].ready, 6);
  EXPECT_EQ(stats.feed->queued, 0);
}

// Public failure 92.
TEST(Cache, OfAPrefixThatIsLongerInMemoryThanOnDiskOnlyTheRestIsWritten) {
  CacheWorld world(written_back(0, 16));
  world.store(numbers(0, 4));
  ASSERT_TRUE(world.cache().flush(10));
  world.store(numbers(0, 6));
  const auto longest = world.store(numbers(0, 8));
  EXPECT_EQ(longest->job().covered, 8);
  EXPECT_EQ(longest->job().present, 6);
  EXPECT_EQ(world.cache().stats().index.groups[1].ready, 4);
  ASSERT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->written, 8);
  EXPECT_EQ(world.cache().stats().index.groups[1].ready, 8);
  world.to_disk(numbers(0, 8));
  EXPECT_EQ(world.load_all(numbers(0, 8), 10), 8);
}

TEST(Cache, WrittenBackIsNotBeforeTheMarkAndThenTheOldest) {
  CacheWorld world(written_back(0.5));
  world.store(numbers(0, 4));
  static_cast<void>(world.cache().poll());
  EXPECT_EQ(world.cache().stats().feed->queued, 4);
  EXPECT_EQ(world.cache().stats().disk->writes.calls, 0);
  world.store({4});
  EXPECT_TRUE(comes_about(world, [](const CacheStats& stats) { return stats.feed->written == 1; }));
  EXPECT_EQ(world.cache().stats().feed->queued, 4);
  const Keys tail{3};  // the first to be evicted
  EXPECT_EQ(world.cache().index().state(tail.pointers()[0], Keys::bytes, 1), EntryState::ready);
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->written, 5);
}

TEST(Cache, OnDiskTooTheHeadOfAPromptOutlivesItsTail) {
  for (const DiskWrite when : {DiskWrite::through, DiskWrite::back}) {
    CacheWorldOptions options = written_back(0);
    options.cache.disk->write = when;
    options.disk_slots = 4;
    CacheWorld world(options);
    world.store(numbers(0, 4));
    ASSERT_TRUE(world.cache().flush(10));
    world.store({10});
    ASSERT_TRUE(world.cache().flush(10));
    world.reopen();
    EXPECT_EQ(world.load_all(numbers(0, 4)), 3);
    EXPECT_EQ(world.load_all({10}), 1);
  }
}

TEST(Cache, WhatIsEvictedBeforeItWasWrittenIsCounted) {
  CacheWorld world(written_back(0, 4));
  world.store(numbers(0, 4));
  world.store(numbers(10, 4));
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->unwritten, 4);
  EXPECT_EQ(world.cache().stats().feed->written, 4);
  EXPECT_EQ(world.why_miss(0).why, MissReason::evicted);
}

// The sum that it would get on disk would be a good one.
TEST(Cache, WhatHasGoneBadInHostMemoryIsNotWrittenToDisk) {
  CacheWorld world(checksummed(written_back(0)));
  world.store(numbers(0, 4));
  damage_in_host_memory(world, 2);
  EXPECT_TRUE(world.cache().flush(10));
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.feed->written, 3);
  EXPECT_EQ(stats.feed->corrupt, 1);
  EXPECT_EQ(stats.feed->unwritten, 0);
  EXPECT_EQ(stats.disk->degraded, std::nullopt);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 2);
  EXPECT_EQ(world.why_miss(2).why, MissReason::corrupt);
  world.reopen();
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 2);
  world.store(numbers(0, 4));
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
}

TEST(Cache, WhatCameFromDiskIsVerifiedInHostMemoryToo) {
  CacheWorld world(checksummed({.disk_slots = 32}));
  world.store(numbers(0, 4));
  world.to_disk(numbers(0, 4));
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
  damage_in_host_memory(world, 2);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 2);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4) << "the disk has it still";
  EXPECT_EQ(world.why_miss(2).why, MissReason::none);
}

TEST(Cache, WhatLiesBeforeACorruptBlockIsDelivered) {
  CacheWorld world(checksummed({}));
  world.store(numbers(0, 8));
  damage_in_host_memory(world, 5);
  CacheHit hit = world.reserve(numbers(0, 8));
  ASSERT_EQ(hit.length(), 8);
  const auto load = world.load(hit, 10);
  EXPECT_THROW(load->wait(10), Corrupt);
  EXPECT_EQ(load->loaded(), 5);
  EXPECT_EQ(load->failed_positions(), (std::vector<std::size_t>{5, 6, 7}));
  EXPECT_TRUE(world.held(numbers(0, 5), 10));
  EXPECT_EQ(world.why_miss(5).why, MissReason::corrupt);
  EXPECT_EQ(world.cache().stats().blocks_from_host, 5);
  EXPECT_EQ(world.load_all(numbers(0, 8), 20), 5);
  world.cache().check();

  damage_in_host_memory(world, 0);
  EXPECT_EQ(world.load_all(numbers(0, 5), 10), 0);
}

TEST(Cache, ACorruptBlockIsSaidByItsPlaceInTheLoad) {
  CacheWorld world(checksummed({.disk_slots = 32}));
  world.store(numbers(0, 6));
  ASSERT_TRUE(world.cache().flush(10));
  world.evict(numbers(0, 2), GroupIndex{0});
  damage_in_host_memory(world, 4);
  CacheHit hit = world.reserve(numbers(0, 6));
  ASSERT_EQ(hit.disk_blocks(), 2);
  const auto load = world.load(hit, 10);
  try {
    load->wait(10);
    FAIL() << "it was delivered";
  } catch (const Corrupt& corrupt) {
    EXPECT_EQ(corrupt.block, 4);
  }
  EXPECT_EQ(load->loaded(), 4);
  EXPECT_TRUE(world.held(numbers(0, 4), 10));
}

TEST(Cache, OneFlushLeavesTheOtherToGoOn) {
  CacheWorld world(written_back(0));
  world.store(numbers(0, 4));
  FileGate gate;
  world.files->set_plan(gate.plan("write"));
  std::thread longer([&] { EXPECT_TRUE(world.cache().flush(10)); });
  ASSERT_TRUE(gate.has_seen(1));
  EXPECT_FALSE(world.cache().flush(0));
  gate.open();
  longer.join();
  EXPECT_EQ(world.cache().stats().feed->written, 4);
}

TEST(Cache, AFlushSaysSoWhenAllTheDiskHasIsHeld) {
  CacheWorld world({.disk_slots = 2});
  world.store(numbers(0, 2));
  world.to_disk(numbers(0, 2));
  CacheHit hit = world.reserve(numbers(0, 2));
  ASSERT_EQ(hit.disk_blocks(), 2);
  world.store({5});
  EXPECT_FALSE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->queued, 1);
  hit.release();
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->written, 3);
}

// It has left the index, so that removing it would not find it there.
TEST(Cache, WhatMadeRoomForAWriteThatFailedDoesNotComeBack) {
  CacheWorld world({.disk_slots = 1});
  world.store({0});
  ASSERT_TRUE(world.cache().flush(10));
  std::atomic<int> asked{0};
  std::atomic<bool> removed{false};
  world.files->set_plan([&](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
    if (std::string(call.what) != "write" || ++asked > 1) return std::nullopt;
    removed.wait(false);
    return -EIO;
  });
  world.store({1});
  ASSERT_TRUE(comes_about(world, [&](const CacheStats&) { return asked == 1; }));
  const Keys both{0, 1};
  static_cast<void>(world.cache().evict(both.pointers(), Keys::bytes));
  removed = true;
  removed.notify_all();
  EXPECT_TRUE(world.cache().flush(10));
  world.files->set_plan(nullptr);
  world.reopen();
  EXPECT_EQ(world.load_all({0}), 0);
  EXPECT_EQ(world.load_all({1}), 0);
}

TEST(Cache, AWriteThatFailsGoesIntoAnotherSlot) {
  CacheWorld world({.disk_slots = 8});
  world.files->set_plan(failing("write", EIO, 1));
  world.store({0});
  EXPECT_TRUE(world.cache().flush(10));
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.disk->writes.ended[static_cast<std::size_t>(DiskOutcome::io_error)], 1);
  EXPECT_EQ(stats.feed->written, 1);
  EXPECT_FALSE(stats.disk->degraded.has_value());
  world.to_disk({0});
  Index& index = world.cache().index();
  const Reservation held = index.reserve(Keys{0}.pointers(), Keys::bytes, "a");
  EXPECT_EQ(index.begin(held.id)->groups[1].slots, std::vector<SlotIndex>{1});
  index.finish(held.id, 0, true);
  EXPECT_EQ(world.load_all({0}, 10), 1);
}

TEST(Cache, WithAFullDiskTheCacheWorksAndTheQueueDrainsWhenThereIsSpace) {
  CacheWorld world({.disk_slots = 32});
  world.files->set_plan(failing("write", ENOSPC, 1'000'000));
  world.store(numbers(0, 4));
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
  EXPECT_TRUE(
      comes_about(world, [](const CacheStats& stats) { return stats.disk->degraded.has_value(); }));
  EXPECT_FALSE(world.cache().flush(0.01));
  EXPECT_EQ(world.cache().stats().feed->written, 0);
  world.files->set_plan(nullptr);
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_FALSE(world.cache().stats().disk->degraded.has_value());
  EXPECT_EQ(world.cache().stats().feed->written, 4);
  world.to_disk(numbers(0, 4));
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
}

// ---- reading ----

// Public failure 48.
TEST(Cache, ALoadFromDiskNeedsNoRoomInHostMemory) {
  CacheWorld world({.slots = 4, .disk_slots = 32});
  world.store(numbers(0, 4));
  ASSERT_TRUE(world.cache().flush(10));
  world.store(numbers(10, 4));
  CacheHit all = world.reserve(numbers(10, 4));
  ASSERT_EQ(all.host_blocks(), 4);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.blocks_from_disk, 4);
  EXPECT_EQ(stats.disk_promoted, 0);
  EXPECT_EQ(stats.landing_free, 2);
}

// Public failures 105 and 106.
TEST(Cache, WhatIsRejectedNeverReachesItsTarget) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 4));
  world.to_disk(numbers(0, 4));
  const std::size_t at = disk_page_bytes + 4000;  // the tail was the first to be written
  world.files->contents(slot_file).at(at) ^= std::byte{1};
  for (BlockId block = 10; block < 14; ++block) world.world().cache().fill(block, 99);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 3);
  EXPECT_TRUE(world.world().cache().holds(13, 99));
  EXPECT_EQ(world.cache().stats().keys_loaded, 3);
  EXPECT_EQ(world.cache().stats().index.blocks_loaded, 0);
  world.store(numbers(3, 1), 3);
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 4);
}

TEST(Cache, ASlotThatHasGoneBadIsNotUsedAgain) {
  CacheWorld world({.disk_slots = 4});
  world.store(numbers(0, 4));
  world.to_disk(numbers(0, 4));
  world.files->contents(slot_file).at(disk_page_bytes) ^= std::byte{1};
  EXPECT_EQ(world.load_all(numbers(0, 4), 10), 3);
  EXPECT_EQ(world.cache().stats().index.groups[1].retired, 1);
  EXPECT_EQ(world.cache().stats().disk->retired, 1);
  world.store(numbers(10, 8));
  ASSERT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().index.groups[1].ready, 3);
  EXPECT_EQ(world.cache().stats().index.groups[1].free, 0);
}

TEST(Cache, TwoMayLoadOneKeyFromDiskAtOnce) {
  CacheWorld world({.disk_slots = 32});
  world.store({0});
  world.to_disk({0});
  test::MemoryFiles& files = *world.files;
  FileGate gate;
  files.set_plan(gate.plan("read"));
  CacheHit first = world.reserve({0}, "a"), second = world.reserve({0}, "b");
  const auto one = world.load(first, 10), two = world.load(second, 20);
  EXPECT_TRUE(gate.has_seen(2));
  gate.open();
  one->wait(10);
  two->wait(10);
  EXPECT_TRUE(world.held({0}, 10));
  EXPECT_TRUE(world.held({0}, 20));
  const CacheStats stats = world.cache().stats();
  EXPECT_EQ(stats.blocks_from_disk, 2);
  EXPECT_EQ(stats.disk_promoted, 1);
  EXPECT_EQ(stats.landing_free, 2);
  EXPECT_EQ(stats.index.groups[0].ready, 1);
}

TEST(Cache, ACancelledLoadEndsAtOnceAndItsLandingBlocksComeBackWhenTheReadsEnd) {
  FileGate gate;
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 3));
  world.to_disk(numbers(0, 3));
  world.files->set_plan(gate.plan("read"));
  CacheHit hit = world.reserve(numbers(0, 3));
  const auto load = world.load(hit, 10);
  ASSERT_TRUE(gate.has_seen(2));
  EXPECT_EQ(load->cancel(), CancelOutcome::draining);
  EXPECT_TRUE(load->done());
  EXPECT_THROW(load->expect_done(), Cancelled);
  EXPECT_TRUE(world.world().manager().busy(std::vector<BlockId>{10, 11, 12}).empty());
  EXPECT_EQ(world.cache().stats().landing_free, 0);
  EXPECT_EQ(world.cache().stats().index.plans, 0);
  gate.open();
  EXPECT_TRUE(comes_about(world, [](const CacheStats& stats) { return stats.landing_free == 2; }));
  EXPECT_EQ(world.cache().stats().blocks_from_disk, 0);
  EXPECT_EQ(world.load_all(numbers(0, 3), 10), 3);
}

// Else what was removed because it is wrong by now would be found again.
TEST(Cache, WhatIsRemovedWhileItIsReadFromDiskIsNotFoundLater) {
  FileGate gate;
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 2));
  world.to_disk(numbers(0, 2));
  world.files->set_plan(gate.plan("read"));
  CacheHit hit = world.reserve(numbers(0, 2));
  const auto load = world.load(hit, 10);
  ASSERT_TRUE(gate.has_seen(2));
  EXPECT_EQ(world.cache().clear(), 2);
  world.store({1}, 1);  // anew, and not what is being read
  EXPECT_EQ(world.evict({1}, GroupIndex{0}), 1);
  gate.open();
  load->wait(10);
  EXPECT_TRUE(world.held(numbers(0, 2), 10)) << "it was there when it was reserved";
  EXPECT_EQ(world.reserve({0}).length(), 0);
  EXPECT_EQ(world.cache().stats().disk_promoted, 0);
  EXPECT_EQ(world.cache().stats().landing_free, 2);
}

TEST(Cache, AStreamWaitsForWhatALoadHasReadFromDisk) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 4));
  world.to_disk(numbers(1, 2));
  ModelDevice& device = world.world().device();
  Stream stream(world.world().device_ptr());
  const EventHandle event = device.create_event(false);
  CacheHit hit = world.reserve(numbers(0, 4));
  const auto load = world.load(hit, 10);
  load->wait_on(stream.handle(), std::nullopt);
  device.record(event, stream.handle());
  Runtime& runtime = world.world().runtime();
  EXPECT_TRUE(runtime.wait_until([&] { return device.query(event) == EventState::done; },
                                 runtime.deadline_after(10), {}));
  EXPECT_TRUE(world.held(numbers(0, 4), 10));
  load->wait(10);
  EXPECT_EQ(world.cache().stats().blocks_from_disk, 2);
  device.destroy_event(event);
}

TEST(Cache, AStreamDoesNotWaitForALoadWhoseBlockIsBad) {
  CacheWorld world({.disk_slots = 32});
  world.store({0});
  world.to_disk({0});
  world.files->contents(slot_file).at(disk_page_bytes) ^= std::byte{1};
  Stream stream(world.world().device_ptr());
  CacheHit hit = world.reserve({0});
  const auto load = world.load(hit, 10);
  EXPECT_THROW(load->wait_on(stream.handle(), std::nullopt), CopyFailed);
}

// ---- the end ----

TEST(Cache, AMountThatDoesNotAnswerIsLeftBehindWithTheBlockThatItReads) {
  FileGate gate;
  CacheWorld world({.disk_slots = 32});
  world.files->set_plan(gate.plan("write"));
  world.store({0});
  static_cast<void>(world.cache().poll());
  ASSERT_TRUE(gate.has_seen(1));
  EXPECT_EQ(world.load_all({0}, 10), 1);
  const CacheCloseReport report = world.cache().close(0.01);
  EXPECT_TRUE(report.quiet);
  EXPECT_EQ(report.disk->running, 1);
  gate.open();
  EXPECT_EQ(world.cache().close(10).disk->running, 0);
  EXPECT_TRUE(world.drop().expired());
  EXPECT_EQ(world.world().slots().free, world.world().slots().capacity);
}

TEST(Cache, WhatTheDiskDoesNotHaveAtTheEndIsSaid) {
  CacheWorld world({.disk_slots = 32});
  world.files->set_plan(failing("write", EROFS, 1'000'000));
  world.store(numbers(0, 3));
  const CacheCloseReport report = world.cache().close(0.01);
  EXPECT_TRUE(report.quiet);
  EXPECT_GE(report.unwritten + report.disk->dropped + report.disk->running, 3);
  EXPECT_EQ(world.cache().close(10).disk->running, 0);
  world.files->set_plan(nullptr);
  world.reopen();
  EXPECT_EQ(world.load_all(numbers(0, 3), 10), 0);
}

TEST(Cache, WhatWasRemovedIsNotFoundByTheNextCache) {
  CacheWorldOptions options{.disk_slots = 4};
  options.cache.low_free = options.cache.high_free = 0.5;  // not of the disk's slots
  CacheWorld world(options);
  world.store(numbers(0, 4));
  ASSERT_TRUE(world.cache().flush(10));
  static_cast<void>(world.cache().poll());
  EXPECT_EQ(world.cache().stats().index.groups[1].ready, 4);
  world.cache().clear();
  EXPECT_TRUE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->erasing, 0);
  world.reopen();
  EXPECT_EQ(world.cache().stats().index.groups[1].ready, 0);
}

TEST(Cache, WhatIsRemovedWhileItIsHeldIsErasedWhenItIsLetGo) {
  CacheWorld world({.disk_slots = 4});
  world.store(numbers(0, 2));
  ASSERT_TRUE(world.cache().flush(10));
  world.evict(numbers(0, 2), GroupIndex{0});
  CacheHit hit = world.reserve(numbers(0, 2));
  ASSERT_EQ(hit.disk_blocks(), 2);
  world.cache().clear();
  EXPECT_FALSE(world.cache().flush(10));
  EXPECT_EQ(world.cache().stats().feed->erasing, 2);
  const auto load = world.load(hit, 10);
  load->wait(10);
  EXPECT_EQ(load->loaded(), 2);
  EXPECT_TRUE(world.cache().flush(10));
  world.reopen();
  EXPECT_EQ(world.cache().stats().index.groups[1].ready, 0);
}

TEST(Cache, UnderAnotherManifestNothingIsFoundAndTheReasonIsKnown) {
  CacheWorld world({.disk_slots = 32});
  world.store(numbers(0, 3));
  world.options.cache.disk.emplace().options.manifest[0] = std::byte{7};
  world.reopen();
  EXPECT_EQ(world.reserve(numbers(0, 3)).length(), 0);
  EXPECT_EQ(world.why_miss(1).why, MissReason::other_manifest);
  EXPECT_EQ(world.why_miss(1).manifest, Digest16{});
  EXPECT_EQ(world.cache().stats().feed->foreign, 3);
  world.options.cache.disk->options.manifest = {};
  world.reopen();
  EXPECT_EQ(world.load_all(numbers(0, 3), 10), 3);
}

}  // namespace
}  // namespace kvmem
