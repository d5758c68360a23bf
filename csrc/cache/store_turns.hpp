// Whose turn it is to ask for room: stores that wait, in the order in which they came. The first of
// them asks again whenever something has moved, and nobody overtakes it.
//
// Any thread; its lock is a leaf.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "base/progress.hpp"
#include "base/tickets.hpp"

namespace kvmem {

class StoreTurns {
 public:
  explicit StoreTurns(Progress& progress) : progress_(&progress) {}

  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_; }  // how many
  [[nodiscard]] std::shared_ptr<Ticket> enqueue(Waker waker);
  // Whether it is this one's turn. `again`, if it is: fired once something has moved.
  [[nodiscard]] bool may_ask(const Ticket& ticket, Waker again);
  void leave(const std::shared_ptr<Ticket>& ticket) noexcept;
  // Something has moved. Who blocks sees that by the progress.
  void tell() noexcept;
  void close() noexcept;  // all may ask now, to hear that the cache is closed

 private:
  std::mutex mutex_;
  TicketQueue queue_{1};  // of the one turn
  Waker again_;
  std::atomic<std::size_t> waiting_{0};
  Progress* progress_;
};

}  // namespace kvmem
