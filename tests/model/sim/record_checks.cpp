// The timeline, and the statistics that add it up.
#include "model/sim/simulation.hpp"

namespace kvmem::sim {

void Simulation::check_records() {
  if (ended_now_.empty()) return;
  records_ += ended_now_.size();
  const auto kept = without_faults([&] { return manager_->timeline(); });
  expect(kept.size() == std::min<std::uint64_t>(records_, shape_.manager.timeline_records),
         "the timeline has ", kept.size(), " records of ", records_);
  expect(std::ranges::is_sorted(kept, {}, &TimelineRecord::observed),
         "the timeline is not in the order of ends");
  for (const TimelineRecord& expected : std::exchange(ended_now_, {})) {
    const auto record = std::ranges::find(kept, expected.id, &TimelineRecord::id);
    expect(record != kept.end(), "transfer ", expected.id, " ended and has no record");
    check_record(*record, expected);
  }
}

void Simulation::check_record(const TimelineRecord& record, const TimelineRecord& expected) {
  expect(record.kind == expected.kind && record.priority == expected.priority &&
             record.state == expected.state && record.staged == expected.staged &&
             record.blocks == expected.blocks && record.bytes == expected.bytes,
         "the record of transfer ", record.id, " is of another one");
  expect(record.requested == expected.requested && record.submitted == expected.submitted &&
             record.observed >= checked_at_ && record.observed <= device_->now(),
         "transfer ", record.id, " was requested ", expected.requested, " submitted ",
         expected.submitted, " observed ", checked_at_, " to ", device_->now(), ", recorded ",
         record.requested, " ", record.submitted, " ", record.observed);
  const bool measured = record.started >= 0 && record.completed >= 0;
  expect(measured ? record.requested <= record.submitted && record.submitted <= record.started &&
                        record.started < record.completed && record.completed <= record.observed
                  : record.started == -1 && record.completed == -1,
         "the times of transfer ", record.id, " are out of order");
  expect(measured || expected.started == -1, "transfer ", record.id, " was not measured");
  expect(!measured || shape_.manager.timeline, "transfer ", record.id, " was measured");

  DirectionStats& sum = expected_[record.kind == TransferKind::restore ? 1 : 0];
  if (record.state == TransferState::done) {
    sum.blocks_done += record.blocks;
    sum.bytes_done += record.bytes;
    sum.bytes_staged += record.staged ? record.bytes : 0;
  }
  if (record.submitted < 0) return;
  const auto delay_us = static_cast<std::uint64_t>((record.submitted - record.requested) / 1000);
  sum.queue_delay_total_us += delay_us;
  sum.queue_delay_max_us = std::max(sum.queue_delay_max_us, delay_us);
  sum.guard_wait_total_us +=
      static_cast<std::uint64_t>((record.observed - record.submitted) / 1000);
}

// Once every stream has run empty.
void Simulation::check_uses() {
  for (const TimelineRecord& record : without_faults([&] { return manager_->timeline(); })) {
    const auto used = used_.find(record.id);
    const bool may_be = used != used_.end(), must_be = may_be && used->second.surely;
    expect(record.first_use >= 0 ? may_be : !must_be, "transfer ", record.id, " was first used ",
           record.first_use);
    if (used != used_.end() && used->second.all)
      expect(record.first_use >= record.completed && record.first_use <= device_->now(),
             "transfer ", record.id, " was used ", record.first_use, ", complete ",
             record.completed);
  }
}

}  // namespace kvmem::sim
