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
  for (SimTransfer& other : transfers_) {  // a demand transfer is not to wait for them
    const bool named =
        std::ranges::find(request.after.transfers, other.job) != request.after.transfers.end();
    if (named && request.priority == Priority::demand) hurry(other);
  }
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
  transfer.requested = wish.requested.value_or(device_->now());
  transfer.after.assign(request.after.events.begin(), request.after.events.end());
  for (const SimTransfer& other : transfers_) {
    const bool named =
        std::ranges::find(request.after.transfers, other.job) != request.after.transfers.end();
    if (named) transfer.behind.push_back(other.seq);
  }
  transfer.ready = transfer.born_ready = may_run(transfer);
  if (last_seq_ % 2 == 0) {
    transfer.token = wakes_.ask();
    transfer.handle->wake(wakes_.list(), transfer.token);
  }
  if (transfer.tagged)
    unreported_.emplace(transfer.job->id, Unreported{transfer.seq, transfer.job->kind});
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
    const bool granted = first.granted;
    if (room && !granted) throw Violation("an admission waits for what is free");
    if (!granted && draw[0] % 4 != 0) return false;
    WaitingOffload going = std::move(first);
    wakes_.forget(going.token);
    waiting_offloads_.erase(waiting_offloads_.begin());
    if (!granted) return true;  // gives its place up
    Wish wish;
    wish.blocks = going.blocks;
    wish.contents = contents_of(wish.blocks);
    wish.requested = going.requested;
    // Without its own tag: the place for a report was taken with the admission.
    TransferRequest request = request_for(wish, draw[2] & ~2U);
    if (!going.tagged) request.tag.reset();
    return start(wish, request,
                 [&] { return manager_->offload(request, std::move(going.admission)); });
  }
  // Seldom, for who waits makes the checks on bounds weaker.
  if (draw[3] % 3 != 0) return false;
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
  const std::uint64_t token = wakes_.ask();
  const bool granted = admission.granted(wakes_.list(), token);  // joins
  waiting_offloads_.push_back(
      {std::move(admission), wish.blocks, tagged, device_->now(), token, granted});
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
  if (transfer->job->staged() || faults_planned_ > 0) lift_what_blocks();
  const unsigned stream = draw[1] % 2;
  std::optional<std::int64_t> stage;
  if (draw[2] % 3 == 0) stage = stages[0];
  if (draw[2] % 3 == 1) stage = stages[1];
  const bool all = !transfer->restores || stage != stages[0];
  hurry(*transfer);
  const std::uint64_t faults = device_->faults();
  try {
    transfer->handle->wait_on(streams_[stream].handle(), transfer->restores ? stage : std::nullopt);
  } catch (const Cancelled&) {
    if (!transfer->cancelled) throw Violation("wait_on says cancelled, and nobody cancelled");
    return false;
  } catch (const CopyFailed&) {
    if (transfer->end == TransferState::failed) return false;  // its own error
    throw;
  }
  const bool surely = device_->faults() == faults;
  if (shape_.manager.timeline) used_.emplace(transfer->job->id, Used{all && surely, surely});
  transfer->waited_stage[stream] = 1;
  if (all) transfer->waited |= 1U << stream;
  return true;
}

bool Simulation::wait(const Draw& draw) {
  SimTransfer* const transfer = some_transfer(draw[0], false);
  if (!transfer) return false;
  if (draw[2] % 4 == 0 && transfer->token != 0) {
    transfer->handle->unwake(wakes_.list(), transfer->token);
    wakes_.forget(std::exchange(transfer->token, 0));
  } else if (transfer->token == 0) {
    transfer->token = wakes_.ask();
    transfer->handle->wake(wakes_.list(), transfer->token);
  }
  TransferState seen = TransferState::done;
  const Nanoseconds begun = device_->now();
  const unsigned microseconds = draw[1] % 20;
  try {
    transfer->handle->wait(1e-6 * microseconds);
  } catch (const TimedOut&) {
    const Nanoseconds waited = device_->now() - begun, asked = 1000 * Nanoseconds{microseconds};
    expect(waited >= asked - 1 && waited <= asked, "wait() gave up after ", waited, " of ", asked);
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
  const std::vector<Report> reports = manager_->poll();
  expect_submitted();
  for (const Report& report : reports) {
    const auto known = unreported_.find(report.id);
    if (known == unreported_.end()) throw Violation("a report that nobody waits for");
    if (report.tag != Tag(static_cast<std::int64_t>(known->second.seq)) ||
        report.kind != known->second.kind)
      throw Violation("a report with another tag or kind");
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

}  // namespace kvmem::sim
