// Between the blocks of a cache in host memory and the slots of its disk: what was there at the
// start, what is to be written, and what was read.
//
// The index knows which key is in which slot; the disk's groups in it back those of the host, and
// have a part each of the disk's slots, in proportion to theirs. A block is written while its entry
// in host memory is held by the plan of the copy, and found on disk when the write has ended.
//
// Completions come from the disk's workers and only leave a note here; take_read() and feed() act
// on them. One thread at a time, but for what is marked.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cache/cache_options.hpp"
#include "cache/index.hpp"
#include "cache/key_memory.hpp"
#include "tier/disk_slots.hpp"

namespace kvmem {

struct DiskFeedStats {
  std::uint64_t written = 0;    // blocks
  std::uint64_t unwritten = 0;  // gone from host memory before they were
  std::uint64_t corrupt = 0;    // no longer had their checksum: never written
  std::uint64_t foreign = 0;    // found under another manifest
  std::size_t queued = 0, writing = 0, erasing = 0;
};

class DiskFeed {
 public:
  // Opens the disk and shares its slots out. `groups`: with their slots settled. Throws what
  // DiskSlots throws, CapacityError (less than a slot a group).
  DiskFeed(const CacheDisk& options, const std::vector<CacheGroup>& groups, std::size_t key_bytes,
           std::shared_ptr<Device> device);

  [[nodiscard]] SlotIndex slots(std::size_t group) const noexcept { return parts_[group].count; }
  // What was found, into the index; of what is another manifest's, a note.
  void recover(Index& index, KeyMemory& memory);
  [[nodiscard]] const Digest16& foreign(std::size_t number) const { return foreign_[number]; }

  // ---- writing ----
  // A key that host memory has and the disk may lack. Any thread.
  void enqueue(const Index& index, GroupIndex group, std::span<const std::byte> key, double value);
  // What is in these slots, of the disk's groups, is not to be found at the next start either. By
  // whoever keeps others from feed().
  void enqueue_erasures(const std::vector<Index::Place>& places);
  // Ends what was written and begins what can be. `place`: of a slot of the index in host memory,
  // and what keeps it there. `corrupt`: called for what has gone bad there, and was not written.
  // True when a write ended.
  using Place = std::function<std::pair<const std::byte*, HostBlocks>(GroupIndex, SlotIndex)>;
  using Gone = std::function<void(GroupIndex, std::span<const std::byte> key)>;
  bool feed(Index& index, const Place& place, const Gone& corrupt, bool flushing);
  [[nodiscard]] bool has_notes() const;  // something has ended; any thread
  [[nodiscard]] bool idle() const;       // nothing queued or running; any thread
  // Something runs, or is due; any thread.
  [[nodiscard]] bool has_work(bool flushing) const;
  // There is something, and the disk does not take it: refuses it, or fails again and again since
  // expect_better(). Any thread.
  [[nodiscard]] bool stuck() const;
  void expect_better();
  // Forgets what is to be written or erased, and what comes later. How many writes. By whoever
  // keeps others from feed().
  std::size_t close_queue();

  // ---- reading ----
  struct Read {
    std::uint64_t job = 0;
    std::size_t part = 0;
    GroupIndex group = 0;
    SlotIndex slot = 0;     // on disk, of the group
    SlotIndex landing = 0;  // of the pool
    DiskResult result;
  };
  // `hold` goes when the read has ended, whoever still waits for it.
  [[nodiscard]] DiskSubmit try_read(const Read& read, std::span<const std::byte> key,
                                    std::size_t payload_bytes, std::byte* target, HostBlocks hold);
  [[nodiscard]] std::list<Read> take_read();
  void put_back(std::list<Read>& reads) noexcept;  // to be taken again
  // Retires slots that have gone bad.
  void settle(Index& index, const Read& read);

  [[nodiscard]] const DiskOptions& options() const noexcept { return options_.options; }
  [[nodiscard]] DiskSlots& disk() noexcept { return *disk_; }
  [[nodiscard]] DiskFeedStats stats() const;  // any thread

 private:
  struct Part {  // of the disk's slots, a group's
    SlotIndex first = 0, count = 0;
    std::size_t payload_bytes = 0, host_slots = 0;
  };
  struct Unwritten {
    GroupIndex group;
    double value;
    DiskKey key;
  };
  struct Written {
    PlanId plan = 0;
    SlotIndex slot = 0;  // of the disk
    Unwritten what;
    DiskResult result;
  };
  struct Erasure {
    Index::Place place;
    std::uint64_t generation = 0;
    int failures = 0;
  };
  [[nodiscard]] bool has_place(const FoundSlot& found) const;
  [[nodiscard]] SlotIndex disk_slot(const Index::Place& place) const;
  void forget_what_was(const Index::Place& place, std::list<Erasure>& room) noexcept;
  bool erase_some(Index& index);
  [[nodiscard]] bool writes_first(bool flushing) const;
  [[nodiscard]] DiskDone when_erased(const Erasure& erasure);
  struct Notes {  // by workers, who must not need memory for them
    std::mutex mutex;
    std::list<Written> written;
    std::list<Read> read;
    std::list<Erasure> unerased;
    std::atomic<std::size_t> erasing{0};
    std::shared_ptr<Device> device;  // whose sleepers are woken
  };
  // With mutex_ held.
  [[nodiscard]] std::optional<GroupIndex> due(bool flushing,
                                              const std::array<bool, most_groups>& full) const;
  void drop_useless(const Index& index, std::list<Unwritten>& queue);
  [[nodiscard]] std::size_t queued() const;
  struct Ended {
    bool any = false, failed = false;
  };
  Ended end_written(Index& index, const Gone& corrupt);
  void end_write(Index& index, const Gone& corrupt, const Written& each, Ended& result);
  enum class Began : std::uint8_t { yes, no, no_room, degraded };
  [[nodiscard]] DiskDone when_written(const Written& written, HostBlocks hold);
  Began begin_write(Index& index, const Place& place, const Unwritten& what);

  CacheDisk options_;
  std::size_t key_bytes_;
  std::vector<Part> parts_;
  std::vector<Digest16> foreign_;
  std::shared_ptr<Notes> notes_ = std::make_shared<Notes>();
  std::vector<std::uint64_t> generations_;    // by slot of the disk; 0: nothing that counts
  mutable std::mutex mutex_;                  // over what follows
  std::vector<std::list<Unwritten>> queues_;  // of each group
  std::list<Erasure> erasures_;
  DiskFeedStats stats_;
  bool refused_ = false;                   // of the last turn, something
  bool in_trouble_ = false;                // the disk, when it was last asked
  bool held_ = false;                      // what is to be erased is all in use
  std::size_t failures_ = 0;               // since a write was done, or better was expected
  bool closed_ = false, dropped_ = false;  // what the disk should have and does not
  std::unique_ptr<DiskSlots> disk_;        // ends first: its workers leave notes
};

}  // namespace kvmem
