#include "cache/pending_store.hpp"

#include <utility>

#include "cache/store_turns.hpp"

namespace kvmem {

std::shared_ptr<Ticket> StoreTurns::enqueue(Waker waker) {
  std::shared_ptr<Ticket> ticket;
  {
    const std::lock_guard lock(mutex_);
    ticket = queue_.enqueue(1);
    if (ticket->state == Ticket::State::waiting) ticket->waker = std::move(waker);
    ++waiting_;
  }
  progress_->bump();  // a reaper that sleeps soundly is to look again and again
  return ticket;
}

bool StoreTurns::may_ask(const Ticket& ticket, Waker again) {
  const std::lock_guard lock(mutex_);
  if (ticket.state == Ticket::State::waiting) return false;
  if (ticket.state == Ticket::State::granted) again_ = std::move(again);
  return true;
}

void StoreTurns::leave(const std::shared_ptr<Ticket>& ticket) noexcept {
  Waker mine;  // ends behind the lock
  {
    const std::lock_guard lock(mutex_);
    if (ticket->state == Ticket::State::granted) std::swap(mine, again_);
    queue_.abandon(ticket);
    --waiting_;
  }
  progress_->bump_for_waiters();  // it may be another one's turn
}

void StoreTurns::tell() noexcept {
  if (waiting() == 0) return;
  const std::lock_guard lock(mutex_);
  again_.fire();
}

void StoreTurns::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    queue_.close();
    again_.fire();
  }
  progress_->bump_for_waiters();
}

PendingStore::PendingStore(std::shared_ptr<Cache> cache, Cache::Request request,
                           Cache::Blocks blocks)
    : cache_(std::move(cache)), request_(std::move(request)), blocks_(std::move(blocks)) {}

bool PendingStore::accepted(const std::shared_ptr<WakeList>& list, std::uint64_t token) {
  if (transfer_) return true;
  StoreTurns& turns = cache_->store_turns_;
  if (!place_) {
    if (ask(false)) return true;
    place_ = turns.enqueue(Waker(list, token));
  }
  // What moves while it asks is told.
  return turns.may_ask(*place_, Waker(list, token)) && ask(true);
}

bool PendingStore::ask(bool has_turn) {
  transfer_ = cache_->store_some(request_, blocks_, admitted_, has_turn);
  if (!transfer_) return false;
  leave();
  return true;
}

void PendingStore::leave() noexcept {
  if (const auto place = std::exchange(place_, nullptr); place && !cache_->mark_.must_leak())
    cache_->store_turns_.leave(place);
}

}  // namespace kvmem
