// How stores and loads end, and what is kept of that.
#include <algorithm>
#include <array>

#include "base/check.hpp"
#include "cache/cache.hpp"

namespace kvmem {

void Cache::Rate::note(std::size_t bytes, Nanoseconds took) noexcept {
  if (took <= 0) return;
  constexpr double weight = 0.125;  // of the newest
  const double now = static_cast<double>(bytes) * 1e9 / static_cast<double>(took);
  bytes_per_second = measured ? bytes_per_second + weight * (now - bytes_per_second) : now;
  measured = true;
}

void Cache::end_job(const std::shared_ptr<CacheJob>& job) noexcept {
  const bool whole = std::ranges::all_of(job->parts, &CachePart::ok) && !job->waits_for_keys;
  const TransferState state = job->error ? TransferState::failed
                              : whole    ? TransferState::done
                                         : TransferState::cancelled;
  try {
    if (job->kind == CacheKind::store)
      settle_store(*job, state == TransferState::done);
    else
      settle_load(*job, state == TransferState::cancelled);
  } catch (...) {  // no memory for a book or an order: the blocks are right all the same
  }
  {
    const std::lock_guard lock(mutex_);
    const bool store = job->kind == CacheKind::store;
    ++(state == TransferState::cancelled ? counts_.cancelled
       : state == TransferState::done    ? (store ? counts_.stores : counts_.loads)
                                         : (store ? counts_.stores_failed : counts_.loads_failed));
    jobs_.erase(job->id);
  }
  std::vector<Waker> wakers;
  {
    const std::lock_guard lock(job->mutex);
    for (auto& claim : job->claims) claim.reset();
    if (job->kind == CacheKind::store) {  // they hold the slots for whoever keeps the transfer
      for (CachePart& part : job->parts) part.transfer.reset();
    }
    wakers.swap(job->wakers);
    job->ended = state;
  }
  --unfinished_;
  for (Waker& waker : wakers) waker.fire();
  again_ = true;  // others may have waited for its keys, its slots or its landing blocks
  runtime_->device().progress().bump_for_waiters();
}

void Cache::settle_store(CacheJob& job, bool ok) {
  static_cast<void>(index_->finish(job.plan, 0, ok));
  std::uint64_t blocks = 0, bytes = 0, again = 0;
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint32_t> positions;
    for (const CachePart& part : job.parts) {
      const std::size_t each = groups_[part.group].manager->pool()->block_bytes();
      blocks += part.positions.size();
      bytes += part.positions.size() * each;
      for (const std::uint32_t position : part.positions) {
        again += memory_.of(job.key_span(position)).stored > 0 ? 1U : 0U;
        positions.push_back(position);
      }
    }
    std::ranges::sort(positions);
    const auto rest = std::ranges::unique(positions);
    positions.erase(rest.begin(), rest.end());
    for (const std::uint32_t position : positions) {
      KeyMemory::Fate& fate = memory_.of(job.key_span(position));
      fate.why = ok ? MissReason::none : MissReason::store_failed;
      if (ok) count_up(fate.stored);
    }
    if (ok) {
      counts_.blocks_stored += blocks;
      owners_.note_offload(job.owner, blocks, bytes, again);
    }
  }
  if (!ok || !feed_) return;
  // Tail first: it is the first to be evicted, from host memory and then from disk.
  for (auto part = job.parts.rbegin(); part != job.parts.rend(); ++part) {
    for (auto position = part->positions.rbegin(); position != part->positions.rend(); ++position)
      feed_->enqueue(*index_, part->group, job.key_span(*position), job.value);
  }
}

void Cache::settle_load(CacheJob& job, bool cancelled) {
  if (job.waits_for_keys) {  // cancelled before it began
    index_->release(job.plan);
    return;
  }
  static_cast<void>(index_->finish(job.plan, 0, !cancelled && !job.error));
  if (cancelled) return;
  job.loaded = job.error ? delivered(job) : job.length.load();
  const std::lock_guard lock(mutex_);
  counts_.keys_loaded += job.loaded;
  std::uint64_t blocks = 0, bytes = 0;
  for (const CachePart& part : job.parts) {
    if (!part.ok) continue;
    (part.landing ? counts_.blocks_from_disk : counts_.blocks_from_host) += part.positions.size();
    blocks += part.positions.size();
    bytes += part.positions.size() * groups_[part.group].manager->pool()->block_bytes();
  }
  owners_.note_restore(job.owner, blocks, bytes);
}

// The prefix whose every block was delivered.
std::size_t Cache::delivered(const CacheJob& job) const {
  std::vector<std::vector<bool>> there(groups_.size(), std::vector<bool>(job.length));
  for (const CachePart& part : job.parts) {
    if (!part.ok) continue;
    for (const std::uint32_t position : part.positions) there[part.group][position] = true;
  }
  return longest_usable(needs_, job.length, [&](GroupIndex group, std::size_t position) {
    return there[group][position];
  });
}

// ---- advice and books ----

Advice Cache::advise(KeyPointers keys, std::size_t key_bytes, double prefill_tokens_per_second,
                     double block_tokens) const {
  KVMEM_EXPECTS(prefill_tokens_per_second > 0, "prefill_tokens_per_s is ",
                prefill_tokens_per_second, ", which must be positive");
  KVMEM_EXPECTS(block_tokens > 0, "block_tokens is ", block_tokens, ", which must be positive");
  mark_.expect_same_process("the cache");
  Advice advice;
  advice.restorable = index_->peek(keys, key_bytes);
  advice.pending = index_->peek(keys, key_bytes, Pending::attach) - advice.restorable;
  double from_host = 0, from_disk = 0, queued = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto bytes = static_cast<double>(groups_[g].manager->pool()->block_bytes());
    const KeyRange range = needed(needs_[g].need, advice.restorable);
    for (std::size_t i = range.first; i < range.last; ++i) {
      const bool in_host =
          index_->state(keys[i], key_bytes, static_cast<GroupIndex>(g)) == EntryState::ready;
      (in_host ? from_host : from_disk) += bytes;
    }
    const ManagerStats stats = groups_[g].manager->stats();
    for (const DirectionStats& direction : stats.directions)
      queued += static_cast<double>(direction.queued_bytes);
  }
  const double block_seconds = block_tokens / prefill_tokens_per_second;
  const std::lock_guard lock(mutex_);
  // A block from disk passes both ways, one behind the other but for the first.
  const double path =
      from_host / host_rate_.bytes_per_second +
      from_disk / std::min(host_rate_.bytes_per_second, disk_rate_.bytes_per_second);
  const double delay = queued / host_rate_.bytes_per_second;
  const auto recomputed = [&](std::size_t restored) {
    return static_cast<double>(keys.size() - restored) * block_seconds;
  };
  advice.recompute_seconds = recomputed(0);
  advice.restore_seconds =
      (advice.restorable > 0 ? delay + path : 0) + recomputed(advice.restorable);
  double more = 0;
  for (const Group& group : groups_)
    more += static_cast<double>(advice.pending * group.manager->pool()->block_bytes());
  // Twice: they are on their way to the host, and then back.
  advice.wait_seconds = delay + path + 2 * more / host_rate_.bytes_per_second +
                        recomputed(advice.restorable + advice.pending);
  if (advice.restorable > 0 && advice.restore_seconds <= advice.recompute_seconds)
    advice.kind = AdviceKind::restore;
  const double best = std::min(advice.restore_seconds, advice.recompute_seconds);
  if (advice.pending > 0 && advice.wait_seconds < best) advice.kind = AdviceKind::wait;
  return advice;
}

void Cache::note_tokens(const std::string& owner, std::uint64_t count) {
  mark_.expect_same_process("the cache");
  const std::lock_guard lock(mutex_);
  owners_.note_tokens(owner, count);
}

std::size_t Cache::drop_owner(const std::string& owner) {
  const std::size_t ended = index_->drop_owner(owner);
  tell_stores();
  const std::lock_guard lock(mutex_);
  owners_.drop(owner);
  return ended;
}

std::optional<OwnerCounts> Cache::owner(const std::string& owner) const {
  mark_.expect_same_process("the cache");
  const std::lock_guard lock(mutex_);
  return owners_.of(owner);
}

std::size_t Cache::evict(KeyPointers keys, std::size_t key_bytes) {
  const auto pass = enter();
  std::vector<const std::byte*> there;  // the others have reasons of their own to be missed
  for (const std::byte* const key : keys) {
    for (std::size_t g = 0; g < index_->options().groups.size(); ++g) {
      if (index_->state(key, key_bytes, static_cast<GroupIndex>(g)) == EntryState::free) continue;
      there.push_back(key);
      break;
    }
  }
  const std::size_t removed = remove([&](std::vector<Index::Place>* were) {
    return index_->remove(keys, key_bytes, std::nullopt, were);
  });
  const std::lock_guard lock(mutex_);
  for (const std::byte* const key : there) memory_.of({key, key_bytes}).why = MissReason::removed;
  return removed;
}

std::size_t Cache::clear() {
  const auto pass = enter();
  return remove([&](std::vector<Index::Place>* were) { return index_->clear(were); });
}

// And no later start finds it on disk. Whoever moves the cache on might give a slot that was let go
// of here to another key before it is said to be erased.
std::size_t Cache::remove(const std::function<std::size_t(std::vector<Index::Place>*)>& from) {
  std::size_t removed = 0;
  if (feed_) {
    const std::lock_guard lock(moving_);
    std::vector<Index::Place> were;
    removed = from(&were);
    feed_->enqueue_erasures(were);
  } else {
    removed = from(nullptr);
  }
  tell_stores();
  move_on();
  // What is held is erased later: a reaper that sleeps soundly is to look again and again.
  if (feed_) runtime_->device().progress().bump();
  return removed;
}

Miss Cache::why_miss(const std::byte* key, std::size_t key_bytes) const {
  mark_.expect_same_process("the cache");
  Miss miss{.why = MissReason::none, .disk = std::nullopt, .manifest = std::nullopt};
  bool writing = false, anywhere = false, needed_by_all = false;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto host = static_cast<GroupIndex>(g);
    const EntryState here = index_->state(key, key_bytes, host);
    const bool there =
        here == EntryState::ready ||
        (feed_ && index_->state(key, key_bytes, disk_group(host)) == EntryState::ready);
    writing = writing || here == EntryState::writing;
    anywhere = anywhere || there;
    // A group that does not need every block may rightly lack this one.
    if (needs_[g].need.kind != NeedKind::all) continue;
    needed_by_all = true;
    if (!there) miss.why = MissReason::evicted;
  }
  if (!needed_by_all && !anywhere) miss.why = MissReason::evicted;
  if (miss.why == MissReason::none) return miss;
  if (writing) return {.why = MissReason::in_flight, .disk = {}, .manifest = {}};
  const std::lock_guard lock(mutex_);
  const KeyMemory::Fate* const fate = memory_.find({key, key_bytes});
  if (fate == nullptr) return {.why = MissReason::never_stored, .disk = {}, .manifest = {}};
  if (fate->why != MissReason::none) miss.why = fate->why;  // else it was there, and went
  if (fate->why == MissReason::disk_failed) miss.disk = static_cast<DiskOutcome>(fate->detail);
  if (fate->why == MissReason::other_manifest) miss.manifest = feed_->foreign(fate->detail);
  return miss;
}

// ---- the end of it all ----

std::size_t Cache::poll() {
  mark_.expect_same_process("the cache");
  runtime_->advance();
  return unfinished_;
}

bool Cache::flush(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt) {
  mark_.expect_same_process("the cache");
  if (!feed_) return true;
  ++flushing_;
  feed_->expect_better();
  const auto settled = [&] { return feed_->idle() || feed_->stuck(); };
  const auto end = [&] { --flushing_; };
  try {
    static_cast<void>(
        runtime_->wait_until(settled, runtime_->deadline_after(timeout_seconds), interrupt));
  } catch (...) {
    end();
    throw;
  }
  end();
  return feed_->idle();
}

CacheCloseReport Cache::close(std::optional<double> timeout_seconds,
                              const Runtime::Interrupt& interrupt) {
  mark_.expect_same_process("the cache");
  gate_.close();
  store_turns_.close();
  CacheCloseReport report;
  const auto deadline = runtime_->deadline_after(timeout_seconds);
  const auto quiet = [&] { return gate_.empty() && unfinished_ == 0; };  // in this order
  report.quiet = runtime_->wait_until(quiet, deadline, interrupt);
  if (!report.quiet) {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, job] : jobs_) {
      job->cancelled = true;
      ++report.cancelled;
    }
  }
  {  // whoever moves the cache on just now may have passed what was cancelled
    const std::lock_guard lock(moving_);
    take_turn();
  }
  move_on();
  if (feed_) close_disk(report, deadline, interrupt);
  report.in_flight = unfinished_;
  if (report.in_flight > 0 || (report.disk && report.disk->running > 0)) return report;
  const std::lock_guard lock(mutex_);
  for (Group& group : groups_) group.slots.release();  // nobody is told a place in them any more
  return report;
}

void Cache::close_disk(CacheCloseReport& report, std::optional<Nanoseconds> deadline,
                       const Runtime::Interrupt& interrupt) {
  const auto left = [&] { return std::max<Nanoseconds>(*deadline - runtime_->device().now(), 0); };
  static_cast<void>(
      flush(deadline ? std::optional(static_cast<double>(left()) / 1e9) : std::nullopt, interrupt));
  report.disk = feed_->disk().close(deadline ? std::chrono::nanoseconds(left())
                                             : feed_->options().close_within);
  {  // what the disk has just ended: a write that failed is in the queue again
    const std::lock_guard lock(moving_);
    take_turn();
    report.unwritten = feed_->close_queue();
  }
  move_on();  // for whoever came meanwhile
}

CacheStats Cache::stats() const {
  mark_.expect_same_process("the cache");
  CacheStats stats;
  {
    const std::lock_guard lock(mutex_);
    stats = counts_;
    stats.owners = owners_.total();
    stats.host_bytes_per_second = host_rate_.bytes_per_second;
    stats.disk_bytes_per_second = disk_rate_.bytes_per_second;
    for (const Group& group : groups_) stats.landing_free += group.landing_free.size();
  }
  stats.transfers = unfinished_;
  stats.waiters = store_turns_.waiting();
  stats.index = index_->stats();
  if (feed_) {
    stats.feed = feed_->stats();
    stats.disk = feed_->disk().stats();
  }
  return stats;
}

void Cache::check() const { index_->check(); }

}  // namespace kvmem
