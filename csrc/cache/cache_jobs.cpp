// How unfinished stores and loads move on. One thread at a time does it for all of them.
#include <algorithm>

#include "base/check.hpp"
#include "cache/cache.hpp"

namespace kvmem {

namespace {

constexpr std::size_t most_trimmed = 64;  // in one turn

}  // namespace

void Cache::submit_ready() noexcept {
  if (mark_.must_leak()) return;
  if (unfinished_ > 0 || feed_ || store_turns_.waiting() > 0) move_on();
}

bool Cache::has_waiting() const noexcept {
  return unfinished_ > 0 || store_turns_.waiting() > 0 || (feed_ && feed_->has_work(flushing_ > 0));
}

// Who finds another thread at it leaves a note, and that thread looks again.
void Cache::move_on() noexcept {
  again_ = true;
  while (again_ && moving_.try_lock()) {
    again_ = false;
    take_turn();
    moving_.unlock();
  }
}

// With moving_ held.
void Cache::take_turn() noexcept {
  try {
    if (feed_) end_reads();
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [id, job] : jobs_) turn_.push_back(job);
    }
    for (const auto& job : turn_) {
      if (move_job(*job)) end_job(job);
    }
    if (feed_) {
      const auto where = [&](GroupIndex group, SlotIndex slot) { return place(group, slot); };
      const auto corrupt = [&](GroupIndex group, std::span<const std::byte> key) {
        forget_corrupt(group, key);
      };
      if (feed_->feed(*index_, where, corrupt, flushing_ > 0) || feed_->has_notes()) again_ = true;
    }
    if (index_->wants_trim()) static_cast<void>(index_->trim(most_trimmed));
  } catch (...) {  // no memory: a later turn tries again
  }
  turn_.clear();
  store_turns_.tell();
}

std::pair<const std::byte*, HostBlocks> Cache::place(GroupIndex group, SlotIndex slot) {
  BlockPool& pool = *groups_[group].manager->pool();
  SlotIndex its = 0;
  {
    const std::lock_guard lock(mutex_);
    its = groups_[group].places[slot];
  }
  return {pool.data() + its * pool.slot_bytes(), pool.share_indices({&its, 1})};
}

// ---- a job ----

bool Cache::move_job(CacheJob& job) {
  if (job.cancelled && !job.told_cancelled) drop_parts(job);
  if (job.waits_for_keys && !job.cancelled) {
    try {
      if (!begin_load(job)) return false;
    } catch (const std::bad_alloc&) {  // a later turn tries again
      return false;
    } catch (...) {  // it expired meanwhile
      const std::lock_guard lock(job.mutex);
      job.waits_for_keys = false;
      job.error = std::current_exception();
      job.plan = 0;
    }
  }
  while (job.first_open < job.parts.size() &&
         job.parts[job.first_open].state == CachePart::State::ended)
    ++job.first_open;
  std::array<bool, most_groups> full{};  // a group whose landing blocks are all in use
  for (std::size_t i = job.first_open; i < job.parts.size(); ++i) {
    const GroupIndex group = job.parts[i].group;
    const auto is_to_read = [&] { return job.parts[i].state == CachePart::State::to_read; };
    if (is_to_read() && full[group]) continue;
    move_part(job, i);
    full[group] = full[group] || is_to_read();
  }
  return std::all_of(job.parts.begin() + static_cast<std::ptrdiff_t>(job.first_open),
                     job.parts.end(),
                     [](const CachePart& part) { return part.state == CachePart::State::ended; });
}

// False while a key that it attached to is in flight. Throws when the reservation has expired.
bool Cache::begin_load(CacheJob& job) {
  const std::optional<LoadPlan> plan = index_->begin(job.plan, true);
  if (!plan) return false;
  std::exception_ptr error;
  try {
    if (plan->length < job.length) claim_targets(job, plan->length);
    for (std::size_t g = 0; g < plan->groups.size(); ++g) {
      const bool from_disk = is_disk(g);
      add_parts(job, static_cast<GroupIndex>(from_disk ? g - groups_.size() : g), plan->groups[g],
                from_disk);
    }
  } catch (...) {  // no memory, or what it needs by now is in use: the load was begun, and fails
    error = std::current_exception();
    job.parts.clear();
  }
  const std::lock_guard lock(job.mutex);
  job.waits_for_keys = false;
  job.error = error;
  if (plan->length < job.length) {  // whatever else that led to
    job.error = std::make_exception_ptr(CopyFailed(
        text("the store of key ", plan->length, ", which this load attached to, has failed")));
  }
  if (plan->length == 0) job.plan = 0;  // it has ended
  job.length = plan->length;
  return true;
}

// What was not begun ends now; what was is told.
void Cache::drop_parts(CacheJob& job) {
  job.told_cancelled = true;
  for (CachePart& part : job.parts) {
    if (part.state == CachePart::State::submitted) static_cast<void>(part.transfer->cancel());
    // A read keeps its landing block until it ends; nobody waits for it any more.
    if (part.state < CachePart::State::submitted) end_part(job, part, false, nullptr);
  }
}

void Cache::move_part(CacheJob& job, std::size_t number) {
  CachePart& part = job.parts[number];
  if (part.state == CachePart::State::to_read || part.state == CachePart::State::reading)
    move_read(job, number);
  if (part.state == CachePart::State::to_submit) submit_part(job, part);
  if (part.state != CachePart::State::submitted || !part.transfer->done()) return;
  std::exception_ptr error;
  try {
    part.transfer->expect_done();
  } catch (const Cancelled&) {
    end_part(job, part, false, nullptr);
    return;
  } catch (const Corrupt& corrupt) {
    const std::uint32_t position = part.positions[corrupt.block];  // in the load
    forget_corrupt(part.group, job.key_span(position));
    error =
        std::make_exception_ptr(Corrupt(position, corrupt.slot, corrupt.expected, corrupt.found));
    if (corrupt.block > 0 && !job.cancelled) {
      cut_part(job, number, corrupt.block, error);
      submit_part(job, job.parts[number]);
      return;
    }
  } catch (...) {
    error = std::current_exception();
  }
  end_part(job, part, error == nullptr, error);
}

// Nothing of a restore with a corrupt block was copied. What lies before that block goes again.
void Cache::cut_part(CacheJob& job, std::size_t number, std::size_t length,
                     std::exception_ptr error) {
  CachePart rest = job.parts[number];
  const auto first = static_cast<std::ptrdiff_t>(length);
  rest.positions.erase(rest.positions.begin(), rest.positions.begin() + first);
  rest.slots.erase(rest.slots.begin(), rest.slots.begin() + first);
  rest.state = CachePart::State::ended;
  const std::lock_guard lock(job.mutex);
  job.parts.push_back(std::move(rest));
  CachePart& part = job.parts[number];
  part.positions.resize(length);
  part.slots.resize(length);
  part.transfer = nullptr;
  part.state = CachePart::State::to_submit;
  if (!job.error) job.error = std::move(error);
}

// Not to be found again in host memory; the disk may have it still.
void Cache::forget_corrupt(GroupIndex group, std::span<const std::byte> key) {
  const std::byte* const its = key.data();
  static_cast<void>(index_->remove({&its, 1}, key.size(), group));
  const std::lock_guard lock(mutex_);
  memory_.of(key).why = MissReason::corrupt;
}

void Cache::submit_part(CacheJob& job, CachePart& part) {
  Manager& manager = *groups_[part.group].manager;
  const bool offloads = job.kind == CacheKind::store;
  const TransferKind kind = offloads ? TransferKind::offload : TransferKind::restore;
  try {
    TransferRequest request;
    request.after = job.after;
    request.priority = job.priority;
    request.claim = job.claims[part.group];
    for (const std::uint32_t position : part.positions)
      request.blocks.push_back(job.blocks[part.group][position]);
    Admission admission = manager.admit(kind, request, false);
    if (!admission.try_take()) return;  // whatever ends makes room, and brings us here again
    HostBlocks slots = manager.pool()->share_indices(part.slots);
    auto transfer =
        offloads ? manager.offload_into(std::move(request), std::move(slots), std::move(admission))
                 : manager.restore(std::move(request), HostCopy(manager.layout(), std::move(slots)),
                                   std::move(admission));
    const std::lock_guard lock(job.mutex);
    part.transfer = std::move(transfer);
    part.state = CachePart::State::submitted;
    part.since = runtime_->device().now();
    job.begun = true;
  } catch (const std::bad_alloc&) {  // a later turn tries again
  } catch (...) {
    end_part(job, part, false, std::current_exception());
  }
}

void Cache::end_part(CacheJob& job, CachePart& part, bool ok, std::exception_ptr error) {
  if (ok) {
    const auto took = runtime_->device().now() - part.since;
    const std::size_t bytes =
        part.slots.size() * groups_[part.group].manager->pool()->block_bytes();
    const std::lock_guard lock(mutex_);
    host_rate_.note(bytes, took);
  }
  if (part.landing) {
    if (ok)
      promote(job, part);
    else
      give_landing(part.group, part.slots.front());
  }
  const std::lock_guard lock(job.mutex);
  part.state = CachePart::State::ended;
  part.ok = ok;
  if (error && !job.error) job.error = std::move(error);
}

}  // namespace kvmem
