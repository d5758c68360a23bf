// A cache over a manager on a scripted device, and blocks whose bytes follow from their key.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cache/cache.hpp"
#include "cache/index_keys.hpp"
#include "support/offload_world.hpp"
#include "tier/memory_files.hpp"

namespace kvmem::test {

struct CacheWorldOptions {
  std::size_t device_blocks = 32;
  SlotIndex slots = 16;  // of the cache in host memory
  std::optional<SlotIndex> disk_slots = std::nullopt;
  std::size_t landing_blocks = 2;
  std::size_t spare_slots = 0;  // of the pool, that are not the cache's
  ManagerConfig config = without_reaper();
  CacheOptions cache = {};
};

// The disk's workers are threads; everything else is moved by the test's own calls.
class CacheWorld {
 public:
  explicit CacheWorld(const CacheWorldOptions& made = {},
                      std::shared_ptr<ModelDevice> device = still_device())
      : options(made),
        world_(std::make_unique<World>(
            std::move(device), WorldOptions{.device_blocks = made.device_blocks,
                                            .slots = made.slots + made.spare_slots +
                                                     (made.disk_slots ? made.landing_blocks : 0),
                                            .config = made.config})) {
    reopen();
  }
  ~CacheWorld() { close(); }
  CacheWorld(const CacheWorld&) = delete;
  CacheWorld& operator=(const CacheWorld&) = delete;

  // A new cache over the same device, pool and disk.
  void reopen() {
    close();
    CacheOptions its = options.cache;
    its.key_bytes = Keys::bytes;
    its.groups = {{"full", {}, world_->manager_ptr(), options.slots}};
    if (options.disk_slots) {
      if (!its.disk) its.disk.emplace();
      CacheDisk& disk = *its.disk;
      disk.landing_blocks = options.landing_blocks;
      disk.options.path = "/cache";
      disk.options.files = files;
      disk.options.workers = 2;
      disk.options.probe_after = std::chrono::nanoseconds(0);
      disk.options.capacity_bytes = *options.disk_slots * disk_slot_bytes();
    }
    cache_ = Cache::make(std::move(its));
  }
  void close() {
    if (!cache_) return;
    EXPECT_TRUE(cache_->close(10).quiet);
    cache_->check();
    cache_.reset();
  }
  [[nodiscard]] static std::size_t disk_slot_bytes() {
    return round_up(CacheMemory::block_bytes(), disk_page_bytes) + 2 * disk_page_bytes;
  }

  // Nobody holds it but what is unfinished.
  [[nodiscard]] std::weak_ptr<Cache> drop() {
    const std::weak_ptr<Cache> left = cache_;
    cache_.reset();
    return left;
  }
  [[nodiscard]] Cache& cache() { return *cache_; }
  [[nodiscard]] World& world() { return *world_; }

  // Device block i + `first` gets the bytes of key i, and is stored.
  std::shared_ptr<CacheTransfer> try_store(const std::vector<std::uint64_t>& numbers,
                                           BlockId first = 0, const std::string& owner = "a",
                                           const After& after = {}) {
    const Keys keys(numbers);
    const auto pointers = keys.pointers();
    Cache::Blocks blocks(1);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      blocks[0].push_back(first + static_cast<BlockId>(i));
      world_->cache().fill(blocks[0].back(), numbers[i]);
    }
    return cache_->try_store(
        {.keys = pointers, .key_bytes = Keys::bytes, .owner = owner, .after = after}, blocks);
  }
  std::shared_ptr<CacheTransfer> store(const std::vector<std::uint64_t>& numbers, BlockId first = 0,
                                       const std::string& owner = "a") {
    auto transfer = try_store(numbers, first, owner);
    if (!transfer) throw std::logic_error("the test's store found no room");
    transfer->wait(10);
    return transfer;
  }
  CacheHit reserve(const std::vector<std::uint64_t>& numbers, const std::string& owner = "a",
                   Pending pending = Pending::stop) {
    const Keys keys(numbers);
    const auto pointers = keys.pointers();
    return cache_->reserve(pointers, Keys::bytes, owner, pending);
  }
  std::shared_ptr<CacheTransfer> load(CacheHit& hit, BlockId first = 0) {
    Cache::Blocks blocks(1);
    for (std::size_t i = 0; i < hit.length(); ++i)
      blocks[0].push_back(first + static_cast<BlockId>(i));
    return cache_->load(hit, blocks, {});
  }
  [[nodiscard]] bool held(const std::vector<std::uint64_t>& numbers, BlockId first) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (!world_->cache().holds(first + static_cast<BlockId>(i), numbers[i])) return false;
    }
    return true;
  }
  // Everything that is in host memory is on disk alone.
  void to_disk(const std::vector<std::uint64_t>& numbers) {
    ASSERT_TRUE(cache_->flush(10));
    EXPECT_EQ(evict(numbers, GroupIndex{0}), numbers.size());
  }
  // How many of the keys came back, with the right bytes each.
  std::size_t load_all(const std::vector<std::uint64_t>& numbers, BlockId first = 0) {
    CacheHit hit = reserve(numbers);
    const auto transfer = load(hit, first);
    try {
      transfer->wait(10);
    } catch (const Error&) {  // what was loaded counts all the same
    }
    for (std::size_t i = 0; i < transfer->loaded(); ++i)
      EXPECT_TRUE(world_->cache().holds(first + static_cast<BlockId>(i), numbers[i])) << i;
    return transfer->loaded();
  }
  std::size_t evict(const std::vector<std::uint64_t>& numbers, std::optional<GroupIndex> group) {
    const Keys keys(numbers);
    const auto pointers = keys.pointers();
    return cache_->index().remove(pointers, Keys::bytes, group);
  }
  [[nodiscard]] Miss why_miss(std::uint64_t number) const {
    const Keys keys{number};
    return cache_->why_miss(keys.pointers()[0], Keys::bytes);
  }

  CacheWorldOptions options;  // of the next cache
  std::shared_ptr<MemoryFiles> files = std::make_shared<MemoryFiles>();

 private:
  std::unique_ptr<World> world_;
  std::shared_ptr<Cache> cache_;
};

inline std::vector<std::uint64_t> numbers(std::uint64_t first, std::size_t count) {
  std::vector<std::uint64_t> all(count);
  std::iota(all.begin(), all.end(), first);
  return all;
}

}  // namespace kvmem::test
