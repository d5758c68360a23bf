// A device that is lost, and who must be told of it.
#include "model/sim/simulation.hpp"

namespace kvmem::sim {

// Who waits for more than poison leaves is told so, and stops blocking those behind.
void Simulation::expect_waiters_told_of_poison() {
  const Shortage shortage = pool_->shortage(1);
  const PoolStats now = pool_->stats();
  expect(shortage.largest == now.slots.capacity - now.slots.poisoned,
         "the pool can give other than what is not poisoned");
  wakes_.look();
  bool waits = false;
  for (const WaitingTicket& waiting : tickets_) {
    bool granted = false, hopeless = false;
    try {
      granted = waiting.ticket.granted();
    } catch (const CapacityError&) {
      hopeless = true;
    }
    expect(granted || hopeless == (waiting.wanted > shortage.largest),
           "a ticket is told wrongly whether it can be served");
    expect(wakes_.told(waiting.token) == (granted || hopeless ? 1U : 0U),
           "who waits is not told of poison");
    const bool still = !granted && !hopeless;
    expect(!still || waits || shortage.free < waiting.wanted, "a ticket waits for what is free");
    waits |= still;
  }
}

void Simulation::close_pool() {
  const auto all = static_cast<std::size_t>(pool_->shortage(1).largest);
  if (all == 0) return;
  const PoolTicket first = pool_->enqueue(all);
  const std::uint64_t token = wakes_.ask();
  const PoolTicket behind = pool_->enqueue(1, Waker(wakes_.list(), token));
  pool_->close();
  expect_throw<Closed>("a ticket of a closed pool", [&] { static_cast<void>(behind.granted()); });
  expect_throw<Closed>("a closed pool", [&] { static_cast<void>(pool_->try_acquire(1)); });
  expect(wakes_.take(token) == 1, "a waiter is not told that its pool was closed");
}

// Slots that copies, or streams that the engine named, have not left yet. Of a device that is lost
// already, only the copies tell.
std::set<SlotIndex> Simulation::pending_slots() {
  std::set<SlotIndex> pending;
  for (SlotIndex slot = 0; slot < shape_.slots; ++slot) {
    if (device_->may_touch(pool_->data() + slot * pool_->slot_bytes(), block_bytes))
      pending.insert(slot);
  }
  if (device_->lost()) return pending;
  without_faults([&] {
    for (const Releasing& releasing : releasing_) {
      const bool reached = std::ranges::all_of(
          releasing.until, [](const auto& event) { return event->query() == EventState::done; });
      if (!reached) pending.insert(releasing.slots.begin(), releasing.slots.end());
    }
  });
  return pending;
}

// What was in flight is poisoned, what was observed complete stays readable, what comes later is
// refused.
void Simulation::lose_device(const Draw& draw) {
  waiting_offloads_.clear();
  const std::set<SlotIndex> pending = pending_slots();
  const bool within_a_call = device_->lost();  // and there some have ended, and are forgotten
  device_->lose();
  std::set<SlotIndex> touched;
  for (const SimTransfer& transfer : transfers_) {
    if (!transfer.ended) touched.insert(transfer.slots.begin(), transfer.slots.end());
  }
  for (const Releasing& releasing : releasing_)
    touched.insert(releasing.slots.begin(), releasing.slots.end());
  for (int i = 0; i < 8; ++i) {
    if (draw[0] % 2 == 0) device_->step();  // a lost device may go on writing
    static_cast<void>(poll());
  }
  note_ends();
  for (const SimTransfer& transfer : transfers_) {
    if (!transfer.ended) throw Violation("a transfer goes on after its device was lost");
  }
  if (!unreported_.empty())
    throw Violation("a tagged transfer of a lost device was never reported");
  const SlotCounts slots = pool_->stats().slots;
  if (slots.poisoned > touched.size() && !within_a_call)
    throw Violation("slots are poisoned that no copy touched");
  if (slots.poisoned < pending.size()) throw Violation("slots under a copy are not poisoned");
  if (slots.quarantined > 0) throw Violation("a lost device leaves slots in quarantine");
  if (slots.free + slots.held + slots.poisoned != slots.capacity)
    throw Violation("slots are missing after the device was lost");
  expect_waiters_told_of_poison();
  tickets_.clear();
  if (slots.free > 0) {
    const auto free = pool_->try_acquire(slots.free);
    for (std::size_t i = 0; i < slots.free; ++i) {
      if (device_->may_touch(free.value().data(i), block_bytes))
        throw Violation("a slot is free that a lost device may still touch");
    }
  }
  for (const auto& copy : stored_) {
    for (std::size_t i = 0; i < copy->size(); ++i) {
      expect_bytes(copy->blocks().data(i), slot_keys_[copy->blocks().slots()[i]],
                   "a copy made before the device was lost");
    }
  }
  Wish wish;
  wish.blocks = {0};
  TransferRequest request;
  request.blocks = wish.blocks;
  try {
    Admission admission = manager_->admit(TransferKind::offload, request, true);
    if (admission.try_take()) {
      const auto transfer = manager_->offload(request, std::move(admission));
      for (int i = 0; i < 4; ++i) static_cast<void>(manager_->poll());
      expect_throw<DeviceLost>("a transfer on a lost device", [&] { transfer->wait(1e-3); });
    }
  } catch (const DeviceLost&) {
  }
}

bool Simulation::lose(const Draw& draw) {
  lose_device(draw);
  close_pool();
  tear_down();
  ++shape_.device.seed;
  open();
  return true;
}

}  // namespace kvmem::sim
