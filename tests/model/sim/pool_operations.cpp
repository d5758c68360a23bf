// Operations on the pool: acquire, wait, share, release.
#include <cstring>

#include "model/sim/simulation.hpp"

namespace kvmem::sim {

namespace {
constexpr std::size_t most_leases = 6, most_tickets = 3;
}

bool Simulation::acquire(const Draw& draw) {
  if (leases_.size() == most_leases) return false;
  const std::size_t count = 1 + draw[0] % std::min<std::size_t>(pool_->capacity(), 3);
  const bool free = bounds_are_free(count, 0, false, false);
  const PoolStats before = pool_->stats();
  auto blocks = pool_->try_acquire(count);
  const PoolStats after = pool_->stats();
  expect(after.acquired - before.acquired == (blocks ? count : 0) &&
             after.refused - before.refused == (blocks ? 0 : 1),
         "try_acquire is counted as another");
  if (waiting_offloads_.empty() && blocks.has_value() != free)
    throw Violation(free ? "try_acquire refused free slots" : "try_acquire overtook or overdrew");
  if (!blocks) return false;
  leased(std::move(*blocks));
  return true;
}

void Simulation::leased(HostBlocks blocks) {
  expect_slots_were_free(blocks.slots());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const BlockBytes bytes = fresh_bytes();
    std::memcpy(blocks.data(i), bytes.data(), block_bytes);
    slot_keys_[blocks.slots()[i]] = new_key(bytes);
  }
  leases_.push_back(std::move(blocks));
}

bool Simulation::ticket(const Draw& draw) {
  if (!tickets_.empty() && tickets_.front().ticket.granted() && draw[0] % 2 == 0 &&
      leases_.size() < most_leases) {
    const std::uint64_t before = pool_->stats().acquired;
    HostBlocks blocks = tickets_.front().ticket.take();
    if (blocks.size() != tickets_.front().wanted) throw Violation("a ticket gave another count");
    expect(pool_->stats().acquired - before == blocks.size(), "a ticket is counted as another");
    wakes_.forget(tickets_.front().token);
    tickets_.pop_front();
    leased(std::move(blocks));
    return true;
  }
  if (!tickets_.empty() && (tickets_.size() == most_tickets || draw[0] % 3 != 0)) {
    const auto place =
        std::next(tickets_.begin(), static_cast<std::ptrdiff_t>(draw[1] % tickets_.size()));
    wakes_.forget(place->token);
    tickets_.erase(place);
    return true;
  }
  // Now and then more than there is.
  const std::size_t wanted = 1 + draw[2] % (draw[3] % 8 == 0 ? pool_->capacity() + 1 : 3);
  const std::uint64_t token = wakes_.ask();
  try {
    tickets_.push_back({pool_->enqueue(wanted, Waker(wakes_.list(), token)), wanted, token});
  } catch (const CapacityError&) {
    wakes_.forget(token);
    if (wanted <= pool_->capacity()) throw Violation("a ticket that could be served was refused");
    return false;
  }
  if (wanted > pool_->capacity()) throw Violation("a ticket was taken that can never be served");
  return true;
}

bool Simulation::share(const Draw& draw) {
  if (draw[0] % 2 == 0 && !leases_.empty() && leases_.size() < most_leases) {
    const HostBlocks& one = leases_[draw[1] % leases_.size()];
    const std::size_t first = draw[2] % one.size();
    const std::size_t count = 1 + draw[3] % (one.size() - first);
    HostBlocks shared = one.share(first, count);
    expect(std::ranges::equal(shared.slots(), one.slots().subspan(first, count)),
           "a share names other slots");
    leases_.push_back(std::move(shared));
    return true;
  }
  if (stored_.empty() || stored_.size() >= most_stored) return false;
  const HostCopy& one = *stored_[draw[1] % stored_.size()];
  const std::size_t first = draw[2] % one.size();
  const std::size_t count = 1 + draw[3] % (one.size() - first);
  auto slice = std::make_shared<HostCopy>(one.slice(first, count));
  expect(std::ranges::equal(slice->blocks().slots(), one.blocks().slots().subspan(first, count)),
         "a slice names other slots");
  stored_.push_back(std::move(slice));
  return true;
}

bool Simulation::release(const Draw& draw) {
  const std::size_t all = leases_.size() + stored_.size();
  if (all < 3) return false;
  const std::size_t chosen = draw[0] % all;
  const bool lease = chosen < leases_.size();
  const std::size_t place = lease ? chosen : chosen - leases_.size();
  const HostBlocks& blocks = lease ? leases_[place] : stored_[place]->blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    expect_bytes(blocks.data(i), slot_keys_[blocks.slots()[i]], "a held slot");
  }
  if (lease) {
    leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(place));
    return true;
  }
  // Said aloud, or by dropping the last reference.
  if (draw[1] % 2 == 0) stored_[place]->release();
  stored_.erase(stored_.begin() + static_cast<std::ptrdiff_t>(place));
  return true;
}

bool Simulation::release_after(const Draw& draw) {
  if (leases_.empty()) return false;
  const std::size_t place = draw[0] % leases_.size();
  HostBlocks& blocks = leases_[place];
  std::vector<Runtime::Mark> marks;
  Event foreign;
  for (unsigned stream = 0; stream < 2; ++stream) {
    if ((draw[1] >> stream) % 2 == 0) continue;
    if (draw[2] % 2 == 0) {
      marks.push_back(runtime_->mark_stream(streams_[stream].handle()));
      continue;
    }
    without_faults([&] {
      foreign = engine_events_->acquire();
      foreign.record(streams_[stream].handle());
    });
    marks.push_back(runtime_->mark_event(foreign.handle()));
    // What happens to the event later changes nothing.
    if (draw[3] % 2 == 0) without_faults([&] { foreign.record(streams_[1 - stream].handle()); });
  }
  Releasing releasing{{blocks.slots().begin(), blocks.slots().end()}, {}};
  for (const Runtime::Mark& mark : marks) {
    if (mark.event) releasing.until.push_back(mark.event);
  }
  runtime_->release_after(blocks, marks);
  expect(blocks.empty(), "release_after() left the blocks with their owner");
  leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(place));
  if (!releasing.until.empty()) releasing_.push_back(std::move(releasing));
  return true;
}

}  // namespace kvmem::sim
