#include "offload/admission.hpp"

#include <algorithm>

namespace kvmem {

bool Bound::try_take(std::uint64_t amount) {
  const std::lock_guard lock(mutex_);
  return queue_.try_take(amount);
}

std::shared_ptr<Ticket> Bound::enqueue(std::uint64_t amount, Waker waker) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Closed("the manager is closed");
  return queue_.enqueue(amount, std::move(waker));
}

void Bound::expect_open() const {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Closed("the manager was closed while the call waited");
}

void Bound::watch(std::shared_ptr<WakeList> list, std::uint64_t token) {
  Waker waker(std::move(list), token);
  const std::lock_guard lock(mutex_);
  if (closed_) throw Closed("the manager was closed while the call waited");
  watchers_.push_back(std::move(waker));
}

void Bound::unwatch(const std::shared_ptr<WakeList>& list, std::uint64_t token) noexcept {
  if (mark_.must_leak()) return;
  const std::lock_guard lock(mutex_);
  std::erase_if(watchers_, [&](const Waker& waker) { return waker.is(list, token); });
}

bool Bound::granted(const Ticket& ticket) const {
  const std::lock_guard lock(mutex_);
  if (ticket.state == Ticket::State::closed)
    throw Closed("the manager was closed while the call waited");
  return ticket.state == Ticket::State::granted;
}

void Bound::give_back(std::uint64_t amount) noexcept {
  if (mark_.must_leak()) return;
  bool told = false;
  {
    const std::lock_guard lock(mutex_);
    told = queue_.waiting() > 0;
    queue_.give_back(amount);
  }
  if (told) progress_->bump_for_waiters();
}

void Bound::abandon(const std::shared_ptr<Ticket>& ticket) noexcept {
  if (mark_.must_leak()) return;
  {
    const std::lock_guard lock(mutex_);
    queue_.abandon(ticket);
  }
  progress_->bump_for_waiters();
}

void Bound::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    queue_.close();
    for (Waker& waker : watchers_) waker.fire();
  }
  progress_->bump_for_waiters();
}

std::uint64_t Bound::taken() const {
  const std::lock_guard lock(mutex_);
  return queue_.bound() - queue_.free();
}

std::uint64_t Bound::free() const {
  const std::lock_guard lock(mutex_);
  return queue_.free();
}

std::size_t Bound::waiting() const {
  const std::lock_guard lock(mutex_);
  return queue_.waiting();
}

Shortage Bound::shortage(std::uint64_t wanted) const {
  const std::lock_guard lock(mutex_);
  return {name_, wanted, queue_.free(), queue_.bound(), queue_.bound() - queue_.free(), 0};
}

void Bound::expect_possible(std::uint64_t wanted) const {
  if (wanted > amount())
    throw CapacityError("the transfer can never be accepted", shortage(wanted));
}

Admission::Admission(BlockPool* pool, std::size_t slots, std::vector<Need> needs)
    : pool_(pool), slots_(slots) {
  for (const Need& need : needs) {
    need.bound->expect_possible(need.amount);
    parts_.push_back({need, nullptr});
  }
  if (!pool_) return;
  const Shortage shortage = pool_->shortage(slots_);
  if (slots_ > shortage.largest)
    throw CapacityError("the transfer can never be accepted", shortage);
}

Admission::~Admission() {
  for (Part& part : parts_) {
    if (part.had)
      part.need.bound->give_back(part.need.amount);
    else if (part.ticket)
      part.need.bound->abandon(part.ticket);
  }
  take_amounts();
}

bool Admission::try_take() {
  if (pool_) {
    auto blocks = pool_->try_acquire(slots_);
    if (!blocks) return false;
    blocks_ = std::move(*blocks);
  }
  for (Part& part : parts_) part.had = part.need.bound->try_take(part.need.amount);
  for (const Part& part : parts_) {
    if (part.had) continue;
    for (Part& other : parts_) {
      if (std::exchange(other.had, false)) other.need.bound->give_back(other.need.amount);
    }
    blocks_.release();
    return false;
  }
  return true;
}

void Admission::take_amounts() noexcept {
  if (watching_ && !parts_.empty()) {
    parts_.front().need.bound->unwatch(watching_, watching_token_);
  }
  watching_ = nullptr;
  parts_.clear();
}

bool Admission::has_room() const {
  if (pool_ && pool_->free() < slots_) return false;
  return std::ranges::all_of(
      parts_, [](const Part& part) { return part.need.bound->free() >= part.need.amount; });
}

bool Admission::granted(const std::shared_ptr<WakeList>& list, std::uint64_t token) {
  if (pool_ && blocks_.empty()) {
    // The pool knows nothing of the manager's end.
    for (const Part& part : parts_) part.need.bound->expect_open();
    if (list && !watching_ && !parts_.empty()) {
      parts_.front().need.bound->watch(list, token);
      watching_ = list;
      watching_token_ = token;
    }
    if (!pool_ticket_) pool_ticket_.emplace(pool_->enqueue(slots_, Waker(list, token)));
    if (!pool_ticket_->granted()) return false;
    blocks_ = pool_ticket_->take();
  }
  for (Part& part : parts_) {
    if (part.had) continue;
    if (!part.ticket) part.ticket = part.need.bound->enqueue(part.need.amount, Waker(list, token));
    if (!part.need.bound->granted(*part.ticket)) return false;
    part.had = true;
  }
  return true;
}

void Admission::throw_timed_out() const {
  if (pool_ && blocks_.empty())
    throw PoolExhausted("the pool did not have the blocks in time", pool_->shortage(slots_));
  for (const Part& part : parts_) {
    if (!part.had)
      throw TimedOut("the transfer was not accepted in time",
                     part.need.bound->shortage(part.need.amount));
  }
  throw TimedOut("the transfer was not accepted in time", {});
}

}  // namespace kvmem
