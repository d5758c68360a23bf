// Offload, restore, and what is done with transfers.
#include <cstring>

#include "model/sim/simulation.hpp"

namespace kvmem::sim {

namespace {

bool unfinished(const SimTransfer& transfer) { return !is_terminal(transfer.job->state()); }

template <class Id>
bool share_any(const std::vector<Id>& one, const std::vector<Id>& other) {
  return std::ranges::any_of(one,
                             [&](Id id) { return std::ranges::find(other, id) != other.end(); });
}

}  // namespace

// Distinct; mostly such as no transfer uses.
std::vector<BlockId> Simulation::some_blocks(const Draw& draw, std::size_t count) {
  std::vector<BlockId> blocks;
  const bool free_only = draw[3] % 4 != 0;
  for (std::size_t i = 0; i < shape_.device_blocks && blocks.size() < count; ++i) {
    const auto block =
        static_cast<BlockId>((draw[0] + i * (1 + draw[1] % 2)) % shape_.device_blocks);
    if (std::ranges::find(blocks, block) != blocks.end()) continue;
    const bool used = std::ranges::any_of(transfers_, [&](const SimTransfer& transfer) {
      return unfinished(transfer) && transfer.touches(block);
    });
    if (!used || !free_only) blocks.push_back(block);
  }
  return blocks;
}

// Behind all that the engine has queued on the blocks' streams, and perhaps behind transfers.
TransferRequest Simulation::request_for(const Wish& wish, std::uint32_t draw) {
  TransferRequest request;
  request.blocks = wish.blocks;
  request.priority = draw % 2 == 0 ? Priority::demand : Priority::background;
  if ((draw >> 1) % 2 == 0) request.tag = Tag(static_cast<std::int64_t>(last_seq_ + 1));
  for (SimTransfer& transfer : transfers_) {
    const bool named = transfer.handle != nullptr && (draw >> 2) % 4 != 0 &&
                       (share_any(transfer.blocks, wish.blocks) ||
                        share_any(transfer.slots, wish.slots) || (draw >> 4) % 8 == 0);
    if (named) manager_->add_transfer(request.after, *transfer.handle);
  }
  for (unsigned stream = 0; stream < 2; ++stream) {
    const bool concerned =
        std::ranges::any_of(wish.blocks, [&](BlockId block) { return stream_of(block) == stream; });
    if (!concerned || (idle(stream) && (draw >> 7) % 2 == 0)) continue;
    if ((draw >> 8) % 4 != 0) {
      manager_->add_stream(request.after, streams_[stream].handle());
      continue;
    }
    Event foreign;
    without_faults([&] {
      foreign = engine_events_->acquire();
      foreign.record(streams_[stream].handle());
    });
    manager_->add_event(request.after, foreign.handle());
    without_faults([&] { foreign.record(streams_[1 - stream].handle()); });
  }
  return request;
}

std::vector<Content> Simulation::contents_of(const std::vector<BlockId>& blocks) const {
  std::vector<Content> contents;
  for (const BlockId block : blocks) contents.push_back(content_[static_cast<std::size_t>(block)]);
  return contents;
}

std::vector<SimTransfer*> Simulation::conflicts(const Wish& wish, const After& after) {
  std::vector<SimTransfer*> found;
  for (SimTransfer& other : transfers_) {
    if (!unfinished(other)) continue;
    const bool named = std::ranges::any_of(
        after.transfers, [&](const std::shared_ptr<CopyJob>& job) { return job == other.job; });
    const bool device =
        !named && (wish.restores || other.restores) && share_any(wish.blocks, other.blocks);
    const bool host =
        (wish.restores ? !other.restores : !named) && share_any(wish.slots, other.slots);
    if (device || host) found.push_back(&other);
  }
  return found;
}

template <class Start>
bool Simulation::start(const Wish& wish, const TransferRequest& request, Start&& start) {
  const std::vector<SimTransfer*> in_the_way = conflicts(wish, request.after);
  std::shared_ptr<Transfer> made;
  try {
    made = start();
  } catch (const Busy&) {
    if (std::ranges::none_of(in_the_way, [](SimTransfer* other) { return unfinished(*other); }))
      throw Violation("Busy, and nothing is in the way");
    return false;
  }
  // What was in the way may have ended meanwhile.
  if (std::ranges::any_of(in_the_way, [](SimTransfer* other) { return unfinished(*other); }))
    throw Violation("a transfer was accepted beside one that uses the same blocks");
  accepted(wish, request, std::move(made));
  return true;
}

void Simulation::accepted(const Wish& wish, const TransferRequest& request,
                          std::shared_ptr<Transfer> made) {
  SimTransfer transfer;
  transfer.seq = ++last_seq_;
  transfer.job = made->job();
  transfer.handle = std::move(made);
  transfer.restores = wish.restores;
  transfer.tagged = request.tag.has_value();
  transfer.blocks = wish.blocks;
  transfer.slots = transfer.job->host_slots;
  transfer.contents = wish.contents;
  if (!wish.restores && wish.slots.empty()) expect_slots_were_free(transfer.slots);
  restore_ends_.resize(last_seq_ + 1, TransferState::queued);
  for (std::size_t i = 0; i < transfer.blocks.size(); ++i) {
    if (wish.restores)
      content_[static_cast<std::size_t>(transfer.blocks[i])] = {wish.contents[i].key, transfer.seq};
    else
      slot_keys_[transfer.slots[i]] = 0;
  }
  if (transfer.tagged) unreported_[transfer.job->id] = false;
  ++expected_[wish.restores ? 1 : 0].accepted;
  transfers_.push_back(std::move(transfer));
}

bool Simulation::offload(const Draw& draw) {
  Wish wish;
  wish.blocks = some_blocks(draw, 1 + draw[1] % 3 * (draw[1] >> 8 & 1U));
  if (wish.blocks.empty() || wish.blocks.size() > pool_->capacity() ||
      wish.blocks.size() * block_bytes > shape_.manager.max_queued_bytes)
    return false;
  wish.contents = contents_of(wish.blocks);
  const TransferRequest request = request_for(wish, draw[2]);
  const std::size_t count = wish.blocks.size();
  const bool free = bounds_are_free(count, count, false, request.tag.has_value());
  Admission admission = manager_->admit(TransferKind::offload, request, true);
  const bool had = admission.try_take();
  if (waiting_offloads_.empty() && had != free)
    throw Violation(free ? "an offload was refused that had room" : "an offload overdrew a bound");
  if (!had) return false;
  return start(wish, request, [&] { return manager_->offload(request, std::move(admission)); });
}

bool Simulation::offload_into(const Draw& draw) {
  if (leases_.empty()) return false;
  HostBlocks target = leases_[draw[0] % leases_.size()].share();
  Wish wish;
  wish.blocks = some_blocks(draw, target.size());
  if (wish.blocks.empty() || wish.blocks.size() * block_bytes > shape_.manager.max_queued_bytes)
    return false;
  target = target.share(0, wish.blocks.size());
  wish.slots.assign(target.slots().begin(), target.slots().end());
  wish.contents = contents_of(wish.blocks);
  const TransferRequest request = request_for(wish, draw[2]);
  Admission admission = manager_->admit(TransferKind::offload, request, false);
  if (!admission.try_take()) return false;
  return start(wish, request, [&] {
    return manager_->offload_into(request, std::move(target), std::move(admission));
  });
}

bool Simulation::admit(const Draw& draw) {
  if (!waiting_offloads_.empty()) {
    WaitingOffload& first = waiting_offloads_.front();
    const bool alone = waiting_offloads_.size() == 1 && tickets_.empty();
    const bool room = alone && first.admission.has_room();
    const bool granted = first.admission.granted();
    if (room && !granted) throw Violation("an admission waits for what is free");
    if (!granted && draw[0] % 4 != 0) return false;
    WaitingOffload going = std::move(first);
    waiting_offloads_.erase(waiting_offloads_.begin());
    if (!granted) return true;  // gives its place up
    Wish wish;
    wish.blocks = going.blocks;
    wish.contents = contents_of(wish.blocks);
    // Without its own tag: the place for a report was taken with the admission.
    TransferRequest request = request_for(wish, draw[2] & ~2U);
    if (!going.tagged) request.tag.reset();
    return start(wish, request,
                 [&] { return manager_->offload(request, std::move(going.admission)); });
  }
  Wish wish;
  wish.blocks = some_blocks(draw, 1 + draw[1] % 3);
  if (wish.blocks.empty() || wish.blocks.size() > pool_->capacity() ||
      wish.blocks.size() * block_bytes > shape_.manager.max_queued_bytes)
    return false;
  TransferRequest request;
  request.blocks = wish.blocks;
  const bool tagged = draw[2] % 2 == 0;
  if (tagged) request.tag = Tag(std::int64_t{0});
  Admission admission = manager_->admit(TransferKind::offload, request, true);
  static_cast<void>(admission.granted());  // joins
  waiting_offloads_.push_back({std::move(admission), wish.blocks, tagged});
  return true;
}

bool Simulation::restore(const Draw& draw) {
  if (stored_.empty()) return false;
  const HostCopy& copy = *stored_[draw[1] % stored_.size()];
  const std::size_t count = 1 + draw[2] % copy.size() * (draw[2] >> 24 & 1U);
  Wish wish;
  wish.restores = true;
  wish.blocks = some_blocks(draw, count);
  if (wish.blocks.empty() || wish.blocks.size() * block_bytes > shape_.manager.max_queued_bytes)
    return false;
  const HostCopy piece =
      copy.slice((draw[2] >> 8) % (copy.size() - wish.blocks.size() + 1), wish.blocks.size());
  for (const SlotIndex slot : piece.blocks().slots()) {
    wish.slots.push_back(slot);
    wish.contents.push_back({slot_keys_[slot], 0});
  }
  const TransferRequest request = request_for(wish, draw[3] >> 4);
  const bool free = bounds_are_free(0, wish.blocks.size(), true, request.tag.has_value());
  Admission admission = manager_->admit(TransferKind::restore, request, false);
  const bool had = admission.try_take();
  if (waiting_offloads_.empty() && had != free)
    throw Violation(free ? "a restore was refused that had room" : "a restore overdrew a bound");
  if (!had) return false;
  return start(wish, request,
               [&] { return manager_->restore(request, piece, std::move(admission)); });
}

SimTransfer* Simulation::some_transfer(std::uint32_t draw, bool mostly_unfinished) {
  std::vector<SimTransfer*> able;
  for (SimTransfer& transfer : transfers_) {
    if (!transfer.handle) continue;
    if (!mostly_unfinished || draw % 8 == 0 || unfinished(transfer)) able.push_back(&transfer);
  }
  return able.empty() ? nullptr : able[(draw >> 3) % able.size()];
}

bool Simulation::wait_on(const Draw& draw) {
  SimTransfer* const transfer = some_transfer(draw[0], true);
  if (!transfer) return false;
  // What is staged, or has lost its guard, is submitted only when other copies have ended: behind
  // these the call would wait for ever, as it should.
  if (transfer->job->staged() || faults_planned_ > 0) lift();
  const unsigned stream = draw[1] % 2;
  std::optional<std::int64_t> stage;
  if (draw[2] % 3 == 0) stage = stages[0];
  if (draw[2] % 3 == 1) stage = stages[1];
  const bool all = !transfer->restores || stage != stages[0];
  try {
    transfer->handle->wait_on(streams_[stream].handle(), transfer->restores ? stage : std::nullopt);
  } catch (const Cancelled&) {
    if (!transfer->cancelled) throw Violation("wait_on says cancelled, and nobody cancelled");
    return false;
  } catch (const CopyFailed&) {
    if (transfer->end == TransferState::failed) return false;  // its own error
    throw;
  }
  transfer->waited_stage[stream] = 1;
  if (all) transfer->waited |= 1U << stream;
  return true;
}

bool Simulation::wait(const Draw& draw) {
  SimTransfer* const transfer = some_transfer(draw[0], false);
  if (!transfer) return false;
  TransferState seen = TransferState::done;
  try {
    transfer->handle->wait(1e-6 * (draw[1] % 20));
  } catch (const TimedOut&) {
    return false;
  } catch (const Cancelled&) {
    seen = TransferState::cancelled;
  } catch (const CopyFailed&) {
    seen = TransferState::failed;
  }
  if (transfer->job->state() != seen) throw Violation("wait() and the state differ");
  return true;
}

bool Simulation::cancel(const Draw& draw) {
  SimTransfer* const transfer = some_transfer(draw[0], true);
  if (!transfer) return false;
  const bool open = unfinished(*transfer);
  const CancelOutcome outcome = transfer->handle->cancel();
  if ((outcome == CancelOutcome::already_done) == open)
    throw Violation("cancel() misjudged whether the transfer had ended");
  if (outcome == CancelOutcome::not_submitted &&
      (transfer->job->begun() || transfer->job->state() != TransferState::cancelled))
    throw Violation("not_submitted, and it was, or has not ended");
  transfer->cancelled |= open;
  return open;
}

bool Simulation::drop(const Draw& draw) {
  SimTransfer* const transfer = some_transfer(draw[0], draw[1] % 2 == 0);
  if (!transfer) return false;
  transfer->handle.reset();
  return true;
}

bool Simulation::poll() {
  for (const Report& report : manager_->poll()) {
    const auto known = unreported_.find(report.id);
    if (known == unreported_.end()) throw Violation("a report that nobody waits for");
    if (!is_terminal(report.state)) throw Violation("a report of a transfer that goes on");
    if (report.error.empty() != (report.state != TransferState::failed))
      throw Violation("a report's error and state differ");
    for (const SimTransfer& transfer : transfers_) {
      if (transfer.job->id == report.id && transfer.job->state() != report.state)
        throw Violation("a report's state is not the transfer's");
    }
    unreported_.erase(known);
  }
  return true;
}

// ---- ends ----

void Simulation::note_ends() {
  std::vector<SimTransfer*> now;
  for (SimTransfer& transfer : transfers_) {
    if (transfer.ended) {
      if (transfer.job->state() != transfer.end) throw Violation("a terminal state was left");
      continue;
    }
    if (unfinished(transfer)) continue;
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
  std::erase_if(transfers_,
                [](const SimTransfer& transfer) { return transfer.ended && !transfer.handle; });
}

void Simulation::ended(SimTransfer& transfer) {
  DirectionStats& expected = expected_[transfer.restores ? 1 : 0];
  const auto unreported = unreported_.find(transfer.job->id);  // not if just reported
  if (unreported != unreported_.end()) unreported->second = true;
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
