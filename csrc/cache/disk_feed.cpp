#include "cache/disk_feed.hpp"

#include <algorithm>
#include <numeric>

#include "base/check.hpp"

namespace kvmem {

namespace {

constexpr const char* owner_of_writes = "disk writes";

std::span<const std::byte> bytes_of(const DiskKey& key) {
  return std::span(key.bytes).first(key.size);
}

DiskOptions completed(DiskOptions options, const std::vector<CacheGroup>& groups,
                      std::size_t key_bytes, const Device& device) {
  if (device.info().virtual_time) options.workers = 0;  // no thread of ours in virtual time
  KVMEM_EXPECTS(key_bytes > 0, "key_bytes must be given where there is a disk");
  std::size_t largest = 0;
  for (const CacheGroup& group : groups)
    largest = std::max(largest, group.manager->pool()->block_bytes());
  if (options.block_bytes == 0) options.block_bytes = largest;
  KVMEM_EXPECTS(options.block_bytes >= largest, "the disk's block_bytes is ", options.block_bytes,
                ", and a group has blocks of ", largest);
  options.key_bytes = key_bytes;
  return options;
}

// Of all slots, in proportion to those in host memory; at least one each.
std::vector<SlotIndex> shares(SlotIndex slots, const std::vector<CacheGroup>& groups) {
  if (slots < groups.size())
    throw CapacityError("the disk has less than a slot a group",
                        {"disk slots", groups.size(), slots, slots, 0, 0});
  std::uint64_t all = 0, before = 0;
  for (const CacheGroup& group : groups) all += group.slots;
  std::vector<SlotIndex> counts;
  const std::uint64_t to_share = slots - groups.size();
  for (const CacheGroup& group : groups) {
    const std::uint64_t from = to_share * before / all;
    before += group.slots;
    counts.push_back(static_cast<SlotIndex>(1 + to_share * before / all - from));
  }
  return counts;
}

}  // namespace

DiskFeed::DiskFeed(const CacheDisk& options, const std::vector<CacheGroup>& groups,
                   std::size_t key_bytes, std::shared_ptr<Device> device)
    : options_(options),
      key_bytes_(key_bytes),
      queued_(groups.size()),
      disk_(std::make_unique<DiskSlots>(completed(options.options, groups, key_bytes, *device))) {
  notes_->device = std::move(device);
  generations_.resize(disk_->capacity());
  SlotIndex first = 0;
  const std::vector<SlotIndex> counts = shares(disk_->capacity(), groups);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    parts_.push_back({first, counts[i], groups[i].manager->pool()->block_bytes(), groups[i].slots});
    first += counts[i];
  }
}

void DiskFeed::recover(Index& index, KeyMemory& memory) {
  std::vector<FoundSlot> found = disk_->take_found();
  std::ranges::sort(found, {}, &FoundSlot::generation);  // the oldest is the first to go
  std::vector<std::vector<const std::byte*>> keys(parts_.size());
  std::vector<std::vector<SlotIndex>> slots(parts_.size());
  for (const FoundSlot& each : found) {
    if (each.manifest != options_.options.manifest) {
      auto which = std::ranges::find(foreign_, each.manifest);
      if (which == foreign_.end()) which = foreign_.insert(foreign_.end(), each.manifest);
      const auto number = static_cast<std::size_t>(which - foreign_.begin());
      KeyMemory::Fate& fate = memory.of(bytes_of(each.key));
      fate.why = MissReason::other_manifest;
      fate.detail = static_cast<std::uint8_t>(std::min<std::size_t>(number, 255));
      ++stats_.foreign;
      continue;
    }
    // Of a cache with other groups: its slots are written again some time.
    if (each.group >= parts_.size() || each.key.size != key_bytes_) continue;
    const Part& part = parts_[each.group];
    if (each.slot < part.first || each.slot - part.first >= part.count ||
        each.payload_bytes != part.payload_bytes)
      continue;
    keys[each.group].push_back(each.key.bytes.data());
    slots[each.group].push_back(each.slot - part.first);
    generations_[each.slot] = each.generation;
  }
  for (std::size_t i = 0; i < parts_.size(); ++i)
    index.adopt(keys[i], key_bytes_, static_cast<GroupIndex>(parts_.size() + i), slots[i]);
}

// ---- writing ----

void DiskFeed::enqueue(GroupIndex group, std::span<const std::byte> key, double value) {
  const std::lock_guard lock(mutex_);
  if (queued_[group] >= parts_[group].host_slots) {  // the oldest has gone meanwhile, or will have
    const auto oldest = std::ranges::find(queue_, group, &Unwritten::group);
    queue_.erase(oldest);
    --queued_[group];
    ++stats_.unwritten;
  }
  queue_.push_back({group, value, disk_key(key)});
  ++queued_[group];
}

SlotIndex DiskFeed::disk_slot(const Index::Place& place) const {
  return parts_[place.group - parts_.size()].first + place.slot;
}

void DiskFeed::enqueue_erasures(const std::vector<Index::Place>& places) {
  const std::lock_guard lock(mutex_);
  for (const Index::Place& place : places) {
    if (place.group >= parts_.size()) erasures_.push_back({place, generations_[disk_slot(place)]});
  }
}

// The plan of a write that came to nothing has made room for it: the key that was there is gone
// from the index, and must not come back at the next start when it was removed meanwhile.
void DiskFeed::forget_what_was(const Index::Place& place) {
  if (std::exchange(generations_[disk_slot(place)], 0) == 0) return;
  const std::lock_guard lock(mutex_);
  erasures_.push_back({place, 0});
}

// Each once, when nobody reads the slot any more and unless something else has got it by then.
// False when the disk does not take them.
bool DiskFeed::erase_some(const Index& index) {
  const std::lock_guard lock(mutex_);
  held_ = false;
  for (std::size_t left = erasures_.size(); left > 0; --left) {
    const Erasure next = erasures_.front();
    if (generations_[disk_slot(next.place)] == next.generation) {
      DiskSubmit answer = DiskSubmit::busy;
      if (index.state(next.place) == EntryState::free) {
        DiskDone done = when_erased(next);
        ++notes_->erasing;
        try {
          answer = disk_->try_erase(disk_slot(next.place), std::move(done));
        } catch (...) {  // no memory: it was not accepted
          --notes_->erasing;
          throw;
        }
        if (answer != DiskSubmit::accepted) --notes_->erasing;
      }
      if (answer == DiskSubmit::full) return true;
      if (answer == DiskSubmit::degraded) return false;
      if (answer == DiskSubmit::busy) erasures_.push_back(next);
    }
    erasures_.pop_front();
  }
  held_ = !erasures_.empty();
  return true;
}

DiskDone DiskFeed::when_erased(const Erasure& erasure) {
  return [notes = notes_,
          note = std::make_shared<std::list<Erasure>>(1, erasure)](const DiskResult& result) {
    if (result.outcome != DiskOutcome::ok && result.outcome != DiskOutcome::closed) {
      const std::lock_guard lock(notes->mutex);
      notes->unerased.splice(notes->unerased.end(), *note);
    }
    --notes->erasing;
    notes->device->progress().bump_for_all();
  };
}

bool DiskFeed::feed(Index& index, const Place& place, const Gone& corrupt, bool flushing) {
  const auto [ended, failed] = end_written(index, corrupt);
  static_cast<void>(disk_->expire());
  if (failed) return true;  // not again at once
  const bool erases = erase_some(index);
  for (;;) {
    Unwritten next{};
    {
      const std::lock_guard lock(mutex_);
      refused_ = !erases;
      if (queue_.empty() || stats_.writing >= options_.max_writes) return ended;
      next = queue_.front();
      if (!due(next.group, flushing)) return ended;
      queue_.pop_front();
      --queued_[next.group];
      ++stats_.writing;  // while it is tried: never neither queued nor being written
    }
    Began began = Began::not_now;
    try {
      began = begin_write(index, place, next);
    } catch (...) {  // no memory: later again
    }
    const std::lock_guard lock(mutex_);
    if (began == Began::yes) continue;
    --stats_.writing;
    if (began == Began::no) continue;
    queue_.push_front(next);
    ++queued_[next.group];
    refused_ = true;
    return ended;
  }
}

DiskFeed::Began DiskFeed::begin_write(Index& index, const Place& place, const Unwritten& what) {
  const auto target_group = static_cast<GroupIndex>(parts_.size() + what.group);
  const std::byte* const key = what.key.bytes.data();
  for (;;) {
    const CopyPlan plan = index.plan_copy({&key, 1}, key_bytes_, what.group, target_group,
                                          owner_of_writes, what.value);
    if (plan.id == 0) {
      if (index.state(key, key_bytes_, target_group) != EntryState::free) return Began::no;
      if (index.state(key, key_bytes_, what.group) == EntryState::ready) return Began::not_now;
      const std::lock_guard lock(mutex_);
      ++stats_.unwritten;
      return Began::no;
    }
    const Part& part = parts_[what.group];
    const SlotIndex slot = part.first + plan.target[0];
    DiskSubmit answer = DiskSubmit::closed;
    try {
      auto [source, hold] = place(what.group, plan.source[0]);
      const DiskRecord record{bytes_of(what.key), what.group, part.payload_bytes, hold.sum(0)};
      answer = disk_->try_write(slot, record, source,
                                when_written({plan.id, slot, what, {}}, std::move(hold)));
    } catch (...) {  // no memory: it was not accepted
      static_cast<void>(index.finish(plan.id, 0, false));
      throw;
    }
    if (answer == DiskSubmit::accepted) return Began::yes;
    if (answer == DiskSubmit::retired) index.retire(target_group, plan.target[0]);
    static_cast<void>(index.finish(plan.id, 0, false));
    forget_what_was({target_group, plan.target[0]});
    if (answer != DiskSubmit::retired) return Began::not_now;
  }
}

DiskDone DiskFeed::when_written(const Written& written, HostBlocks hold) {
  return [notes = notes_, note = std::make_shared<std::list<Written>>(1, written),
          held = std::make_shared<HostBlocks>(std::move(hold))](const DiskResult& result) {
    held->release();
    note->front().result = result;
    {
      const std::lock_guard lock(notes->mutex);
      notes->written.splice(notes->written.end(), *note);
    }
    notes->device->progress().bump_for_all();
  };
}

DiskFeed::Ended DiskFeed::end_written(Index& index, const Gone& corrupt) {
  Ended result;
  std::list<Written> ended;
  std::list<Erasure> unerased;
  {
    const std::lock_guard lock(notes_->mutex);
    ended.swap(notes_->written);
    unerased.swap(notes_->unerased);
  }
  if (!unerased.empty()) {
    const std::lock_guard lock(mutex_);
    erasures_.insert(erasures_.end(), unerased.begin(), unerased.end());
    result.failed = true;
  }
  for (const Written& each : ended) {
    const bool ok = each.result.outcome == DiskOutcome::ok;
    const Part& part = parts_[each.what.group];
    if (ok) generations_[each.slot] = each.result.generation;
    if (disk_->is_retired(each.slot))
      index.retire(static_cast<GroupIndex>(parts_.size() + each.what.group),
                   each.slot - part.first);
    static_cast<void>(index.finish(each.plan, 0, ok));
    const Index::Place place{static_cast<GroupIndex>(parts_.size() + each.what.group),
                             each.slot - part.first};
    const bool removed = index.state(place) == EntryState::free;  // while it was being written
    if (!ok) forget_what_was(place);
    const bool bad = each.result.outcome == DiskOutcome::bad_data_sum;
    if (bad) corrupt(each.what.group, bytes_of(each.what.key));
    const std::lock_guard lock(mutex_);
    if (ok && removed) erasures_.push_back({place, each.result.generation});
    --stats_.writing;
    if (ok) {
      ++stats_.written;
    } else if (bad) {
      ++stats_.corrupt;
    } else if (each.result.outcome != DiskOutcome::closed) {  // once more, into another slot
      queue_.push_front(each.what);
      ++queued_[each.what.group];
      refused_ = result.failed = true;
    }
    result.any = true;
  }
  return result;
}

bool DiskFeed::has_notes() const {
  const std::lock_guard lock(notes_->mutex);
  return !notes_->written.empty() || !notes_->read.empty();
}

bool DiskFeed::due(GroupIndex group, bool flushing) const {
  return options_.write == DiskWrite::through || flushing ||
         static_cast<double>(queued_[group]) >
             (1 - options_.write_back_free) * static_cast<double>(parts_[group].host_slots);
}

bool DiskFeed::has_work(bool flushing) const {
  const std::lock_guard lock(mutex_);
  return stats_.writing > 0 || !erasures_.empty() || notes_->erasing > 0 ||
         (!queue_.empty() && due(queue_.front().group, flushing));
}

bool DiskFeed::idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && stats_.writing == 0 && erasures_.empty() && notes_->erasing == 0;
}

bool DiskFeed::stuck() const {
  const std::lock_guard lock(mutex_);
  return (refused_ || (queue_.empty() && held_)) && stats_.writing == 0 && notes_->erasing == 0;
}

void DiskFeed::forget_queue() {
  const std::lock_guard lock(mutex_);
  queue_.clear();
  erasures_.clear();
  queued_.assign(queued_.size(), 0);
}

DiskFeedStats DiskFeed::stats() const {
  const std::lock_guard lock(mutex_);
  DiskFeedStats stats = stats_;
  stats.queued = queue_.size();
  stats.erasing = erasures_.size() + notes_->erasing;
  return stats;
}

// ---- reading ----

DiskSubmit DiskFeed::try_read(const Read& read, std::span<const std::byte> key,
                              std::size_t payload_bytes, std::byte* target, HostBlocks hold) {
  const SlotIndex slot = parts_[read.group].first + read.slot;
  DiskDone done = [notes = notes_, note = std::make_shared<std::list<Read>>(1, read),
                   held = std::make_shared<HostBlocks>(std::move(hold))](const DiskResult& result) {
    held->release();
    note->front().result = result;
    {
      const std::lock_guard lock(notes->mutex);
      notes->read.splice(notes->read.end(), *note);
    }
    notes->device->progress().bump_for_all();
  };
  return disk_->try_read(slot, {key, read.group, payload_bytes}, generations_[slot], target,
                         std::move(done));
}

std::list<DiskFeed::Read> DiskFeed::take_read() {
  const std::lock_guard lock(notes_->mutex);
  return std::exchange(notes_->read, {});
}

void DiskFeed::settle(Index& index, const Read& read) {
  const Part& part = parts_[read.group];
  if (disk_->is_retired(part.first + read.slot))
    index.retire(static_cast<GroupIndex>(parts_.size() + read.group), read.slot);
}

}  // namespace kvmem
