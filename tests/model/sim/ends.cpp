// What the engine does when a transfer has ended, and what must be true then.
#include <cstring>

#include "model/sim/simulation.hpp"

namespace kvmem::sim {

void Simulation::note_ends() {
  std::vector<SimTransfer*> now;
  for (SimTransfer& transfer : transfers_) {
    if (transfer.ended) {
      if (transfer.job->state() != transfer.end) throw Violation("a terminal state was left");
      continue;
    }
    if (!is_terminal(transfer.job->state())) continue;
    transfer.ended = true;
    transfer.end = transfer.job->state();
    restore_ends_[transfer.seq] = transfer.end;
    now.push_back(&transfer);
  }
  for (SimTransfer* const transfer : now) ended(*transfer);
  // The oldest that ended make room.
  std::size_t over = transfers_.size() - std::min(transfers_.size(), most_remembered);
  for (SimTransfer& transfer : transfers_) {
    if (over == 0) break;
    if (!transfer.ended) continue;
    transfer.handle.reset();
    --over;
  }
  for (SimTransfer& transfer : transfers_) {
    if (transfer.ended && !transfer.handle && transfer.token != 0) {
      expect(wakes_.take(transfer.token) == 1, "who waits for an end is not woken once");
      wakes_.forget(transfer.token);
    }
  }
  std::erase_if(transfers_,
                [](const SimTransfer& transfer) { return transfer.ended && !transfer.handle; });
}

// But for the times that only the device knows: 0, measured; -1, or perhaps not.
TimelineRecord Simulation::expected_record(const SimTransfer& transfer) const {
  TimelineRecord record;
  record.id = transfer.job->id;
  record.kind = transfer.restores ? TransferKind::restore : TransferKind::offload;
  record.priority = transfer.job->priority();
  record.state = transfer.end;
  record.staged = is_staged();
  record.blocks = transfer.blocks.size();
  record.bytes = transfer.blocks.size() * block_bytes;
  record.requested = transfer.requested;
  record.submitted = transfer.job->submitted_at();
  if (shape_.manager.timeline && record.state == TransferState::done && faults_planned_ == 0)
    record.started = record.completed = 0;
  return record;
}

void Simulation::ended(SimTransfer& transfer) {
  DirectionStats& expected = expected_[transfer.restores ? 1 : 0];
  ended_now_.push_back(expected_record(transfer));
  expect(transfer.job->behind().empty(), "an ended transfer keeps those that it ran behind");
  const auto unreported = unreported_.find(transfer.job->id);  // not if just reported
  if (unreported != unreported_.end()) unreported->second.ended = true;
  switch (transfer.end) {
    case TransferState::cancelled:
      if (!transfer.cancelled) throw Violation("cancelled, and nobody cancelled");
      ++expected.cancelled;
      ++tally_.cancelled;
      return;
    case TransferState::failed:
      if (faults_planned_ == 0 && !device_->lost()) throw Violation("failed without a fault");
      ++expected.failed;
      ++tally_.failed;
      return;
    default:
      break;
  }
  if (transfer.cancelled) throw Violation("a cancelled transfer ended done");
  ++expected.done;
  ++tally_.done;
  if (transfer.restores)
    restored(transfer);
  else
    offloaded(transfer);
}

void Simulation::offloaded(SimTransfer& transfer) {
  if (!transfer.handle) return;  // nobody has the blocks
  auto copy = transfer.handle->result();
  expect(copy == transfer.handle->result(), "the result is another object each time");
  transfer.result = copy;
  const HostBlocks& blocks = copy->blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const SlotIndex slot = blocks.slots()[i];
    if (slot != transfer.slots[i]) throw Violation("the result names other slots");
    const bool written_again = std::ranges::any_of(transfers_, [&](const SimTransfer& later) {
      return later.seq > transfer.seq && !later.restores &&
             std::ranges::find(later.slots, slot) != later.slots.end();
    });
    if (written_again) continue;
    const Key key = key_of(transfer.contents[i]);
    if (key != 0) expect_bytes(blocks.data(i), key, "an offloaded block");
    BlockBytes bytes;
    std::memcpy(bytes.data(), blocks.data(i), block_bytes);
    slot_keys_[slot] = key != 0 ? key : new_key(bytes);
  }
  if (stored_.size() < most_stored) stored_.push_back(std::move(copy));
}

void Simulation::restored(const SimTransfer& transfer) {
  for (std::size_t i = 0; i < transfer.blocks.size(); ++i) {
    const BlockId block = transfer.blocks[i];
    const Content& now = content_[static_cast<std::size_t>(block)];
    if (now.restore != transfer.seq || now.key == 0) continue;  // written again since, or unknown
    const BlockBytes there = cache_->read(block);
    expect_bytes(there.data(), now.key, "a restored block");
  }
}

}  // namespace kvmem::sim
