// What the model test of a cache stands on: groups with a manager each on one virtual device, a
// disk in memory, device blocks that the program has in use, and stores that wait for what the
// engine has still to write.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "cache/cache.hpp"
#include "cache/group_memory.hpp"
#include "cache/index_keys.hpp"
#include "device/virtual_device.hpp"
#include "tier/memory_files.hpp"

namespace kvmem::test::cache_model {

inline constexpr std::array<Need, 3> kinds{Need{NeedKind::all, 0}, Need{NeedKind::last, 2},
                                           Need{NeedKind::state, 0}};
inline constexpr std::array<SlotIndex, 3> host_slots{10, 9, 8};
inline constexpr std::uint64_t all_keys = 24;
inline constexpr std::size_t device_blocks = 32;

using Reached = std::map<std::string, std::size_t>;  // how often each thing happened
using Blocks = std::vector<std::vector<BlockId>>;

inline std::pair<std::size_t, std::size_t> part_of(std::size_t group, std::size_t length) {
  if (kinds[group].kind == NeedKind::all) return {0, length};
  const std::size_t count = kinds[group].kind == NeedKind::state ? 1 : kinds[group].count;
  return {length < count ? 0 : length - count, length};
}

// The longest length, of at most `keys`, for which everything that is needed is there.
template <class There>
std::size_t longest(std::size_t groups, std::size_t keys, const There& there) {
  for (std::size_t length = keys; length > 0; --length) {
    bool all = true;
    for (std::size_t g = 0; g < groups; ++g) {
      for (auto [i, last] = part_of(g, length); i < last; ++i) all = all && there(g, i);
    }
    if (all) return length;
  }
  return 0;
}

struct CacheModelWorld {
  struct Group {
    Group(const std::shared_ptr<Device>& device, std::size_t number)
        : memory(device, device_blocks, number) {}
    GroupMemory memory;
    std::shared_ptr<BlockPool> pool;
    std::shared_ptr<Manager> manager;
    std::set<BlockId> free;  // that no transfer of the program's uses
  };
  struct Fill {  // what the engine has still to write into a block that is stored already
    std::size_t group;
    BlockId block;
    std::uint64_t key;
  };
  struct Stalled {
    EventHandle event;
    std::shared_ptr<std::vector<Fill>> fills;
    bool signalled = false;
  };
  struct Running {
    std::shared_ptr<CacheTransfer> transfer;  // null: the handle was dropped
    CacheKind kind;
    std::string owner;
    std::vector<std::uint64_t> keys;
    Blocks blocks;
    std::set<std::uint64_t> voided;  // removed since it began
    bool cancelled, may_fail;
    std::uint64_t faults;  // of the device, when it began
    std::shared_ptr<std::vector<Fill>> fills = nullptr;
  };
  struct Hit {
    CacheHit hit;
    std::vector<std::uint64_t> keys;
    std::string owner;
    bool attaches, may_be_gone;
  };
  struct Counts {
    std::uint64_t stores = 0, stores_failed = 0, loads = 0, loads_failed = 0, cancelled = 0,
                  keys_loaded = 0, stored = 0, from_host = 0, from_disk = 0;
    bool operator==(const Counts&) const = default;
  };

  CacheModelWorld(std::uint64_t seed, Reached& reached)
      : random_(seed),
        reached_(reached),
        drops_handles_(seed % 4 == 0),
        count_(seed % 3 == 0 ? 1 : kinds.size()) {
    device_ = make_virtual_device({.seed = seed,
                                   .bytes_per_second = 1e7,
                                   .latency = pick(2) ? 2000 : 0,
                                   .shared_link = pick(3) == 0});
    runtime_ = Runtime::make(device_);
    choose_options();
    for (std::size_t g = 0; g < count_; ++g) groups_.push_back(make_group(g));
    open();
  }
  ~CacheModelWorld() {
    hits_.clear();
    for (const Stalled& stalled : stalls_) device_->destroy_event(stalled.event);
  }
  CacheModelWorld(const CacheModelWorld&) = delete;
  CacheModelWorld& operator=(const CacheModelWorld&) = delete;

  std::size_t pick(std::size_t below) { return random_() % below; }
  std::string owner() { return pick(2) ? "one" : "two"; }
  void choose_options() {
    constexpr std::array<PolicyKind, 3> policies{PolicyKind::lru, PolicyKind::arc,
                                                 PolicyKind::gdsf};
    landing_ = 1 + pick(2);
    manager_.reaper = false;
    manager_.max_queued_bytes = 600 * (1 + pick(4));
    manager_.max_transfers = 2 + pick(6);
    manager_.window_descriptors = 4 + pick(20);
    options_.key_bytes = Keys::bytes;
    options_.policy = policies[pick(3)];
    options_.admit_after = pick(4) == 0 ? 2 : 1;
    options_.low_free = pick(2) ? 0.25 : 0;
    options_.high_free = 0.5;
    options_.max_transfers = 3 + pick(6);
    CacheDisk& disk = options_.disk.emplace();
    disk.landing_blocks = landing_;
    disk.write = pick(3) ? DiskWrite::through : DiskWrite::back;
    disk.write_back_free = pick(2) ? 0.25 : 1.0;
    disk.max_writes = 1 + pick(4);
    disk.options.path = "/cache";
    disk.options.files = files_;
    disk.options.workers = 0;
    disk.options.probe_after = std::chrono::nanoseconds(0);
    disk.options.capacity_bytes = (12 + pick(30)) * disk_slot_bytes;
  }
  std::unique_ptr<Group> make_group(std::size_t number) {
    auto group = std::make_unique<Group>(device_, number);
    PoolOptions pool;
    pool.block_bytes = group->memory.block_bytes();
    pool.capacity_bytes = (host_slots[number] + landing_) * slot_alignment_bytes;
    group->pool = std::make_shared<BlockPool>(device_, pool);
    group->manager = Manager::make(runtime_, group->memory.layout(), group->pool, manager_);
    for (std::size_t i = 0; i < device_blocks; ++i) group->free.insert(static_cast<BlockId>(i));
    return group;
  }
  void open() {
    CacheOptions options = options_;
    for (std::size_t g = 0; g < count_; ++g)
      options.groups.push_back({std::string(1, static_cast<char>('a' + g)), kinds[g],
                                groups_[g]->manager, host_slots[g]});
    cache_ = Cache::make(std::move(options));
    counts_ = {};
    owners_.clear();
    may_be_found_ = ever_stored_;  // what was evicted may still be on disk
    for (std::uint64_t key = 0; key < all_keys; ++key)
      reached_["found by the next cache"] += state(count_, key) == EntryState::ready;
  }
  EntryState state(std::size_t tier, std::uint64_t key) {
    const Keys keys{key};
    return cache_->index().state(keys.pointers()[0], Keys::bytes, static_cast<GroupIndex>(tier));
  }
  // A part of one of four chains from its beginning; two and two have their first keys in common.
  std::vector<std::uint64_t> chain() {
    std::vector<std::uint64_t> keys(1 + pick(6));
    const std::uint64_t first = 6 * pick(4);
    for (std::size_t i = 0; i < keys.size(); ++i)
      keys[i] = (i < 2 ? first - first % 12 : first) + i;
    return keys;
  }
  // A device block for each position of [first, last), or less than 0; false: there are not enough.
  bool take_blocks(std::size_t group, std::size_t first, std::size_t last,
                   std::vector<BlockId>& blocks) {
    std::set<BlockId>& free = groups_[group]->free;
    if (free.size() < last - first) return false;
    for (std::size_t i = first; i < last; ++i) {
      const auto block = std::next(free.begin(), static_cast<std::ptrdiff_t>(pick(free.size())));
      blocks[i] = *block;
      free.erase(block);
    }
    return true;
  }
  void give_blocks(const Blocks& blocks) {
    for (std::size_t g = 0; g < blocks.size(); ++g) {
      for (const BlockId block : blocks[g])
        if (block >= 0) groups_[g]->free.insert(block);
    }
  }

  // The engine writes behind this, and a store must not read before.
  After stall(const std::shared_ptr<std::vector<Fill>>& fills) {
    After after;
    device_->pause_faults(true);
    stalls_.push_back({device_->create_event(false), fills});
    device_->record_unsignalled(stalls_.back().event);
    groups_[0]->manager->add_event(after, stalls_.back().event);
    device_->pause_faults(false);
    for (const Fill& fill : *fills) groups_[fill.group]->memory.spoil(fill.block);
    ++reached_["store behind an event"];
    return after;
  }
  void write(const std::vector<Fill>& fills) {
    for (const Fill& fill : fills) groups_[fill.group]->memory.fill(fill.block, fill.key);
  }
  void signal() {
    std::vector<Stalled*> waiting;
    for (Stalled& stalled : stalls_)
      if (!stalled.signalled) waiting.push_back(&stalled);
    if (!waiting.empty()) signal(*waiting[pick(waiting.size())]);
  }
  void signal(Stalled& stalled) {
    write(*stalled.fills);
    device_->signal(stalled.event);
    stalled.signalled = true;
  }

  static constexpr std::size_t disk_slot_bytes = 3 * disk_page_bytes;

  std::mt19937_64 random_;
  Reached& reached_;
  const bool drops_handles_;
  const std::size_t count_;  // of the groups
  std::shared_ptr<VirtualDevice> device_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<MemoryFiles> files_ = std::make_shared<MemoryFiles>();
  std::size_t landing_ = 1, retired_ = 0;
  ManagerConfig manager_;
  CacheOptions options_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::shared_ptr<Cache> cache_;
  std::vector<Running> running_;
  std::vector<Hit> hits_;
  std::vector<Stalled> stalls_;
  std::array<std::set<std::uint64_t>, kinds.size()> may_be_found_, ever_stored_;
  bool disk_is_bad_ = false;  // something on it may not be read back
  Counts counts_;
  std::map<std::string, OwnerCounts> owners_;
};

}  // namespace kvmem::test::cache_model
