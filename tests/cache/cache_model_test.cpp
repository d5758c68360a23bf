// A cache against a plain model of it, over random programs: groups of all three needs, two owners
// who want the same keys, a disk. Copies take virtual time, end in a hostile order and may fail; so
// may the disk, whose calls are done within the cache's. Which entry is evicted is the policy's
// choice; that nothing wrong is ever found or delivered, and that the books are right, is not.
#include <cstdio>

#include "cache/cache_model_world.hpp"

namespace kvmem::test::cache_model {
namespace {

const char* end_name(TransferState end) {
  return end == TransferState::done     ? "done"
         : end == TransferState::failed ? "failed"
                                        : "cancelled";
}

class CacheWalk : CacheModelWorld {
 public:
  using CacheModelWorld::CacheModelWorld;

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
    made.transfer =
        cache_->try_store({.keys = pointers,
                           .key_bytes = Keys::bytes,
                           .owner = made.owner,
                           .after = after,
                           .priority = pick(2) ? Priority::demand : Priority::background},
                          blocks);
    if (!made.transfer) {
      ++reached_["store without room"];
      made.fills->clear();
      return give_blocks(blocks);
    }
    reached_["store attached"] += made.transfer->job().attached;
    reached_["store found present"] += made.transfer->job().present;
    reached_["not admitted"] += !made.transfer->job().refused.empty();
    begin(std::move(made));
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
    }
    if (!made.transfer) {
      give_blocks(blocks);
    } else {
      begin(std::move(made));
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
  void begin(Running made) {
    if (made.transfer->job().id != 0) owners_.try_emplace(made.owner);  // it is not over already
    running_.push_back(std::move(made));
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
    EXPECT_TRUE(!flushed || stats.queued + stats.writing + stats.erasing == 0);
    reached_["flushed"] += flushed;
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
      if (!owners_.contains(running.owner)) continue;  // dropped meanwhile
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
    if (!owners_.contains(running.owner)) return;  // dropped meanwhile
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
  for (const auto& [what, times] : reached) {
    std::printf("%7zu  %s\n", times, what.c_str());
    EXPECT_GT(times, 20U) << what;
  }
  EXPECT_EQ(reached.size(), 31U) << "something never happened";
}

}  // namespace
}  // namespace kvmem::test::cache_model
