// A cache against a plain model of it, over random programs: groups of all three needs, two owners
// who want the same keys, a disk. Copies take virtual time, end in a hostile order and may fail; so
// may the disk, whose calls are done within the cache's. Which entry is evicted is the policy's
// choice; that nothing wrong is ever found or delivered, and that the books are right, is not.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "cache/cache.hpp"
#include "cache/group_memory.hpp"
#include "cache/index_keys.hpp"
#include "device/virtual_device.hpp"
#include "tier/memory_files.hpp"

namespace kvmem::test {
namespace {

constexpr std::array<Need, 3> kinds{Need{NeedKind::all, 0}, Need{NeedKind::last, 2},
                                    Need{NeedKind::state, 0}};
constexpr std::array<SlotIndex, 3> host_slots{10, 9, 8};
constexpr std::uint64_t all_keys = 24;
constexpr std::size_t device_blocks = 32;

using Reached = std::map<std::string, std::size_t>;  // how often each thing happened
using Blocks = std::vector<std::vector<BlockId>>;

std::pair<std::size_t, std::size_t> part_of(std::size_t group, std::size_t length) {
  if (kinds[group].kind == NeedKind::all) return {0, length};
  const std::size_t count = kinds[group].kind == NeedKind::state ? 1 : kinds[group].count;
  return {length < count ? 0 : length - count, length};
}

const char* end_name(TransferState end) {
  return end == TransferState::done     ? "done"
         : end == TransferState::failed ? "failed"
                                        : "cancelled";
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

class CacheWalk {
 public:
  CacheWalk(std::uint64_t seed, Reached& reached)
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
  ~CacheWalk() {
    hits_.clear();
    for (const Stalled& stalled : stalls_) device_->destroy_event(stalled.event);
  }
  CacheWalk(const CacheWalk&) = delete;
  CacheWalk& operator=(const CacheWalk&) = delete;

  void step() {
    switch (pick(24)) {
      case 0:
      case 1:
      case 2:
      case 3:
        store();
        break;
      case 4:
      case 5:
      case 6:
        reserve();
        break;
      case 7:
      case 8:
      case 9:
        if (!hits_.empty()) load(pick(hits_.size()));
        break;
      case 10:
        pick(2) ? keep() : cancel();
        break;
      case 11:
        drop_something();
        break;
      case 12:
        pick(6) ? evict() : clear();
        break;
      case 13:
        pick(2) ? fail_device() : note_tokens();
        break;
      case 14:
        if (pick(2)) damage_disk();
        break;
      case 15:
        pick(3) ? flush() : retire();
        break;
      case 16:
        pick(4) ? leave_to_disk() : reopen(pick(2) == 0);
        break;
      case 17:
      case 18:
        signal();
        break;
      default:
        pass_time();
    }
    observe();
  }

  void check() {
    cache_->check();
    for (auto& group : groups_) group->pool->check();
    for (std::uint64_t key = 0; key < all_keys; ++key) {
      for (std::size_t g = 0; g < count_; ++g) {
        for (const std::size_t tier : {g, g + count_}) {
          EXPECT_TRUE(state(tier, key) != EntryState::ready || may_be_found_[g].contains(key))
              << "key " << key << " is found in group " << tier << " and should not be";
        }
      }
    }
    if (!drops_handles_) check_counts();
  }

  void end() {
    quiesce();
    check();
    const CacheStats stats = cache_->stats();
    EXPECT_EQ(stats.transfers, 0U);
    EXPECT_EQ(stats.index.plans, stats.feed->writing);
    EXPECT_EQ(stats.landing_free, count_ * landing_);
    shut(true);
  }

 private:
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

  // ---- the world ----
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

  // ---- what is done ----
  void store() {
    const auto keys = chain();
    Blocks blocks(count_, std::vector<BlockId>(keys.size(), -1));
    const bool all = pick(4) != 0;
    bool enough = true;
    for (std::size_t g = 0; g < count_; ++g) {
      const auto [first, last] = part_of(g, keys.size());
      enough = enough && take_blocks(g, all ? 0 : first, last, blocks[g]);
    }
    if (!enough) return give_blocks(blocks);
    Running made{nullptr, CacheKind::store, owner(), keys, blocks, {}, false,
                 false,   device_->faults()};
    After after;
    const bool late = pick(3) == 0;
    made.fills = std::make_shared<std::vector<Fill>>();
    for (std::size_t g = 0; g < count_; ++g) {
      for (std::size_t i = 0; i < keys.size(); ++i)
        if (blocks[g][i] >= 0) made.fills->push_back({g, blocks[g][i], keys[i]});
    }
    if (late)
      after = stall(made.fills);
    else
      write(*made.fills);
    const Keys bytes(keys);
    const auto pointers = bytes.pointers();
    try {
      made.transfer =
          cache_->try_store({.keys = pointers,
                             .key_bytes = Keys::bytes,
                             .owner = made.owner,
                             .after = after,
                             .priority = pick(2) ? Priority::demand : Priority::background},
                            blocks);
    } catch (const CopyFailed&) {  // of a device call while it was claimed
      ++reached_["store refused by the device"];
    }
    if (!made.transfer) {
      ++reached_["store without room"];
      made.fills->clear();
      return give_blocks(blocks);
    }
    reached_["store attached"] += made.transfer->job().attached;
    reached_["store found present"] += made.transfer->job().present;
    reached_["not admitted"] += !made.transfer->job().refused.empty();
    running_.push_back(std::move(made));
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

  void reserve() {
    if (hits_.size() >= 4) return;
    const auto keys = chain();
    const bool attach = pick(2) == 0;
    std::optional<double> expires;
    if (pick(6) == 0) expires = 0;
    const auto there = [&](std::size_t g, std::size_t i, bool with_writing) {
      for (const std::size_t tier : {g, g + count_}) {
        const EntryState now = state(tier, keys[i]);
        if (now == EntryState::ready || (with_writing && now == EntryState::writing)) return true;
      }
      return false;
    };
    const std::string who = owner();
    const Keys bytes(keys);
    CacheHit hit = cache_->reserve(bytes.pointers(), Keys::bytes, who,
                                   attach ? Pending::attach : Pending::stop, expires);
    const std::size_t ready = longest(
        count_, keys.size(), [&](std::size_t g, std::size_t i) { return there(g, i, false); });
    const std::size_t coming = longest(
        count_, keys.size(), [&](std::size_t g, std::size_t i) { return there(g, i, true); });
    EXPECT_EQ(hit.length(), attach ? coming : ready);
    EXPECT_EQ(hit.pending(), coming > ready);
    for (Hit& other : hits_) other.may_be_gone = other.may_be_gone || other.attaches;
    if (hit.length() == 0) return;
    const bool attaches = attach && coming > ready;
    reached_["attached to keys in flight"] += attaches;
    reached_["reserved on disk"] += hit.disk_blocks();
    auto reserved = keys;
    reserved.resize(hit.length());
    hits_.push_back({std::move(hit), reserved, who, attaches, expires.has_value()});
    if (pick(2)) load(hits_.size() - 1);
  }
  void keep() {
    if (hits_.empty()) return;
    Hit& hit = hits_[pick(hits_.size())];
    try {
      const std::size_t kept = hit.hit.keep(pick(hit.keys.size() + 1));
      EXPECT_EQ(kept, hit.hit.length());
      EXPECT_LE(kept, hit.keys.size());
      hit.keys.resize(kept);
      ++reached_["kept a part"];
    } catch (const InvalidArgument&) {
      EXPECT_TRUE(hit.may_be_gone);
    }
  }
  void load(std::size_t number) {
    const auto at = hits_.begin() + static_cast<std::ptrdiff_t>(number);
    Hit& hit = *at;
    Blocks blocks(count_, std::vector<BlockId>(hit.keys.size(), -1));
    const bool all = pick(2) == 0;
    bool enough = true;
    for (std::size_t g = 0; g < count_; ++g) {
      const auto [first, last] = part_of(g, hit.keys.size());
      enough = enough && take_blocks(g, all ? 0 : first, last, blocks[g]);
    }
    if (!enough) return give_blocks(blocks);
    for (std::size_t g = 0; g < count_; ++g) {
      for (const BlockId block : blocks[g])
        if (block >= 0) groups_[g]->memory.spoil(block);
    }
    Running made{nullptr, CacheKind::load, hit.owner,    hit.keys,         blocks,
                 {},      false,           hit.attaches, device_->faults()};
    try {
      made.transfer =
          cache_->load(hit.hit, blocks, {}, pick(2) ? Priority::demand : Priority::background);
    } catch (const InvalidArgument&) {
      EXPECT_TRUE(hit.may_be_gone);
      ++reached_["load of what had expired"];
    } catch (const PoolExhausted&) {  // max_transfers
      ++reached_["too many transfers"];
      return give_blocks(blocks);
    } catch (const CopyFailed&) {
      return give_blocks(blocks);
    }
    if (!made.transfer) {
      give_blocks(blocks);
    } else {
      running_.push_back(std::move(made));
    }
    hits_.erase(at);
  }
  void cancel() {
    if (running_.empty()) return;
    Running& chosen = running_[pick(running_.size())];
    if (!chosen.transfer) return;
    static_cast<void>(chosen.transfer->cancel());
    chosen.cancelled = true;
  }
  void drop_something() {
    const std::size_t what = pick(3);
    if (what == 0) {
      const std::string who = owner();
      std::size_t least = 0;
      for (Hit& hit : hits_) {
        if (hit.owner != who) continue;
        least += !hit.may_be_gone && !hit.keys.empty();
        hit.may_be_gone = true;
      }
      const std::size_t dropped = cache_->drop_owner(who);
      EXPECT_GE(dropped, least);
      owners_.erase(who);
      EXPECT_FALSE(cache_->owner(who).has_value());
      reached_["owner dropped with what it reserved"] += dropped > 0;
    } else if (what == 1 && !hits_.empty()) {
      hits_.erase(hits_.begin() + static_cast<std::ptrdiff_t>(pick(hits_.size())));
    } else if (drops_handles_ && !running_.empty()) {
      drop_handle(running_[pick(running_.size())]);
    }
  }
  // Whether it ends well is not seen then.
  void drop_handle(Running& chosen) {
    if (!chosen.transfer) return;
    if (chosen.kind == CacheKind::store) expect_found(chosen);
    chosen.transfer.reset();
    ++reached_["handle dropped"];
  }
  void evict() {
    const auto keys = chain();
    const Keys bytes(keys);
    static_cast<void>(cache_->evict(bytes.pointers(), Keys::bytes));
    for (const std::uint64_t key : keys) forget(key);
    for (std::size_t tier = 0; tier < 2 * count_; ++tier)
      EXPECT_EQ(state(tier, keys[0]), EntryState::free);
    ++reached_["evicted on demand"];
  }
  // As if host memory had evicted them: what the disk has, it has.
  void leave_to_disk() {
    const Keys bytes(chain());
    for (std::size_t g = 0; g < count_; ++g)
      static_cast<void>(
          cache_->index().remove(bytes.pointers(), Keys::bytes, static_cast<GroupIndex>(g)));
    ++reached_["left to the disk"];
  }
  void clear() {
    static_cast<void>(cache_->clear());
    for (std::uint64_t key = 0; key < all_keys; ++key) forget(key);
    ++reached_["cleared"];
  }
  void forget(std::uint64_t key) {
    for (auto& keys : may_be_found_) keys.erase(key);
    for (Running& running : running_) running.voided.insert(key);
  }
  void note_tokens() {
    const std::string who = owner();
    const std::size_t count = 1 + pick(100);
    cache_->note_tokens(who, count);
    owners_[who].tokens += count;
  }
  void fail_device() {
    constexpr std::array<DeviceCall, 5> calls{DeviceCall::copy, DeviceCall::record,
                                              DeviceCall::wait, DeviceCall::create_event,
                                              DeviceCall::query};
    device_->fail_nth(calls[pick(calls.size())], 1 + pick(4),
                      pick(2) ? Fault::refused : Fault::in_flight);
  }
  void damage_disk() {
    const char* const file = "/cache/slots-0000.kv";
    const std::size_t what = pick(3);
    if (what == 0) {
      std::vector<std::byte>& bytes = files_->contents(file);
      const std::size_t slot = pick(bytes.size() / disk_slot_bytes);
      const std::size_t at = pick(2) ? disk_page_bytes + pick(64) : pick(96);
      bytes[slot * disk_slot_bytes + at] ^= std::byte{16};
      disk_is_bad_ = true;
      ++reached_["byte changed on disk"];
      return;
    }
    const char* const call = what == 1 ? "write" : "read";
    const std::int64_t error = pick(2) ? -EIO : -ENOSPC;
    disk_is_bad_ = disk_is_bad_ || what == 2;
    auto left = std::make_shared<std::size_t>(1 + pick(3));
    files_->set_plan([call = std::string(call), error, left,
                      this](const MemoryFiles::Call& made) -> std::optional<std::int64_t> {
      if (call != made.what || *left == 0) return std::nullopt;
      --*left;
      ++reached_["disk " + call + " failed"];
      return error;
    });
  }
  void flush() {
    const bool flushed = cache_->flush(1e-6);
    const DiskFeedStats stats = *cache_->stats().feed;
    EXPECT_EQ(flushed, stats.queued + stats.writing == 0);
    ++reached_[flushed ? "flushed" : "not flushed"];
  }
  void retire() {
    if (++retired_ > 2) return;
    const std::size_t group = pick(2 * count_);
    const auto slots = cache_->index().options().groups[group].slots;
    cache_->index().retire(static_cast<GroupIndex>(group), static_cast<SlotIndex>(pick(slots)));
    ++reached_["slot retired"];
  }
  void pass_time() {
    if (pick(2))
      device_->advance(static_cast<Nanoseconds>(pick(20'000)));
    else
      static_cast<void>(device_->step());
    static_cast<void>(cache_->poll());
  }

  // ---- the end of a cache ----
  void quiesce() {
    device_->forget_faults();
    files_->set_plan(nullptr);
    hits_.clear();
    for (Stalled& stalled : stalls_)
      if (!stalled.signalled) signal(stalled);
    for (int i = 0; i < 2000 && cache_->poll() > 0; ++i) static_cast<void>(device_->step());
    for (int i = 0; i < 10; ++i) static_cast<void>(cache_->poll());
    observe();
    EXPECT_TRUE(running_.empty());
  }
  void shut(bool quietly) {
    const CacheCloseReport report = cache_->close(quietly ? 1.0 : 0.0);
    EXPECT_TRUE(report.quiet || !quietly);
    for (Running& running : running_) running.cancelled = true;
    quiesce();
    const std::weak_ptr<Cache> gone = cache_;
    cache_.reset();
    EXPECT_TRUE(gone.expired());
    for (auto& group : groups_) {
      EXPECT_EQ(group->pool->free(), group->pool->stats().slots.capacity);
      std::vector<BlockId> all(device_blocks);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_TRUE(group->manager->busy(all).empty());
      EXPECT_EQ(group->free.size(), device_blocks);
    }
  }
  void reopen(bool quietly) {
    if (quietly) quiesce();
    hits_.clear();
    shut(quietly);
    retired_ = 0;
    open();
    ++reached_[quietly ? "closed and opened" : "closed at once and opened"];
  }

  // ---- what came of it ----
  void observe() {
    std::erase_if(running_, [&](Running& running) {
      if (running.transfer ? !running.transfer->done() : still_busy(running)) return false;
      if (running.transfer) settle(running);
      if (running.fills) running.fills->clear();
      give_blocks(running.blocks);
      return true;
    });
  }
  bool still_busy(const Running& running) {
    for (std::size_t g = 0; g < count_; ++g) {
      auto blocks = running.blocks[g];
      std::erase_if(blocks, [](BlockId block) { return block < 0; });
      if (!groups_[g]->manager->busy(blocks).empty()) return true;
    }
    return false;
  }
  void settle(const Running& running) {
    const CacheTransfer& transfer = *running.transfer;
    const TransferState end = transfer.state();
    EXPECT_TRUE(end != TransferState::cancelled || running.cancelled);
    const bool may_fail = running.may_fail || device_->faults() != running.faults;
    running.kind == CacheKind::store ? settle_store(running, end, may_fail)
                                     : settle_load(running, end, may_fail);
  }
  void settle_store(const Running& running, TransferState end, bool may_fail) {
    EXPECT_TRUE(end == TransferState::done || running.cancelled || may_fail);
    ++reached_[std::string("store ") + end_name(end)];
    if (running.transfer->job().plan == 0) return;  // there was nothing to copy
    if (end == TransferState::cancelled) ++counts_.cancelled;
    if (end == TransferState::failed) ++counts_.stores_failed;
    if (end != TransferState::done) return;
    ++counts_.stores;
    expect_found(running);
    for (const CachePart& part : running.transfer->job().parts) {
      counts_.stored += part.positions.size();
      OwnerCounts& owner = owners_[running.owner];
      owner.offloads += part.positions.size();
      owner.offloaded_bytes += part.positions.size() * groups_[part.group]->memory.block_bytes();
    }
  }
  void expect_found(const Running& store) {
    for (const CachePart& part : store.transfer->job().parts) {
      for (const std::uint32_t position : part.positions) {
        const std::uint64_t key = store.keys[position];
        if (store.voided.contains(key)) continue;
        may_be_found_[part.group].insert(key);
        ever_stored_[part.group].insert(key);
      }
    }
  }
  void settle_load(const Running& running, TransferState end, bool may_fail) {
    const CacheTransfer& load = *running.transfer;
    const CacheJob& job = load.job();
    std::array<std::set<std::size_t>, kinds.size()> arrived;
    std::size_t from_disk = 0, from_host = 0;
    for (const CachePart& part : job.parts) {
      may_fail = may_fail || (disk_is_bad_ && !part.ok);
      if (!part.ok) continue;
      (part.landing ? from_disk : from_host) += part.positions.size();
      for (const std::uint32_t i : part.positions) {
        arrived[part.group].insert(i);
        EXPECT_TRUE(
            groups_[part.group]->memory.holds(running.blocks[part.group][i], running.keys[i]))
            << "wrong bytes of key " << running.keys[i] << " in group " << part.group
            << (part.landing ? ", from disk" : "");
      }
    }
    const std::size_t whole = longest(
        count_, job.length, [&](std::size_t g, std::size_t i) { return arrived[g].contains(i); });
    EXPECT_TRUE(end == TransferState::done || running.cancelled || may_fail);
    EXPECT_TRUE(end != TransferState::done || whole == running.keys.size());
    EXPECT_EQ(load.loaded(), end == TransferState::cancelled ? 0 : whole);
    EXPECT_EQ(load.failed_positions().empty(), end == TransferState::done);
    ++reached_[std::string("load ") + end_name(end)];
    reached_["load of a prefix"] += end == TransferState::failed && whole > 0;
    reached_["key from disk"] += from_disk;
    if (running.keys.empty()) return;
    if (end == TransferState::cancelled) ++counts_.cancelled;
    if (end == TransferState::cancelled) return;
    ++(end == TransferState::done ? counts_.loads : counts_.loads_failed);
    counts_.keys_loaded += whole;
    counts_.from_disk += from_disk;
    counts_.from_host += from_host;
    OwnerCounts& owner = owners_[running.owner];
    owner.restores += from_disk + from_host;
    for (std::size_t g = 0; g < count_; ++g)
      owner.restored_bytes += arrived[g].size() * groups_[g]->memory.block_bytes();
  }
  void check_counts() {
    const CacheStats is = cache_->stats();
    EXPECT_EQ((Counts{is.stores, is.stores_failed, is.loads, is.loads_failed, is.cancelled,
                      is.keys_loaded, is.blocks_stored, is.blocks_from_host, is.blocks_from_disk}),
              counts_);
    for (const auto& [name, expected] : owners_) {
      const OwnerCounts its = cache_->owner(name).value_or(OwnerCounts{});
      EXPECT_EQ(its.offloads, expected.offloads);
      EXPECT_EQ(its.restores, expected.restores);
      EXPECT_EQ(its.offloaded_bytes, expected.offloaded_bytes);
      EXPECT_EQ(its.restored_bytes, expected.restored_bytes);
      EXPECT_EQ(its.tokens, expected.tokens);
    }
  }

  static constexpr std::size_t disk_slot_bytes = 2 * disk_page_bytes;

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

TEST(CacheModel, AgreesWithThePlainOneOverRandomPrograms) {
  Reached reached;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    CacheWalk walk(seed, reached);
    for (int i = 0; i < 80; ++i) {
      walk.step();
      walk.check();
      if (HasFailure()) FAIL() << "seed " << seed << ", step " << i;
    }
    walk.end();
    if (HasFailure()) FAIL() << "seed " << seed << ", at its end";
  }
  for (const auto& [what, times] : reached) std::printf("%7zu  %s\n", times, what.c_str());
  for (const char* const what : {"attached to keys in flight",
                                 "byte changed on disk",
                                 "cleared",
                                 "closed and opened",
                                 "closed at once and opened",
                                 "disk read failed",
                                 "disk write failed",
                                 "evicted on demand",
                                 "flushed",
                                 "found by the next cache",
                                 "handle dropped",
                                 "kept a part",
                                 "key from disk",
                                 "load cancelled",
                                 "load done",
                                 "load failed",
                                 "load of a prefix",
                                 "load of what had expired",
                                 "not admitted",
                                 "owner dropped with what it reserved",
                                 "reserved on disk",
                                 "slot retired",
                                 "store attached",
                                 "store behind an event",
                                 "store cancelled",
                                 "store done",
                                 "store failed",
                                 "store found present",
                                 "store without room",
                                 "too many transfers"})
    EXPECT_GT(reached[what], 20U) << what;
}

}  // namespace
}  // namespace kvmem::test
