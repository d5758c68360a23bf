// What of a disk feed waits to be written or erased, and whether anything does.
#include <set>
#include <string_view>

#include "cache/disk_feed.hpp"

namespace kvmem {

void DiskFeed::enqueue(const Index& index, GroupIndex group, std::span<const std::byte> key,
                       double value) {
  const std::lock_guard lock(mutex_);
  if (closed_) {
    ++stats_.unwritten;
    return;
  }
  std::list<Unwritten>& queue = queues_[group];
  queue.push_back({group, value, disk_key(key)});
  // Of so many at least half are of no use, for host memory has less.
  if (queue.size() > std::size_t{2} * parts_[group].host_slots) drop_useless(index, queue);
}

// Those that have gone from host memory, or are on disk, or stand in front as well.
void DiskFeed::drop_useless(const Index& index, std::list<Unwritten>& queue) {
  std::set<std::string_view> kept;
  for (auto each = queue.begin(); each != queue.end();) {
    const std::byte* const key = each->key.bytes.data();
    const auto on_disk = static_cast<GroupIndex>(parts_.size() + each->group);
    const bool there = index.state(key, key_bytes_, each->group) == EntryState::ready;
    const bool needed = index.state(key, key_bytes_, on_disk) == EntryState::free;
    const std::string_view its(reinterpret_cast<const char*>(key), key_bytes_);
    if (there && needed && kept.insert(its).second) {
      ++each;
      continue;
    }
    if (needed && !there) ++stats_.unwritten;
    each = queue.erase(each);
  }
}

bool DiskFeed::has_notes() const {
  const std::lock_guard lock(notes_->mutex);
  return !notes_->written.empty() || !notes_->read.empty();
}

// A group that has something to be written by now, and is not `full`.
std::optional<GroupIndex> DiskFeed::due(bool flushing,
                                        const std::array<bool, most_groups>& full) const {
  for (std::size_t group = 0; group < queues_.size(); ++group) {
    if (full[group]) continue;
    const auto queued = static_cast<double>(queues_[group].size());
    const auto slots = static_cast<double>(parts_[group].host_slots);
    const bool now = options_.write == DiskWrite::through || flushing ||
                     queued > (1 - options_.write_back_free) * slots;
    if (now && queued > 0) return static_cast<GroupIndex>(group);
  }
  return std::nullopt;
}

std::size_t DiskFeed::queued() const {
  std::size_t all = 0;
  for (const std::list<Unwritten>& queue : queues_) all += queue.size();
  return all;
}

bool DiskFeed::has_work(bool flushing) const {
  const std::lock_guard lock(mutex_);
  return stats_.writing > 0 || !erasures_.empty() || notes_->erasing > 0 || due(flushing, {});
}

bool DiskFeed::idle() const {
  const std::lock_guard lock(mutex_);
  return queued() == 0 && stats_.writing == 0 && erasures_.empty() && notes_->erasing == 0 &&
         !dropped_;
}

bool DiskFeed::stuck() const {
  const std::lock_guard lock(mutex_);
  // What fails for want of something is tried again at once, so something always runs.
  if (dropped_ || failures_ > 2 * options_.max_writes) return true;
  return (refused_ || (queued() == 0 && held_)) && stats_.writing == 0 && notes_->erasing == 0;
}

void DiskFeed::expect_better() {
  const std::lock_guard lock(mutex_);
  failures_ = 0;
}

std::size_t DiskFeed::close_queue() {
  const std::lock_guard lock(mutex_);
  const std::size_t left = queued();
  closed_ = true;
  dropped_ |= left > 0;
  for (std::list<Unwritten>& queue : queues_) queue.clear();
  erasures_.clear();
  return left;
}

DiskFeedStats DiskFeed::stats() const {
  const std::lock_guard lock(mutex_);
  DiskFeedStats stats = stats_;
  stats.queued = queued();
  stats.erasing = erasures_.size() + notes_->erasing;
  return stats;
}

}  // namespace kvmem
