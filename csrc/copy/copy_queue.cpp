#include "copy/copy_queue.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/check.hpp"

namespace kvmem {

namespace {

// Reachable, so that nobody takes them for a leak of ours.
std::atomic<KeptBatch*> all_kept{nullptr};

void keep_for_ever(const std::shared_ptr<KeptBatch>& batch) noexcept {
  if (batch->kept) return;  // for another slice
  batch->kept = batch;
  batch->next_kept = all_kept.load();
  while (!all_kept.compare_exchange_weak(batch->next_kept, batch.get())) {
  }
}

std::exception_ptr lost_under_the_copy() noexcept {
  try {
    throw DeviceLost("the device was lost under the copy");
  } catch (...) {  // without memory for the message it is bad_alloc
    return std::current_exception();
  }
}

}  // namespace

CopyQueue::CopyQueue(std::shared_ptr<EventPool> events, const QueueWindow& window,
                     std::shared_ptr<StagingRing> ring, LaneOpened opened)
    : events_(std::move(events)),
      window_(window),
      ring_(std::move(ring)),
      opened_(std::move(opened)) {
  lanes_.reserve(most_lanes);
  for (std::size_t i = 0; i < lanes; ++i) open_lane();
  descriptor_bytes_ = std::max<std::size_t>(budget(*lanes_.back()).bytes / 2, 1);
  if (ring_) descriptor_bytes_ = std::min(descriptor_bytes_, ring_->piece_bytes());
}

void CopyQueue::open_lane() {
  auto lane = std::make_unique<Lane>(Stream(events_->device_ptr()));
  opened_(lane->stream);
  const std::lock_guard lock(mutex_);
  lanes_.push_back(std::move(lane));
}

void CopyQueue::hurry(CopyJob& job) {
  if (job.urgent_.load()) return;
  hurry_those_before(job);
  job.urgent_.store(true);
}

// Each is marked behind those before it: where memory runs out, a later call goes on from there.
void CopyQueue::hurry_those_before(const CopyJob& job) {
  for (CopyJob::Jobs unseen = job.behind(); !unseen.empty();) {
    const auto other = unseen.back();
    if (!other->urgent_.load()) {
      auto further = other->behind();
      std::erase_if(further, [](const auto& each) { return each->urgent_.load(); });
      if (!further.empty()) {
        unseen.insert(unseen.end(), further.begin(), further.end());
        continue;
      }
      other->urgent_.store(true);
    }
    unseen.pop_back();
  }
}

bool CopyQueue::accept(Entry entry) noexcept {
  const std::lock_guard lock(mutex_);
  incoming_.splice(incoming_.end(), entry);
  return waiting_count_.fetch_add(1) == 0;
}

// ---- who goes next ----

bool CopyQueue::next(Slice& slice) {
  collect_incoming();
  // A ready job of a higher class has no room: what comes free is its.
  bool higher_held_back = false;
  // Likewise in lane 0: who came first is not overtaken by a smaller one.
  bool shared_held_back = false;
  for (auto& jobs : jobs_) {
    bool held_back = false;
    for (auto job = jobs.begin(); job != jobs.end();) {
      if ((*job)->all_submitted()) {  // its last slice went, or it was dropped
        const auto done_with = job++;
        gone_.jobs.splice(gone_.jobs.end(), jobs, done_with);
        waiting_count_.fetch_sub(1);
        continue;
      }
      if ((*job)->unchecked_.load() && (*job)->batch_->direction() == Direction::to_device) {
        ++job;
        continue;
      }
      Lane* const lane = lane_for(**job);
      // Where the lane still waits, nothing moves: such a job takes no room from ready ones, and
      // holds none back.
      const bool ready = (*job)->after_.empty();
      const bool shared = lane == lanes_.front().get();
      const bool yields =
          ready && (higher_held_back || (shared && shared_held_back)) && !(*job)->urgent_.load();
      if (lane && !yields) {
        if (take(*job, *lane, slice)) return true;
        const bool has_no_room = ready && !(*job)->all_submitted();
        held_back |= has_no_room;
        shared_held_back |= has_no_room && shared;
      }
      ++job;
    }
    higher_held_back |= held_back;
  }
  return false;
}

void CopyQueue::collect_incoming() {
  const std::lock_guard lock(mutex_);
  while (!incoming_.empty()) {
    auto& jobs = jobs_[static_cast<std::size_t>(incoming_.front()->priority())];
    jobs.splice(jobs.end(), incoming_, incoming_.begin());
  }
}

Lane* CopyQueue::lane_for(CopyJob& job) {
  // So that nothing below throws.
  job.after_.reserve(job.after_.size() + job.unsubmitted_.size());
  gone_.before.reserve(gone_.before.size() + job.unsubmitted_.size());
  const auto passes = [&](const std::shared_ptr<CopyJob>& other) {
    if (!other->all_submitted()) return false;
    const std::lock_guard lock(other->mutex_);
    if (other->finished_) return true;
    // No event tells that the host has done with the slots: a staged offload is brought home behind
    // its last one, and a check reads them behind that, or before there is any.
    if (other->host_uses_slots()) return false;
    if (job.staged_) return false;  // it goes to no lane that waits, so it may as well see the end
    // Nothing on the device tells its end: it must be observed first.
    if (other->unguarded_) return false;
    if (other->last_event_) job.after_.push_back(other->last_event_);
    return true;
  };
  auto& before = job.unsubmitted_;
  const auto left = std::partition(before.begin(), before.end(), passes);
  std::move(before.begin(), left, std::back_inserter(gone_.before));
  before.erase(before.begin(), left);
  if (!job.unsubmitted_.empty()) return nullptr;
  bool unsure = false;  // lost, or not to be learnt: only waiting on the device is left
  std::erase_if(job.after_, [&](const std::shared_ptr<Event>& event) {
    const EventState state = event->query();
    unsure |= state == EventState::lost || state == EventState::failed;
    return state == EventState::done;
  });
  if (job.lane_) return job.lane_;
  if (job.after_.empty()) return job.lane_ = lanes_.front().get();
  // It would keep the staging ring from those that are ready. On a lost device it would wait for
  // ever.
  if (job.staged_ && !unsure) return nullptr;

  const auto claim_idle = [&]() -> Lane* {
    const std::lock_guard lock(mutex_);
    // Dropped meanwhile: who does that frees its lane, behind this or before.
    if (job.all_submitted()) return nullptr;
    for (std::size_t i = 1; i < lanes_.size(); ++i) {
      Lane& lane = *lanes_[i];
      if (lane.owner != nullptr || lane.descriptors > 0) continue;
      lane.owner = &job;
      return &lane;
    }
    return nullptr;
  };
  job.lane_ = claim_idle();
  if (!job.lane_ && job.urgent_.load() && lanes_.size() < most_lanes) {
    try {
      open_lane();
    } catch (...) {  // it waits for a lane like the others, and delays none of them
      return nullptr;
    }
    job.lane_ = claim_idle();
  }
  return job.lane_;
}

QueueWindow CopyQueue::budget(const Lane& lane) const noexcept {
  if (window_.eager) return {window_.bytes, window_.descriptors, true};
  const bool shared = &lane == lanes_.front().get();  // else what is there may wait long
  const std::size_t share = shared ? 2 : 2 * (lanes - 1);
  std::size_t descriptors = window_.descriptors / share;
  if (!shared) descriptors = std::min(descriptors, events_->device().info().most_waiting_copies);
  return {window_.bytes / share, std::max<std::size_t>(descriptors, 1)};
}

bool CopyQueue::take(const std::shared_ptr<CopyJob>& job, Lane& lane, Slice& slice) {
  // Half of the lane's budget at a time, so that one slice moves while the next is being submitted.
  const QueueWindow most = budget(lane);
  const std::size_t piece_bytes = job->staged_ ? ring_->piece_bytes() : most.bytes;
  const std::size_t device_most = events_->device().info().max_descriptors;
  const auto cut =
      job->batch_->cut(job->next_, most.eager ? piece_bytes : std::min(piece_bytes, most.bytes / 2),
                       most.eager ? device_most : std::min(device_most, most.descriptors / 2));
  const std::size_t count = cut.end - job->next_;
  {
    const std::lock_guard lock(mutex_);
    const bool room = lane.descriptors == 0 || (lane.bytes + cut.bytes <= most.bytes &&
                                                lane.descriptors + count <= most.descriptors);
    if (!room && !most.eager && !job->urgent_.load()) return false;
  }
  // A lost device keeps its pieces for ever; who waits for one is to fail.
  if (job->staged_ && !lost_.load()) {
    slice.home.reserve(count);
    auto piece = ring_->try_take();
    if (!piece) return false;
    slice.piece.emplace(std::move(*piece));
  }
  bool dropped = false;
  {
    const std::lock_guard lock(job->mutex_);
    dropped = job->dropped_;
    if (!dropped) {
      ++job->in_flight_;
      job->submitting_ = true;
    }
  }
  if (dropped) {
    slice.piece.reset();
    return false;
  }
  const std::lock_guard lock(mutex_);
  lane.bytes += cut.bytes;
  lane.descriptors += count;
  slice.job = job;
  slice.lane = &lane;
  slice.begin = job->next_;
  slice.end = job->next_ = cut.end;
  slice.bytes = cut.bytes;
  return true;
}

// ---- submission ----

void CopyQueue::submit(Slice& slice) noexcept {
  std::exception_ptr error;
  try {
    send(slice);
  } catch (...) {
    // Whatever the device says, the batch may be in flight: only an event recorded behind it can
    // end it. If that cannot be had now, whoever guards the slice goes on trying.
    error = std::current_exception();
    try {
      if (slice.event && !slice.event->recorded()) slice.event->record(slice.lane->stream.handle());
    } catch (...) {
    }
  }
  publish(slice, error);
}

void CopyQueue::send(Slice& slice) {
  if (lost_.load()) throw DeviceLost("the device was lost before the copy");
  CopyJob& job = *slice.job;
  Device& device = events_->device();
  const StreamHandle stream = slice.lane->stream.handle();
  slice.event = std::make_shared<Event>(events_->acquire());  // before anything is in flight
  if (slice.begin == 0) {
    job.submitted_at_.store(device.now());
    for (const auto& event : job.after_) device.wait(stream, event->handle());
    if (events_->timing()) note_start(job, stream);
  }
  if (slice.piece) through_staging(slice);
  // A restore's source has been observed complete by the host, so it may be read early; an
  // offload's has not.
  const bool offload = job.batch_->direction() == Direction::to_host;
  device.copy(job.batch_->descriptors(slice.begin, slice.end), job.batch_->direction(),
              offload ? SourceAccess::stream_order : SourceAccess::any, stream);
  slice.event->record(stream);
}

void CopyQueue::note_start(CopyJob& job, StreamHandle stream) noexcept {
  try {
    auto started = std::make_shared<Event>(events_->acquire());
    started->record(stream);
    const std::lock_guard lock(job.mutex_);
    job.started_event_ = std::move(started);
  } catch (...) {  // measuring never fails a transfer
  }
}

void CopyQueue::through_staging(Slice& slice) {
  CopyBatch& batch = *slice.job->batch_;
  std::byte* piece = slice.piece->data();
  for (std::size_t i = slice.begin; i < slice.end; ++i) {
    slice.home.push_back(batch.host_side(i));
    if (batch.direction() == Direction::to_device)
      std::memcpy(piece, batch.host_side(i), batch.size(i));
    batch.host_side(i) = piece;
    piece += batch.size(i);
  }
}

void CopyQueue::publish(const Slice& slice, const std::exception_ptr& error) noexcept {
  CopyJob& job = *slice.job;
  const std::lock_guard lock(job.mutex_);
  const auto stages = job.batch_->stage_ends();
  const auto stage = std::ranges::lower_bound(stages, slice.end);
  job.submitting_ = false;
  if (slice.event && slice.event->recorded()) {
    job.last_event_ = slice.event;
    if (!error && *stage == slice.end)
      job.stage_events_[static_cast<std::size_t>(stage - stages.begin())] = slice.event;
  } else {
    job.unguarded_ = true;
  }
  if (error) {
    job.error_ = error;
    job.dropped_ = true;
  }
  if (job.dropped_ || slice.end == job.batch_->count()) job.all_submitted_.store(true);
}

// ---- the end ----

bool CopyQueue::ended(Slice& slice, bool lost) noexcept {
  CopyJob& job = *slice.job;
  // A copy that failed may have left the piece as another transfer did: nobody is to see that.
  const bool arrived = !lost && !error(job);
  if (slice.piece && arrived && job.batch_->direction() == Direction::to_host) {
    const std::byte* piece = slice.piece->data();
    for (std::size_t i = 0; i < slice.home.size(); ++i) {
      const std::size_t bytes = job.batch_->size(slice.begin + i);
      std::memcpy(slice.home[i], piece, bytes);
      piece += bytes;
    }
  }
  if (lost) {
    // A lost device may still touch what it was given: it is never used again.
    lost_.store(true);
    if (slice.piece) slice.piece->abandon();
    keep_for_ever(job.batch_);
  }
  slice.piece.reset();
  {
    const std::lock_guard lock(mutex_);
    slice.lane->bytes -= slice.bytes;
    slice.lane->descriptors -= slice.end - slice.begin;
  }
  bool last = false, idle = false;
  {
    const std::lock_guard lock(job.mutex_);
    --job.in_flight_;
    if (lost) {
      if (!job.error_) job.error_ = lost_under_the_copy();
      job.dropped_ = true;
      job.all_submitted_.store(true);
    }
    last = finish_if_last(job);
    idle = job.in_flight_ == 0 && job.all_submitted_.load();
  }
  if (idle) free_lane_of(job);
  return last;
}

CopyQueue::Dropped CopyQueue::drop(CopyJob& job) noexcept {
  bool last = false;
  {
    const std::lock_guard lock(job.mutex_);
    if (job.finished_) return Dropped::too_late;
    job.cancelled_ = job.dropped_ = true;
    // Else publish() does, with the slice's event in place.
    if (!job.submitting_) job.all_submitted_.store(true);
    last = finish_if_last(job);
  }
  if (last) free_lane_of(job);
  return last ? Dropped::finished : Dropped::draining;
}

bool CopyQueue::finish_if_last(CopyJob& job) noexcept {
  if (job.finished_ || job.in_flight_ > 0 || !job.all_submitted_.load()) return false;
  if (job.unchecked_.load() && !job.dropped_) return false;
  return job.finished_ = true;
}

void CopyQueue::free_lane_of(const CopyJob& job) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& lane : lanes_) {
    if (lane->owner == &job) lane->owner = nullptr;
  }
}

}  // namespace kvmem
