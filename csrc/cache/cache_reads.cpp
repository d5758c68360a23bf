// What of a load comes from disk: through landing blocks, and where there is room to stay.
#include <cerrno>
#include <chrono>
#include <vector>

#include "cache/cache.hpp"

namespace kvmem {

namespace {

// Whether another attempt might read it: the disk as a whole is at fault rather than the slot.
bool passes(const DiskResult& result) {
  return result.outcome == DiskOutcome::shortage || result.outcome == DiskOutcome::timed_out ||
         result.outcome == DiskOutcome::closed ||
         (result.outcome == DiskOutcome::io_error && result.error != EIO);
}

std::exception_ptr disk_error(const char* what) {
  return std::make_exception_ptr(CopyFailed(text("a block could not be read from disk: ", what)));
}

Nanoseconds real_time() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace

std::optional<SlotIndex> Cache::take_landing(GroupIndex group) {
  const std::lock_guard lock(mutex_);
  std::vector<SlotIndex>& free = groups_[group].landing_free;
  if (free.empty()) return std::nullopt;
  const SlotIndex slot = free.back();
  free.pop_back();
  return slot;
}

void Cache::give_landing(GroupIndex group, SlotIndex slot) noexcept {
  const std::lock_guard lock(mutex_);
  groups_[group].landing_free.push_back(slot);  // has room for all of them
}

void Cache::move_read(CacheJob& job, std::size_t number) {
  CachePart& part = job.parts[number];
  if (part.state == CachePart::State::to_read) start_read(job, number);
  const bool starves = part.state == CachePart::State::to_read && job.starves_since != 0;
  if (!starves && part.state != CachePart::State::reading) return;
  const Nanoseconds since = starves ? job.starves_since : part.since;
  if (real_time() - since <= 2 * feed_->options().stall_after.count()) return;
  // What is read into is in use until that ends, so none comes back from a disk that does not. One
  // that a load behind a stream has comes some time.
  if (!starves || feed_->disk().stats().degraded)
    end_part(job, part, false, disk_error("timed out"));
}

void Cache::start_read(CacheJob& job, std::size_t number) {
  CachePart& part = job.parts[number];
  const std::optional<SlotIndex> landing = take_landing(part.group);
  if (!landing) {
    if (job.starves_since == 0) job.starves_since = real_time();
    return;
  }
  job.starves_since = 0;
  BlockPool& pool = *groups_[part.group].manager->pool();
  DiskSubmit answer = DiskSubmit::full;
  try {
    part.slots.reserve(1);  // for the landing block
    pool.forget_sums({&*landing, 1});
    answer = feed_->try_read({job.id, number, part.group, part.disk_slot, *landing, {}},
                             job.key_span(part.positions.front()), pool.block_bytes(),
                             pool.data() + *landing * pool.slot_bytes(),
                             pool.share_indices({&*landing, 1}));
  } catch (const std::bad_alloc&) {  // a later turn tries again
  }
  if (answer == DiskSubmit::accepted) {
    const std::lock_guard lock(job.mutex);
    part.state = CachePart::State::reading;
    part.since = real_time();
    job.begun = true;
    return;
  }
  give_landing(part.group, *landing);
  if (answer == DiskSubmit::full || answer == DiskSubmit::busy) return;
  const bool retired = answer == DiskSubmit::retired;
  end_part(job, part, false,
           disk_error(retired                        ? "its slot has gone bad"
                      : answer == DiskSubmit::closed ? "the disk is closed"
                                                     : "the disk is degraded"));
  if (retired) index_->retire(disk_group(part.group), part.disk_slot);
}

void Cache::end_reads() {
  std::list<DiskFeed::Read> ended = feed_->take_read();
  try {
    for (; !ended.empty(); ended.pop_front()) {
      std::shared_ptr<CacheJob> job;
      {
        const std::lock_guard lock(mutex_);
        const auto found = jobs_.find(ended.front().job);
        if (found != jobs_.end()) job = found->second;
      }
      end_read(job.get(), ended.front());
    }
  } catch (...) {  // no memory: this one and those behind it in a later turn
    feed_->put_back(ended);
    throw;
  }
}

// The job is gone, or no longer waits for it, where it was cancelled meanwhile.
void Cache::end_read(CacheJob* job, const DiskFeed::Read& read) {
  CachePart* const part = job == nullptr ? nullptr : &job->parts[read.part];
  const bool waited_for = part != nullptr && part->state == CachePart::State::reading;
  const bool ok = read.result.outcome == DiskOutcome::ok;
  const std::exception_ptr error = ok ? nullptr : disk_error(name(read.result.outcome));
  feed_->settle(*index_, read);  // nothing needs memory behind this
  if (!waited_for || !ok) give_landing(read.group, read.landing);
  if (!waited_for) return;
  if (ok) {
    const auto took = real_time() - part->since;
    {
      const std::lock_guard lock(mutex_);
      disk_rate_.note(groups_[read.group].manager->pool()->block_bytes(), took);
    }
    const std::lock_guard lock(job->mutex);
    part->slots.assign(1, read.landing);  // has the room
    part->disk_sum = read.result.payload_sum;
    part->landing = true;
    part->state = CachePart::State::to_submit;
    return;
  }
  const std::size_t position = part->positions.front();
  if (!passes(read.result)) forget_on_disk(job->key_span(position), read);
  {
    const std::lock_guard lock(mutex_);
    ++counts_.disk_reads_failed;
    KeyMemory::Fate& fate = memory_.of(job->key_span(position));
    fate.why = MissReason::disk_failed;
    fate.detail = static_cast<std::uint8_t>(read.result.outcome);
  }
  end_part(*job, *part, false, error);
}

// The load holds the slot: another one that has the key by now is not at fault. What is not found
// any more is not to be found at the next start either.
void Cache::forget_on_disk(std::span<const std::byte> key, const DiskFeed::Read& read) noexcept {
  const GroupIndex group = disk_group(read.group);
  const std::byte* const its = key.data();
  try {
    if (index_->state({group, read.slot}) != EntryState::ready) return;
    std::vector<Index::Place> were;
    static_cast<void>(index_->remove({&its, 1}, key.size(), group, &were));
    feed_->enqueue_erasures(were);
  } catch (...) {  // no memory: it is found once more, here or at the next start
  }
}

// What came from disk stays in host memory where there is room: its landing block changes places
// with a free slot, so that nothing is copied. Unless it was removed meanwhile: what is on disk by
// now is then in another slot, for the load holds this one.
void Cache::promote(CacheJob& job, const CachePart& part) {
  SlotIndex landing = part.slots.front();
  const std::byte* const key = job.key(part.positions.front());
  CopyPlan plan;
  try {
    plan = index_->plan_copy({&key, 1}, job.key_bytes, disk_group(part.group), part.group,
                             job.owner, job.value);
  } catch (...) {  // no memory: it goes back
  }
  if (plan.id != 0) {
    const bool same = plan.source.front() == part.disk_slot;
    if (same) {
      const Manager& manager = *groups_[part.group].manager;
      if (manager.config().checksum == Checksum::always)
        manager.pool()->set_sum(landing, part.disk_sum);
      const std::lock_guard lock(mutex_);
      std::swap(groups_[part.group].places[plan.target.front()], landing);
      ++counts_.disk_promoted;
    }
    static_cast<void>(index_->finish(plan.id, 0, same));
  }
  give_landing(part.group, landing);
}

}  // namespace kvmem
