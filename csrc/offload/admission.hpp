// What a transfer must have before it is accepted: host slots, queue bytes, a report place. Each is
// a bound with a FIFO.
//
// try_take() has everything at once or nothing. granted() joins the FIFOs one behind the other and
// says when all is had; slots come first, because what it then still waits for is freed by copies
// alone. Dropping an admission gives everything back. Bounds: any thread. Admission: one thread at
// a time.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/tickets.hpp"
#include "host/block_pool.hpp"

namespace kvmem {

// A bounded amount that several threads draw on.
class Bound {
 public:
  Bound(std::string name, std::uint64_t amount, Progress& progress)
      : name_(std::move(name)), queue_(amount), progress_(&progress) {}

  [[nodiscard]] bool try_take(std::uint64_t amount);
  // Throws Closed.
  [[nodiscard]] std::shared_ptr<Ticket> enqueue(std::uint64_t amount, Waker waker);
  [[nodiscard]] bool granted(const Ticket& ticket) const;  // throws Closed
  void expect_open() const;                                // throws Closed
  // Told when the bound is closed, for who waits for something else meanwhile. Throws Closed.
  void watch(std::shared_ptr<WakeList> list, std::uint64_t token);
  void unwatch(const std::shared_ptr<WakeList>& list, std::uint64_t token) noexcept;
  void give_back(std::uint64_t amount) noexcept;
  void abandon(const std::shared_ptr<Ticket>& ticket) noexcept;
  void close() noexcept;

  [[nodiscard]] std::uint64_t amount() const noexcept { return queue_.bound(); }
  [[nodiscard]] std::uint64_t taken() const;
  [[nodiscard]] std::uint64_t free() const;
  [[nodiscard]] std::size_t waiting() const;
  [[nodiscard]] Shortage shortage(std::uint64_t wanted) const;
  // Throws CapacityError when it exceeds the bound.
  void expect_possible(std::uint64_t wanted) const;

 private:
  const std::string name_;
  const ProcessMark mark_;
  mutable std::mutex mutex_;
  TicketQueue queue_;
  std::vector<Waker> watchers_;
  bool closed_ = false;
  Progress* progress_;
};

class Admission {  // move-only
 public:
  // With `pool`, `slots` of it are acquired; each bound and its amount must outlive the admission.
  struct Need {
    Bound* bound;
    std::uint64_t amount;
  };
  Nanoseconds requested = -1;  // when the call was made, before any waiting

  Admission(BlockPool* pool, std::size_t slots, std::vector<Need> needs);
  Admission(Admission&&) noexcept = default;
  Admission& operator=(Admission&&) = delete;
  ~Admission();

  [[nodiscard]] bool try_take();
  [[nodiscard]] bool has_room() const;  // enough of everything is free just now
  // `list` and `token`: who is told when it is worth asking again.
  [[nodiscard]] bool granted(const std::shared_ptr<WakeList>& list = nullptr,
                             std::uint64_t token = 0);
  // PoolExhausted or TimedOut, with the numbers of what is missing
  [[noreturn]] void throw_timed_out() const;

  // Once granted: the slots; and the amounts, which the taker then gives back itself.
  [[nodiscard]] HostBlocks take_blocks() noexcept { return std::move(blocks_); }
  void take_amounts() noexcept;

 private:
  struct Part {
    Need need;
    std::shared_ptr<Ticket> ticket;
    bool had = false;
  };
  BlockPool* pool_;
  std::size_t slots_;
  std::optional<PoolTicket> pool_ticket_;
  HostBlocks blocks_;
  std::vector<Part> parts_;
  std::shared_ptr<WakeList> watching_;  // the first part's bound tells it of a close
  std::uint64_t watching_token_ = 0;
};

}  // namespace kvmem
