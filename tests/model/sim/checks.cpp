// The invariants, after every operation.
#include <cstring>
#include <set>

#include "model/sim/simulation.hpp"

namespace kvmem::sim {

void Simulation::check() {
  note_ends();
  note_kernels();
  for (const std::string& violation : violations()) throw Violation(violation);
  check_pool();
  check_tickets();
  check_records();
  const ManagerStats now = manager_->stats();
  check_manager(now);
  check_no_reuse();
  check_order();
  check_windows(now);
  check_wakes();
  checked_at_ = device_->now();
  if (++steps_ % 16 == 0) check_bytes();
}

// What the engine holds, by slot.
std::vector<bool> Simulation::owners() const {
  std::vector<bool> owned(shape_.slots);
  const auto own = [&](std::span<const SlotIndex> slots) {
    for (const SlotIndex slot : slots) owned[slot] = true;
  };
  for (const HostBlocks& lease : leases_) own(lease.slots());
  for (const auto& copy : stored_) own(copy->blocks().slots());
  for (const SimTransfer& transfer : transfers_) {
    if (transfer.restores || !transfer.handle || transfer.cancelled) continue;
    // Once asked for, the result is held by whoever has it, and by the handle, until released.
    const auto result = transfer.result.lock();
    const bool released =
        transfer.ended && (transfer.end != TransferState::done || (result && result->released()));
    if (!released) own(transfer.slots);
  }
  return owned;
}

// What copies hold, by slot.
std::vector<bool> Simulation::copies() const {
  std::vector<bool> held(shape_.slots);
  for (const SimTransfer& transfer : transfers_) {
    if (transfer.ended) continue;
    for (const SlotIndex slot : transfer.slots) held[slot] = true;
  }
  for (const Releasing& releasing : releasing_) {
    for (const SlotIndex slot : releasing.slots) held[slot] = true;
  }
  return held;
}

void Simulation::check_pool() {
  // Slots let go as of points that the device has reached are home once somebody has looked.
  without_faults([&] {
    const auto reached = [](const Releasing& releasing) {
      return std::ranges::all_of(releasing.until, [](const std::shared_ptr<Event>& event) {
        return event->query() == EventState::done;
      });
    };
    if (std::ranges::any_of(releasing_, reached)) {
      runtime_->advance();
      std::erase_if(releasing_, reached);
    }
  });
  note_ends();  // that look may have ended transfers
  pool_->check();
  const std::vector<bool> owned = owners(), copied = copies();
  SlotCounts expected;
  expected.capacity = static_cast<std::uint32_t>(shape_.slots);
  for (std::size_t slot = 0; slot < shape_.slots; ++slot) {
    ++(owned[slot] ? expected.held : copied[slot] ? expected.quarantined : expected.free);
  }
  // What was granted and not yet taken is free in the table; what a waiting offload has is held.
  const PoolStats now = pool_->stats();
  expect(now.peak_held >= std::max(now.slots.held, pool_seen_.peak_held) &&
             now.peak_quarantined >= std::max(now.slots.quarantined, pool_seen_.peak_quarantined),
         "a peak of the pool is not the highest");
  pool_seen_ = now;
  if (!waiting_offloads_.empty()) {
    expect(now.slots.quarantined == expected.quarantined, "quarantined: ", now.slots.quarantined,
           ", expected ", expected.quarantined);
    return;
  }
  expect(now.slots == expected, "slots are free ", now.slots.free, " held ", now.slots.held,
         " quarantined ", now.slots.quarantined, " poisoned ", now.slots.poisoned,
         ", expected free ", expected.free, " held ", expected.held, " quarantined ",
         expected.quarantined, " poisoned 0");
}

std::size_t Simulation::granted_slots() const {
  std::size_t granted = 0;
  for (const WaitingTicket& waiting : tickets_) {
    if (waiting.ticket.granted()) granted += waiting.wanted;
  }
  return granted;
}

bool Simulation::bounds_are_free(std::size_t slots, std::size_t blocks, bool restores,
                                 bool tagged) const {
  const PoolStats pool = pool_->stats();
  if (slots > 0 && (pool.waiters > 0 || pool.slots.free < granted_slots() + slots)) return false;
  if (blocks == 0) return true;
  std::size_t bytes = 0, count = 0;
  for (const SimTransfer& transfer : transfers_) {
    if (transfer.ended || transfer.restores != restores) continue;
    bytes += transfer.blocks.size() * block_bytes;
    ++count;
  }
  return bytes + blocks * block_bytes <= shape_.manager.max_queued_bytes &&
         count < shape_.manager.max_transfers &&
         (!tagged || unreported_.size() < shape_.manager.max_reports);
}

// First come, first served, and nobody is forgotten.
void Simulation::check_tickets() {
  bool waits = false;
  for (const WaitingTicket& waiting : tickets_) {
    const bool granted = waiting.ticket.granted();
    expect(!granted || !waits, "a ticket was overtaken");
    if (!granted && !waits && waiting_offloads_.empty()) {
      expect(pool_->stats().slots.free < granted_slots() + waiting.wanted,
             "a ticket waits for what is free");
    }
    waits |= !granted;
  }
  if (!waiting_offloads_.empty()) return;
  const std::size_t waiters = static_cast<std::size_t>(std::ranges::count_if(
      tickets_, [](const WaitingTicket& waiting) { return !waiting.ticket.granted(); }));
  const PoolStats now = pool_->stats();
  expect(now.waiters == waiters, "the pool has ", now.waiters, " waiters, expected ", waiters);
  const Shortage shortage = pool_->shortage(1);
  expect(shortage.free + granted_slots() == now.slots.free && shortage.largest == shape_.slots,
         "a shortage names ", shortage.free, " free, ", shortage.largest, " the largest");
}

void Simulation::check_manager(const ManagerStats& now) {
  std::set<BlockId> busy, written;
  std::array<std::size_t, 2> bytes{}, active{};
  for (const SimTransfer& transfer : transfers_) {
    if (transfer.ended) continue;
    bytes[transfer.restores] += transfer.blocks.size() * block_bytes;
    ++active[transfer.restores];
    busy.insert(transfer.blocks.begin(), transfer.blocks.end());
    if (transfer.restores) written.insert(transfer.blocks.begin(), transfer.blocks.end());
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const DirectionStats& one = now.directions[i];
    const DirectionStats& expected = expected_[i];
    expect(one.accepted == expected.accepted && one.done == expected.done &&
               one.failed == expected.failed && one.cancelled == expected.cancelled,
           "direction ", i, " counts accepted ", one.accepted, " done ", one.done, " failed ",
           one.failed, " cancelled ", one.cancelled, ", expected ", expected.accepted, " ",
           expected.done, " ", expected.failed, " ", expected.cancelled);
    expect(one.blocks_done == expected.blocks_done && one.bytes_done == expected.bytes_done &&
               one.bytes_staged == expected.bytes_staged,
           "direction ", i, " counts other blocks or bytes");
    expect(one.queue_delay_total_us == expected.queue_delay_total_us &&
               one.queue_delay_max_us == expected.queue_delay_max_us &&
               one.guard_wait_total_us == expected.guard_wait_total_us,
           "direction ", i, " adds up other delays");
    expect(one.active == active[i], "direction ", i, " has ", one.active, " active, expected ",
           active[i]);
    if (i == 1 || waiting_offloads_.empty())
      expect(one.queued_bytes == bytes[i], "direction ", i, " has ", one.queued_bytes,
             " bytes queued, expected ", bytes[i]);
  }
  expect(now.restoration_slots == written.size(), now.restoration_slots,
         " restoration slots, expected ", written.size());
  const auto ended = static_cast<std::size_t>(
      std::ranges::count_if(unreported_, [](const auto& entry) { return entry.second.ended; }));
  expect(now.reports_waiting == ended, now.reports_waiting, " reports wait, expected ", ended);
  expect(!waiting_offloads_.empty() || now.waiters == 0, "somebody waits for a bound");
  if (waiting_offloads_.empty())
    expect(now.reports_taken == unreported_.size(), now.reports_taken,
           " report places taken, expected ", unreported_.size());
  const std::vector<BlockId> used = manager_->busy(all_blocks_);
  expect(std::ranges::equal(used, busy), "busy() names ", used.size(), " blocks, expected ",
         busy.size());
}

// Nothing that could be handed out may still be touched, on either side.
void Simulation::check_no_reuse() {
  const std::vector<bool> owned = owners(), copied = copies();
  for (std::size_t slot = 0; slot < shape_.slots; ++slot) {
    if (owned[slot] || copied[slot]) continue;
    expect(!device_->may_touch(pool_->data() + slot * pool_->slot_bytes(), block_bytes), "slot ",
           slot, " is free, and a copy may still touch it");
  }
  for (const BlockId block : all_blocks_) {
    const bool used =
        std::ranges::any_of(transfers_,
                            [&](const SimTransfer& t) { return !t.ended && t.touches(block); }) ||
        std::ranges::any_of(kernels_, [&](const auto& kernel) { return kernel->block == block; });
    for (std::size_t r = 0; r < regions && !used; ++r) {
      expect(!device_->may_touch(cache_->segment(block, r), payloads[r]), "device block ", block,
             " is not busy, and a copy may still touch it");
    }
  }
}

void Simulation::check_bytes() {
  const auto look = [&](const HostBlocks& blocks) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      expect_bytes(blocks.data(i), slot_keys_[blocks.slots()[i]], "a held slot");
    }
  };
  for (const HostBlocks& lease : leases_) look(lease);
  for (const auto& copy : stored_) look(copy->blocks());
  expect(cache_->gaps_are_untouched(), "the gaps of the device cache were written");
}

void Simulation::expect_slots_were_free(std::span<const SlotIndex> slots) {
  const std::vector<bool> owned = owners(), copied = copies();
  for (const SlotIndex slot : slots) {
    expect(!owned[slot], "slot ", slot, " was handed out, and it is held");
    // Its transfer may have ended in this very call.
    expect(!copied[slot] ||
               !device_->may_touch(pool_->data() + slot * pool_->slot_bytes(), block_bytes),
           "slot ", slot, " was handed out under a copy");
  }
}

void Simulation::expect_bytes(const std::byte* at, Key key, const char* what) {
  if (key == 0) return;
  ++tally_.blocks_compared;
  expect(std::memcmp(at, bytes_.at(key).data(), block_bytes) == 0, what, " holds wrong bytes");
}

}  // namespace kvmem::sim
