// Stops new work and knows when old work is done.
//
// Calls that start work enter the gate for their duration; close() refuses later entries.
#pragma once

#include <atomic>

#include "base/error.hpp"

namespace kvmem {

class Gate {
 public:
  class Pass {
   public:
    explicit Pass(Gate& gate) noexcept : gate_(&gate) {}
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    ~Pass() { gate_->inside_.fetch_sub(1); }

   private:
    Gate* gate_;
  };

  // Throws Closed, naming `what`.
  [[nodiscard]] Pass enter(const char* what) {
    inside_.fetch_add(1);
    if (closed_.load()) {
      inside_.fetch_sub(1);
      throw Closed(text(what, " is closed"));
    }
    return Pass(*this);
  }

  void close() noexcept { closed_.store(true); }
  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }
  [[nodiscard]] bool empty() const noexcept { return inside_.load() == 0; }

 private:
  std::atomic<bool> closed_{false};
  std::atomic<int> inside_{0};
};

}  // namespace kvmem
