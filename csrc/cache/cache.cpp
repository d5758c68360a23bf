// Construction, and the calls that begin something.
#include "cache/cache.hpp"

#include <algorithm>
#include <numeric>

#include "base/check.hpp"
#include "cache/pending_store.hpp"
#include "cache/plan_guard.hpp"

namespace kvmem {

namespace {

void expect_options(const CacheOptions& options) {
  KVMEM_EXPECTS(!options.groups.empty() && options.groups.size() <= most_cache_groups, "there are ",
                options.groups.size(), " groups, which must be 1 to ", most_cache_groups);
  for (const CacheGroup& group : options.groups) {
    KVMEM_EXPECTS(group.manager != nullptr, "group '", group.name, "' has no manager");
    KVMEM_EXPECTS(group.manager->runtime() == options.groups.front().manager->runtime(), "group '",
                  group.name, "' is on another device than group '", options.groups.front().name,
                  "'");
  }
  KVMEM_EXPECTS(options.admit_after >= 1 && options.admit_after <= 255, "admit_after is ",
                options.admit_after, ", which must be 1 to 255");
  KVMEM_EXPECTS(options.max_transfers >= 1, "max_transfers is 0, which must be at least 1");
  KVMEM_EXPECTS(options.host_bytes_per_second > 0, "host_bytes_per_second is ",
                options.host_bytes_per_second, ", which must be positive");
  KVMEM_EXPECTS(options.disk_bytes_per_second > 0, "disk_bytes_per_second is ",
                options.disk_bytes_per_second, ", which must be positive");
  if (!options.disk) return;
  const CacheDisk& disk = *options.disk;
  KVMEM_EXPECTS(disk.write_back_free >= 0 && disk.write_back_free <= 1, "write_back_free is ",
                disk.write_back_free, ", which must be 0 to 1");
  KVMEM_EXPECTS(disk.landing_blocks >= 1, "landing_blocks is 0, which must be at least 1");
  KVMEM_EXPECTS(disk.max_writes >= 1, "max_writes is 0, which must be at least 1");
}

std::size_t slots_of(const std::vector<GroupOptions>& groups) {
  std::size_t all = 0;
  for (const GroupOptions& group : groups) all += group.slots;
  return all;
}

IndexOptions index_options(const CacheOptions& options, const DiskFeed* feed) {
  IndexOptions index{.groups = {},
                     .key_bytes = options.key_bytes,
                     .policy = options.policy,
                     .low_free = options.low_free,
                     .high_free = options.high_free,
                     .max_plans = options.max_plans,
                     .max_events = options.max_events,
                     .clock = {}};
  for (const CacheGroup& group : options.groups)
    index.groups.push_back({group.name, group.need, group.slots});
  for (std::size_t i = 0; feed != nullptr && i < options.groups.size(); ++i) {
    const CacheGroup& group = options.groups[i];
    index.groups.push_back(
        {group.name + "@disk", group.need, feed->slots(i), static_cast<GroupIndex>(i)});
  }
  return index;
}

}  // namespace

std::shared_ptr<Cache> Cache::make(CacheOptions options) {
  expect_options(options);
  std::shared_ptr<Cache> cache(new Cache(std::move(options)));
  cache->runtime_->add(cache);
  return cache;
}

// The books are made last: their size follows from that of the index.
Cache::Cache(CacheOptions options)
    : options_(std::move(options)),
      runtime_(options_.groups.front().manager->runtime()),
      store_turns_(runtime_->device().progress()),
      memory_(0),
      owners_(options_.thrash, options_.max_owners),
      host_rate_{options_.host_bytes_per_second},
      disk_rate_{options_.disk_bytes_per_second} {
  take_slots();
  if (options_.disk) {
    feed_ = std::make_unique<DiskFeed>(*options_.disk, options_.groups, options_.key_bytes,
                                       runtime_->device_ptr());
  }
  IndexOptions index = index_options(options_, feed_.get());
  memory_ = KeyMemory(slots_of(index.groups));
  index_ = std::make_unique<Index>(std::move(index));
  if (feed_) feed_->recover(*index_, memory_);
}

Cache::~Cache() = default;

void Cache::take_slots() {
  const std::size_t landing = options_.disk ? options_.disk->landing_blocks : 0;
  for (CacheGroup& group : options_.groups) {
    BlockPool& pool = *group.manager->pool();
    if (group.slots == 0 && pool.free() > landing)
      group.slots = static_cast<SlotIndex>(pool.free() - landing);
    const std::size_t wanted = std::max<std::size_t>(group.slots, 1) + landing;
    auto slots = pool.try_acquire(wanted);
    if (!slots) {
      throw CapacityError(text("the pool of group '", group.name, "' cannot give the cache ",
                               wanted, " slots (", landing, " of them for what comes from disk)"),
                          pool.shortage(wanted));
    }
    Group& its = groups_.emplace_back();
    its.manager = group.manager;
    its.places.assign(slots->slots().begin(), slots->slots().end());
    its.landing_free.assign(its.places.begin() + group.slots, its.places.end());
    its.places.resize(group.slots);
    its.slots = std::move(*slots);
    // Of what may be queued at once, so that others get their turn.
    its.most_blocks_a_part =
        std::max<std::size_t>(1, group.manager->config().max_queued_bytes / 4 / pool.block_bytes());
    needs_.push_back({static_cast<GroupIndex>(groups_.size() - 1), group.need});
  }
}

Gate::Pass Cache::enter() {
  mark_.expect_same_process("the cache");
  return gate_.enter("the cache");
}

// ---- store ----

// Which of the keys each group has a block for.
std::vector<KeyRange> Cache::ranges_of(std::size_t keys, const Blocks& blocks) const {
  KVMEM_EXPECTS(blocks.size() == groups_.size(), "there are blocks of ", blocks.size(),
                " groups, and the cache has ", groups_.size());
  std::vector<KeyRange> ranges(index_->options().groups.size());  // none of the disk's
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::vector<BlockId>& its = blocks[g];
    const std::string& name = options_.groups[g].name;
    KVMEM_EXPECTS(its.size() == keys, "there are ", its.size(), " device blocks of group '", name,
                  "' for ", keys, " keys");
    const auto has = [](BlockId block) { return block >= 0; };
    const auto first = std::ranges::find_if(its, has);
    const auto last = std::ranges::find_if_not(first, its.end(), has);
    KVMEM_EXPECTS(std::none_of(last, its.end(), has), "the device blocks of group '", name,
                  "' are not one range: there is none for key ", last - its.begin());
    ranges[g] = {static_cast<std::size_t>(first - its.begin()),
                 static_cast<std::size_t>(last - its.begin())};
    if (first == its.end()) ranges[g] = {0, 0};
  }
  return ranges;
}

// How many leading keys a store would copy nothing of, though others may be on disk.
std::size_t Cache::in_host_memory(const Request& request) const {
  const auto is_there = [&](const std::byte* key) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (needs_[g].need.kind == NeedKind::all &&
          index_->state(key, request.key_bytes, static_cast<GroupIndex>(g)) == EntryState::free)
        return false;
    }
    return true;
  };
  const auto missing = std::ranges::find_if_not(request.keys, is_there);
  return static_cast<std::size_t>(missing - request.keys.begin());
}

Cache::Admitted Cache::admit(const Request& request) {
  const std::size_t keys = request.keys.size();
  const std::size_t there = index_->peek(request.keys, request.key_bytes);
  const std::size_t here = feed_ ? in_host_memory(request) : there;
  if (here == keys) return {keys, {}};
  const auto key = [&](std::size_t i) { return std::span(request.keys[i], request.key_bytes); };
  const std::lock_guard lock(mutex_);
  if (auto why = owners_.refuses(request.owner, keys - here)) {
    counts_.keys_refused += keys - here;
    for (std::size_t i = there; i < keys; ++i) memory_.of(key(i)).why = MissReason::thrash;
    return {here, std::move(*why)};
  }
  if (there == keys) return {keys, {}};
  if (options_.admit_after <= 1) return {keys, {}};
  std::size_t may = there;
  for (std::size_t i = there; i < keys; ++i) {
    KeyMemory::Fate& fate = memory_.of(key(i));
    count_up(fate.offered);
    if (fate.offered >= options_.admit_after) {
      if (may == i) ++may;
      continue;
    }
    fate.why = MissReason::not_admitted;
    ++counts_.keys_not_admitted;
  }
  if (may == keys) return {keys, {}};
  return {may, text("not admitted: key ", may, " was offered less than ", options_.admit_after,
                    " times")};
}

void Cache::expect_free(const Request& request, const Blocks& blocks,
                        const std::vector<KeyRange>& ranges) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::vector<BlockId> missing;
    for (std::size_t i = ranges[g].first; i < ranges[g].last; ++i) {
      if (index_->state(request.keys[i], request.key_bytes, static_cast<GroupIndex>(g)) ==
          EntryState::free)
        missing.push_back(blocks[g][i]);
    }
    if (!missing.empty())
      groups_[g].manager->expect_claimable(TransferKind::offload, missing, request.after);
  }
}

std::shared_ptr<CacheJob> Cache::new_job(CacheKind kind, const std::string& owner,
                                         const After& after, Priority priority) {
  auto job = std::make_shared<CacheJob>();
  job->cache = shared_from_this();
  job->kind = kind;
  job->owner = owner;
  job->after = after;
  job->priority = priority;
  job->claims.resize(groups_.size());
  return job;
}

void Cache::add_parts(CacheJob& job, GroupIndex group, const PlannedSlots& planned,
                      bool from_disk) {
  const std::size_t most = from_disk ? 1 : groups_[group].most_blocks_a_part;
  for (std::size_t first = 0; first < planned.slots.size(); first += most) {
    const std::size_t last = std::min(first + most, planned.slots.size());
    CachePart& part = job.parts.emplace_back();
    part.group = group;
    for (std::size_t i = first; i < last; ++i) {
      part.positions.push_back(planned.positions[i]);
      if (from_disk) continue;
      const std::lock_guard lock(mutex_);
      part.slots.push_back(groups_[group].places[planned.slots[i]]);
    }
    if (!from_disk) continue;
    part.state = CachePart::State::to_read;
    part.disk_slot = planned.slots[first];
  }
}

bool Cache::take_place() noexcept {
  if (++unfinished_ <= options_.max_transfers) return true;
  --unfinished_;
  return false;
}

PoolExhausted Cache::no_place() const {
  return {"the cache has max_transfers unfinished transfers",
          {"max_transfers", 1, 0, options_.max_transfers, unfinished_, 0}};
}

void Cache::start(const std::shared_ptr<CacheJob>& job, Place& place) {
  {
    const std::lock_guard lock(mutex_);
    // Again, under the lock: close() counts what is there behind it, so that nothing starts later.
    if (gate_.closed()) throw Closed("the cache is closed");
    owners_.open(job->owner);
    job->id = ++last_id_;
    jobs_.emplace(job->id, job);
    place.give_to_job();
  }
  move_on();
  runtime_->device().progress().bump();  // a reaper that sleeps soundly is to look again and again
}

std::shared_ptr<CacheTransfer> Cache::store_some(const Request& request, const Blocks& blocks,
                                                 std::optional<Admitted>& admitted, bool has_turn) {
  const auto pass = enter();
  std::vector<KeyRange> ranges = ranges_of(request.keys.size(), blocks);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto its =
        std::span(blocks[g]).subspan(ranges[g].first, ranges[g].last - ranges[g].first);
    groups_[g].manager->layout()->expect_blocks(its, true);
  }
  Index::expect_value(request.value);
  Place place(*this);
  if (!place.had()) return nullptr;
  if (!has_turn && store_turns_.waiting() > 0 &&
      index_->peek(request.keys, request.key_bytes) < request.keys.size())
    return nullptr;
  expect_free(request, blocks, ranges);
  if (!admitted) admitted = admit(request);
  for (KeyRange& range : ranges) {
    range.last = std::min(range.last, admitted->keys);
    range.first = std::min(range.first, range.last);
  }
  auto plan = index_->try_plan_store(request.keys.first(admitted->keys), request.key_bytes,
                                     request.owner, ranges, request.value);
  const std::size_t covered = plan ? plan->covered : 0;
  if (covered < admitted->keys) {
    const std::lock_guard lock(mutex_);
    for (const std::byte* const key : request.keys.first(admitted->keys).subspan(covered)) {
      KeyMemory::Fate& fate = memory_.of({key, request.key_bytes});
      if (fate.why != MissReason::none) fate.why = MissReason::no_room;
    }
  }
  if (!plan) return nullptr;
  PlanGuard guard(*index_, plan->id);
  auto job = new_job(CacheKind::store, request.owner, request.after, request.priority);
  job->plan = plan->id;
  job->value = request.value;
  job->covered = plan->covered;
  job->present = plan->present;
  job->attached = plan->attached;
  job->refused = admitted->refused;
  if (plan->id == 0) {
    job->ended = TransferState::done;
    return std::make_shared<CacheTransfer>(std::move(job));
  }
  job->key_bytes = request.key_bytes;
  for (const std::byte* const key : request.keys)
    job->keys.insert(job->keys.end(), key, key + request.key_bytes);
  job->blocks = blocks;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const PlannedSlots& planned = plan->groups[g];
    std::vector<BlockId> claimed;
    for (const std::uint32_t position : planned.positions) claimed.push_back(blocks[g][position]);
    if (claimed.empty()) continue;
    job->claims[g] = groups_[g].manager->claim(TransferKind::offload, claimed, request.after);
    add_parts(*job, static_cast<GroupIndex>(g), planned, false);
  }
  auto transfer = std::make_shared<CacheTransfer>(job);
  start(job, place);
  guard.keep();
  return transfer;
}

std::shared_ptr<CacheTransfer> Cache::try_store(const Request& request, const Blocks& blocks) {
  std::optional<Admitted> admitted;
  if (auto transfer = store_some(request, blocks, admitted, false)) return transfer;
  runtime_->advance();  // what is wanted may have come back and only not been seen yet
  return store_some(request, blocks, admitted, false);
}

std::shared_ptr<CacheTransfer> Cache::store(const Request& request, const Blocks& blocks,
                                            std::optional<double> timeout_seconds,
                                            const Runtime::Interrupt& interrupt) {
  PendingStore pending(shared_from_this(), request, blocks);
  const auto accepted = [&] { return pending.accepted(); };
  if (accepted() ||
      runtime_->wait_until(accepted, runtime_->deadline_after(timeout_seconds), interrupt))
    return pending.take();
  if (unfinished_ >= options_.max_transfers) throw no_place();
  throw index_->exhausted(request.keys.size());
}

void Cache::tell_stores() noexcept {
  if (store_turns_.waiting() == 0) return;
  store_turns_.tell();
  runtime_->device().progress().bump_for_waiters();
}

}  // namespace kvmem
