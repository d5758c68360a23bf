// When each transfer was requested, submitted, started, completed, observed and first used, on the
// device's clock.
//
// A ring: the last records are kept. -1 stands for a stage that was not reached or not measured.
// Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/stream.hpp"
#include "offload/transfer_kinds.hpp"

namespace kvmem {

struct TimelineRecord {
  std::uint64_t id = 0;
  TransferKind kind = TransferKind::offload;
  Priority priority = Priority::demand;
  TransferState state = TransferState::queued;  // how it ended
  bool staged = false;
  std::size_t blocks = 0, bytes = 0;
  Nanoseconds requested = -1, submitted = -1, started = -1, completed = -1, observed = -1,
              first_use = -1;
  // Of an offload behind `observed`, of a restore before `submitted`.
  Nanoseconds checked = -1;
};

class Timeline {
 public:
  explicit Timeline(std::size_t most_records) : most_(most_records) {
    records_.reserve(most_records);
  }

  // Takes the record of a transfer that ended, and the event behind its first consumer's wait, if
  // there was one.
  void add(const TimelineRecord& record, std::shared_ptr<Event> first_use) noexcept;
  // Of a transfer that ended before its first consumer came. Only the first one counts.
  void note_first_use(std::uint64_t id, std::shared_ptr<Event> first_use) noexcept;
  // The records kept, oldest first.
  [[nodiscard]] std::vector<TimelineRecord> read();

 private:
  struct Entry {
    TimelineRecord record;
    std::shared_ptr<Event> first_use;  // until it was reached and read
    bool used = false;                 // first_use was given
  };
  const std::size_t most_;
  std::mutex mutex_;
  std::vector<Entry> records_;  // has room for all
  std::size_t oldest_ = 0;
};

}  // namespace kvmem
