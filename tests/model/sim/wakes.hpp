// Who asked to be woken, and how often each was: an engine's event loop, without the loop.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/waker.hpp"
#include "model/sim/violation.hpp"

namespace kvmem::sim {

class Wakes {
 public:
  [[nodiscard]] const std::shared_ptr<WakeList>& list() const noexcept { return list_; }
  [[nodiscard]] std::uint64_t ask() {
    told_[++last_] = 0;
    return last_;
  }
  // How often until the last look.
  [[nodiscard]] unsigned told(std::uint64_t token) const { return told_.at(token); }
  // The same, until now, and counts anew.
  [[nodiscard]] unsigned take(std::uint64_t token) {
    look();
    return std::exchange(told_.at(token), 0U);
  }
  // Nobody waits any more, so nobody is to be woken from now on.
  void forget(std::uint64_t token) {
    look();
    told_.erase(token);
  }
  void look() {
    for (const std::uint64_t token : list_->drain()) {
      const auto asked = told_.find(token);
      expect(asked != told_.end(), "somebody was woken who no longer waits");
      ++asked->second;
    }
  }

 private:
  std::shared_ptr<WakeList> list_ = std::make_shared<WakeList>();
  std::map<std::uint64_t, unsigned> told_;
  std::uint64_t last_ = 0;
};

}  // namespace kvmem::sim
