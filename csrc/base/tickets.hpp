// A bounded amount with a FIFO of those who wait for it. Blocking and awaiting are two ways to
// sleep on a ticket.
//
// Not thread-safe: the owner's lock guards it, so that a grant and the owner's own bookkeeping are
// one step, and so that a test can find a lost waiter without threads. Nobody overtakes: while a
// ticket waits, try_take() refuses. Giving back never allocates and never blocks; it may be done in
// a destructor.
#pragma once

#include <cstdint>
#include <list>
#include <memory>

#include "base/check.hpp"
#include "base/waker.hpp"

namespace kvmem {

struct Ticket {
  enum class State : std::uint8_t { waiting, granted, closed };
  std::uint64_t wanted = 0;
  State state = State::waiting;
  Waker waker;
};

class TicketQueue {
 public:
  explicit TicketQueue(std::uint64_t bound) : bound_(bound), free_(bound) {}

  [[nodiscard]] std::uint64_t bound() const noexcept { return bound_; }
  [[nodiscard]] std::uint64_t free() const noexcept { return free_; }
  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }

  [[nodiscard]] bool try_take(std::uint64_t amount) noexcept {
    if (!waiting_.empty() || amount > free_) return false;
    free_ -= amount;
    return true;
  }

  // The ticket may be granted at once; `amount` must not exceed the bound.
  [[nodiscard]] std::shared_ptr<Ticket> enqueue(std::uint64_t amount, Waker waker = {}) {
    KVMEM_INVARIANT(amount <= bound_);
    auto ticket = std::make_shared<Ticket>();
    ticket->wanted = amount;
    if (try_take(amount)) {
      ticket->state = Ticket::State::granted;
      waker.fire();
    } else {
      ticket->waker = std::move(waker);
      waiting_.push_back(ticket);
    }
    return ticket;
  }

  void give_back(std::uint64_t amount) noexcept {
    free_ += amount;
    KVMEM_INVARIANT(free_ <= bound_);
    if (!waiting_.empty()) grant();
  }

  // An amount that was taken will never come back. Whoever waits for more than the new bound is
  // told by `closed`.
  void lose(std::uint64_t amount) noexcept {
    KVMEM_INVARIANT(amount <= bound_ - free_);
    bound_ -= amount;
    waiting_.remove_if([this](const std::shared_ptr<Ticket>& ticket) {
      if (ticket->wanted <= bound_) return false;
      ticket->state = Ticket::State::closed;
      ticket->waker.fire();
      return true;
    });
    grant();
  }

  // The waiter is gone: a granted amount goes back, a waiting ticket stops blocking those behind
  // it.
  void abandon(const std::shared_ptr<Ticket>& ticket) noexcept {
    if (ticket->state == Ticket::State::granted) {
      ticket->state = Ticket::State::closed;
      give_back(ticket->wanted);
    } else if (ticket->state == Ticket::State::waiting) {
      ticket->state = Ticket::State::closed;
      waiting_.remove(ticket);
      grant();
    }
  }

  // Nothing more will be granted; every waiter is told.
  void close() noexcept {
    for (auto& ticket : waiting_) {
      ticket->state = Ticket::State::closed;
      ticket->waker.fire();
    }
    waiting_.clear();
  }

 private:
  [[gnu::noinline]] void grant() noexcept {  // seldom needed: kept out of give_back()
    while (!waiting_.empty() && waiting_.front()->wanted <= free_) {
      const auto ticket = std::move(waiting_.front());
      waiting_.pop_front();
      free_ -= ticket->wanted;
      ticket->state = Ticket::State::granted;
      ticket->waker.fire();
    }
  }

  std::uint64_t bound_;
  std::uint64_t free_;
  std::list<std::shared_ptr<Ticket>> waiting_;
};

}  // namespace kvmem
