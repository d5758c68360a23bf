// The reads of a disk feed.
#include "cache/disk_feed.hpp"

namespace kvmem {

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

void DiskFeed::put_back(std::list<Read>& reads) noexcept {
  const std::lock_guard lock(notes_->mutex);
  notes_->read.splice(notes_->read.begin(), reads);
}

void DiskFeed::settle(Index& index, const Read& read) {
  const Part& part = parts_[read.group];
  if (!disk_->is_retired(part.first + read.slot)) return;
  const Index::Place place{static_cast<GroupIndex>(parts_.size() + read.group), read.slot};
  std::list<Erasure> room(1);
  index.retire(place.group, place.slot);
  forget_what_was(place, room);  // else it might be read well at the next start, though removed
}

}  // namespace kvmem
