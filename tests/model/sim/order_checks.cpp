// What the queue may do: who goes before whom, how much the device is given, and whom it wakes.
#include "copy/copy_queue.hpp"
#include "model/sim/simulation.hpp"

namespace kvmem::sim {

// Whether an event is pending that it runs behind.
bool Simulation::must_wait(const SimTransfer& transfer) {
  return without_faults([&] {
    return std::ranges::any_of(transfer.after, [](const std::weak_ptr<Event>& event) {
      const auto alive = event.lock();
      return alive != nullptr && alive->query() != EventState::done;
    });
  });
}

// Whether nothing is pending that it runs behind.
bool Simulation::may_run(const SimTransfer& transfer) {
  const bool behind = std::ranges::any_of(transfers_, [&](const SimTransfer& other) {
    return !is_terminal(other.job->state()) &&
           std::ranges::find(transfer.behind, other.seq) != transfer.behind.end();
  });
  return !behind && !must_wait(transfer);
}

void Simulation::hurry(SimTransfer& transfer) {
  if (std::exchange(transfer.hurried, true)) return;
  for (SimTransfer& other : transfers_) {
    if (std::ranges::find(transfer.behind, other.seq) != transfer.behind.end()) hurry(other);
  }
}

// A transfer that has just begun went before no other one that could have gone: of a higher class,
// or earlier in lane 0. The urgent may, and after a query that failed the queue knows less.
void Simulation::check_order() {
  for (const SimTransfer& late : transfers_) {
    const bool begins = !late.begun && late.job->begun();
    if (!begins || !late.ready || late.hurried || faults_planned_ > 0) continue;
    for (const SimTransfer& other : transfers_) {
      const bool could_go = &other != &late && other.restores == late.restores && other.ready &&
                            !other.ended && !other.job->all_submitted();
      if (!could_go) continue;
      const Priority one = late.job->priority(), another = other.job->priority();
      expect(another >= one, "a background transfer went before a demand one that was ready");
      expect(another > one || other.seq > late.seq || !other.born_ready || !late.born_ready,
             "a transfer was overtaken in lane 0");
    }
  }
  for (SimTransfer& transfer : transfers_) {
    transfer.ready = transfer.ready || transfer.ended || may_run(transfer);
    const bool begins = !transfer.begun && transfer.job->begun();
    transfer.alone |= begins && !transfer.ready && must_wait(transfer);
    transfer.begun |= begins;
  }
}

// What the device was given, and what it was not.
void Simulation::check_windows(const ManagerStats& now) {
  const std::size_t window = shape_.manager.window_descriptors;
  for (std::size_t i = 0; i < 2; ++i) {
    std::size_t unready = 0, alone = 0, waiting = 0;
    bool hurried = false;
    for (const SimTransfer& transfer : transfers_) {
      if (transfer.ended || transfer.restores != (i == 1)) continue;
      alone += transfer.alone ? 1U : 0U;
      unready += transfer.born_ready ? 0U : 1U;
      waiting += transfer.job->all_submitted() ? 0U : 1U;
      hurried |= transfer.hurried;
    }
    const DirectionStats& one = now.directions[i];
    expect(one.waiting >= waiting, "fewer transfers wait than are not wholly submitted");
    if (faults_planned_ > 0) continue;
    // What is staged never waits on the device.
    const std::size_t lanes = is_staged() ? 0 : unready;
    expect(one.lanes_owned >= alone && one.lanes_owned <= lanes, one.lanes_owned,
           " lanes are owned, expected ", alone, " to ", lanes);
    const std::size_t most =
        std::max<std::size_t>(window / 2, 1) +
        unready * std::max<std::size_t>(window / (2 * (CopyQueue::lanes - 1)), 1);
    expect(hurried || !shape_.manager.reaper || one.window_descriptors <= most, "direction ", i,
           " has ", one.window_descriptors, " descriptors on the device, at most ", most);
  }
}

// Behind a call that submits. With nothing on the device, nothing that can go stays behind; and
// where there is no window, only what waits for a lane or for another one's submission.
void Simulation::expect_submitted() {
  if (faults_planned_ > 0 || device_->lost()) return;
  const ManagerStats now = manager_->stats();
  const bool eager = !shape_.manager.reaper && !is_staged();
  for (const SimTransfer& transfer : transfers_) {
    if (transfer.job->all_submitted()) continue;
    const DirectionStats& one = now.directions[transfer.restores ? 1 : 0];
    expect(one.window_descriptors > 0 || !may_run(transfer),
           "a transfer stays behind, and nothing is on the device");
    const bool behind = std::ranges::any_of(transfers_, [&](const SimTransfer& other) {
      return !other.job->all_submitted() &&
             std::ranges::find(transfer.behind, other.seq) != transfer.behind.end();
    });
    expect(!eager || behind || one.lanes_owned + 1 >= CopyQueue::lanes,
           "a transfer stays behind, and a lane is free");
  }
}

// Each is woken once by what it waits for, and by nothing else.
void Simulation::check_wakes() {
  wakes_.look();
  for (const SimTransfer& transfer : transfers_) {
    expect(transfer.token == 0 || wakes_.told(transfer.token) == (transfer.ended ? 1U : 0U),
           "who waits for an end is not woken once");
  }
  for (const WaitingTicket& waiting : tickets_) {
    expect(wakes_.told(waiting.token) == (waiting.ticket.granted() ? 1U : 0U),
           "who waits for slots is not woken once");
  }
  for (WaitingOffload& waiting : waiting_offloads_) {
    if (waiting.granted) continue;
    const bool told = wakes_.take(waiting.token) > 0;
    waiting.granted = waiting.admission.granted(wakes_.list(), waiting.token);
    expect(told || !waiting.granted, "an admission has all that it waits for, and nobody was told");
  }
  const auto ungranted = [](const auto& waiting) { return !waiting.granted; };
  const auto waiters = static_cast<std::size_t>(
      std::ranges::count_if(
          tickets_, [](const WaitingTicket& waiting) { return !waiting.ticket.granted(); }) +
      std::ranges::count_if(waiting_offloads_, ungranted));
  if (waiters > 0)
    expect(pool_->stats().waiters + manager_->stats().waiters == waiters, "not ", waiters,
           " waiters are counted");
}

}  // namespace kvmem::sim
