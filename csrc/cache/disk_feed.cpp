#include "cache/disk_feed.hpp"

#include <algorithm>
#include <cerrno>
#include <numeric>

#include "base/check.hpp"

namespace kvmem {

namespace {

constexpr const char* owner_of_writes = "disk writes";
constexpr int most_failures = 3;  // of erasing one slot

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
    : options_(options), key_bytes_(key_bytes), queues_(groups.size()) {
  options_.options = completed(options.options, groups, key_bytes, *device);
  disk_ = std::make_unique<DiskSlots>(options_.options);
  notes_->device = std::move(device);
  generations_.resize(disk_->capacity());
  SlotIndex first = 0;
  const std::vector<SlotIndex> counts = shares(disk_->capacity(), groups);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    parts_.push_back({first, counts[i], groups[i].manager->pool()->block_bytes(), groups[i].slots});
    first += counts[i];
  }
}

bool DiskFeed::has_place(const FoundSlot& found) const {
  if (found.group >= parts_.size() || found.key.size != key_bytes_) return false;
  const Part& part = parts_[found.group];
  return found.slot >= part.first && found.slot - part.first < part.count &&
         found.payload_bytes == part.payload_bytes;
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
    if (!has_place(each)) continue;
    keys[each.group].push_back(each.key.bytes.data());
    slots[each.group].push_back(each.slot - parts_[each.group].first);
    generations_[each.slot] = each.generation;
  }
  for (const FoundSlot& each : disk_->take_superseded()) {
    if (each.manifest != options_.options.manifest || !has_place(each)) continue;
    const auto group = static_cast<GroupIndex>(parts_.size() + each.group);
    erasures_.push_back({{group, each.slot - parts_[each.group].first}, 0});
  }
  for (std::size_t i = 0; i < parts_.size(); ++i)
    index.adopt(keys[i], key_bytes_, static_cast<GroupIndex>(parts_.size() + i), slots[i]);
}

// ---- writing ----

SlotIndex DiskFeed::disk_slot(const Index::Place& place) const {
  return parts_[place.group - parts_.size()].first + place.slot;
}

void DiskFeed::enqueue_erasures(const std::vector<Index::Place>& places) {
  const std::lock_guard lock(mutex_);
  for (const Index::Place& place : places) {
    if (place.group >= parts_.size() && !closed_)
      erasures_.push_back({place, generations_[disk_slot(place)]});
  }
}

// The plan of a write that came to nothing has made room for it: the key that was there is gone
// from the index, and must not come back at the next start when it was removed meanwhile.
void DiskFeed::forget_what_was(const Index::Place& place, std::list<Erasure>& room) noexcept {
  if (std::exchange(generations_[disk_slot(place)], 0) == 0) return;
  room.front() = {place, 0};
  const std::lock_guard lock(mutex_);
  erasures_.splice(erasures_.end(), room);
}

// Each once, when nobody reads the slot any more and unless something else has got it by then. What
// cannot be written again and again is never used again. False when the disk does not take them.
bool DiskFeed::erase_some(Index& index) {
  const std::lock_guard lock(mutex_);
  held_ = false;
  for (std::size_t left = erasures_.size(); left > 0; --left) {
    const Erasure next = erasures_.front();
    if (generations_[disk_slot(next.place)] == next.generation) {
      if (next.failures == most_failures) {
        index.retire(next.place.group, next.place.slot);
        erasures_.pop_front();
        continue;
      }
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
      if (answer == DiskSubmit::busy) {  // later
        erasures_.splice(erasures_.end(), erasures_, erasures_.begin());
        continue;
      }
    }
    erasures_.pop_front();
  }
  held_ = !erasures_.empty();
  return true;
}

DiskDone DiskFeed::when_erased(const Erasure& erasure) {
  const bool once = disk_->is_retired(disk_slot(erasure.place));  // it may well have gone bad
  return [notes = notes_, note = std::make_shared<std::list<Erasure>>(1, erasure),
          once](const DiskResult& result) {
    if (result.outcome != DiskOutcome::ok && result.outcome != DiskOutcome::closed && !once) {
      if (result.error == EIO) ++note->front().failures;  // of the slot rather than of the disk
      const std::lock_guard lock(notes->mutex);
      notes->unerased.splice(notes->unerased.end(), *note);
    } else {
      --notes->erasing;
    }
    notes->device->progress().bump_for_all();
  };
}

bool DiskFeed::feed(Index& index, const Place& place, const Gone& corrupt, bool flushing) {
  const auto [ended, failed] = end_written(index, corrupt);
  static_cast<void>(disk_->expire());
  if (failed) return options_.options.workers > 0;  // not again at once, which without is now
  std::array<bool, most_groups> full{};             // a group that has no room
  // A disk in trouble takes one call to see whether it is well again: that is not to be the erasure
  // of a slot that has gone bad.
  const bool erases = writes_first(flushing) || erase_some(index);
  {
    const std::lock_guard lock(mutex_);
    refused_ = !erases;
    in_trouble_ |= !erases;
  }
  for (;;) {
    std::list<Unwritten> next;
    {
      const std::lock_guard lock(mutex_);
      const std::optional<GroupIndex> group = due(flushing, full);
      if (!group || stats_.writing >= options_.max_writes) return ended;
      next.splice(next.begin(), queues_[*group], queues_[*group].begin());
      ++stats_.writing;  // while it is tried: never neither queued nor being written
    }
    Began began = Began::no_room;
    try {
      began = begin_write(index, place, next.front());
    } catch (...) {  // no memory: later again
    }
    const std::lock_guard lock(mutex_);
    if (began == Began::yes || began == Began::degraded) in_trouble_ = began == Began::degraded;
    if (began == Began::yes) continue;
    --stats_.writing;
    if (began == Began::no) continue;
    full[next.front().group] = refused_ = true;
    std::list<Unwritten>& queue = queues_[next.front().group];
    queue.splice(queue.begin(), next);
  }
}

bool DiskFeed::writes_first(bool flushing) const {
  const std::lock_guard lock(mutex_);
  return in_trouble_ && due(flushing, {});
}

DiskFeed::Began DiskFeed::begin_write(Index& index, const Place& place, const Unwritten& what) {
  const auto target_group = static_cast<GroupIndex>(parts_.size() + what.group);
  const std::byte* const key = what.key.bytes.data();
  std::list<Erasure> room(1);
  for (;;) {
    const CopyPlan plan = index.plan_copy({&key, 1}, key_bytes_, what.group, target_group,
                                          owner_of_writes, what.value);
    if (plan.id == 0) {
      if (index.state(key, key_bytes_, target_group) != EntryState::free) return Began::no;
      if (index.state(key, key_bytes_, what.group) == EntryState::ready) return Began::no_room;
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
      forget_what_was({target_group, plan.target[0]}, room);
      throw;
    }
    if (answer == DiskSubmit::accepted) return Began::yes;
    if (answer == DiskSubmit::retired) index.retire(target_group, plan.target[0]);
    static_cast<void>(index.finish(plan.id, 0, false));
    forget_what_was({target_group, plan.target[0]}, room);
    if (room.empty()) room.emplace_back();
    if (answer == DiskSubmit::degraded) return Began::degraded;
    if (answer != DiskSubmit::retired) return Began::no_room;
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
    notes_->erasing -= unerased.size();
    erasures_.splice(erasures_.end(), unerased);
    result.failed = true;
    ++failures_;
  }
  try {
    for (; !ended.empty(); ended.pop_front()) end_write(index, corrupt, ended.front(), result);
  } catch (...) {  // no memory: this one and those behind it in a later turn
    const std::lock_guard lock(notes_->mutex);
    notes_->written.splice(notes_->written.begin(), ended);
    throw;
  }
  return result;
}

void DiskFeed::end_write(Index& index, const Gone& corrupt, const Written& each, Ended& result) {
  std::list<Erasure> erasure(1);
  std::list<Unwritten> again(1, each.what);  // nothing needs memory behind this
  const bool ok = each.result.outcome == DiskOutcome::ok;
  const Part& part = parts_[each.what.group];
  const Index::Place place{static_cast<GroupIndex>(parts_.size() + each.what.group),
                           each.slot - part.first};
  if (ok) generations_[each.slot] = each.result.generation;
  if (disk_->is_retired(each.slot)) index.retire(place.group, place.slot);
  static_cast<void>(index.finish(each.plan, 0, ok));
  const bool removed = index.state(place) != EntryState::ready;  // while it was being written
  if (!ok) forget_what_was(place, erasure);
  const bool bad = each.result.outcome == DiskOutcome::bad_data_sum;
  if (bad) corrupt(each.what.group, bytes_of(each.what.key));
  const std::lock_guard lock(mutex_);
  if (ok && removed) {
    erasure.front() = {place, each.result.generation};
    erasures_.splice(erasures_.end(), erasure);
  }
  --stats_.writing;
  result.any = true;
  if (ok) {
    ++stats_.written;
    failures_ = 0;
  } else if (bad) {
    ++stats_.corrupt;
  } else if (each.result.outcome == DiskOutcome::closed || closed_) {
    dropped_ = true;
  } else {  // once more, into another slot
    std::list<Unwritten>& queue = queues_[each.what.group];
    queue.splice(queue.begin(), again);
    refused_ = result.failed = true;
    ++failures_;
  }
}

}  // namespace kvmem
