#include "cache/cache_world.hpp"

namespace kvmem {
namespace {

using test::CacheWorld;
using test::CacheWorldOptions;
using test::numbers;

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
  // Slots are given in turn: key 3 is in the fourth.
  const std::size_t at = 3 * CacheWorld::disk_slot_bytes() + disk_page_bytes + 100;
  world.files->contents("/cache/slots-0000.kv").at(at) ^= std::byte{4};
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

}  // namespace
}  // namespace kvmem
