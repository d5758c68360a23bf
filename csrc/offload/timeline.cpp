#include "offload/timeline.hpp"

#include <unordered_map>
#include <utility>

namespace kvmem {

void Timeline::add(const TimelineRecord& record, std::shared_ptr<Event> first_use) noexcept {
  const bool used = first_use != nullptr;
  Entry entry{record, std::move(first_use), used};
  const std::lock_guard lock(mutex_);
  if (records_.size() < most_) {
    records_.push_back(std::move(entry));
  } else if (most_ > 0) {
    std::swap(records_[oldest_], entry);
    oldest_ = (oldest_ + 1) % most_;
  }
}

void Timeline::note_first_use(std::uint64_t id, std::shared_ptr<Event> first_use) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::size_t back = 1; back <= records_.size(); ++back) {  // consumers mostly come soon
    Entry& entry = records_[(oldest_ + records_.size() - back) % records_.size()];
    if (entry.record.id != id) continue;
    if (!std::exchange(entry.used, true)) entry.first_use = std::move(first_use);
    return;
  }
}

std::vector<TimelineRecord> Timeline::read() {
  // Events are asked outside the lock, which the end of every transfer takes.
  std::vector<Entry> entries;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < records_.size(); ++i)
      entries.push_back(records_[(oldest_ + i) % records_.size()]);
  }
  std::vector<TimelineRecord> records;
  std::unordered_map<std::uint64_t, Nanoseconds> reached;
  for (Entry& entry : entries) {
    if (entry.first_use && entry.first_use->query() == EventState::done) {
      reached[entry.record.id] = entry.record.first_use = entry.first_use->reached_at();
    }
    records.push_back(entry.record);
  }
  const std::lock_guard lock(mutex_);
  for (Entry& entry : records_) {
    const auto found = entry.first_use ? reached.find(entry.record.id) : reached.end();
    if (found == reached.end()) continue;
    entry.record.first_use = found->second;
    entry.first_use.reset();  // not the last one: `entries` holds it until the lock is gone
  }
  return records;
}

}  // namespace kvmem
