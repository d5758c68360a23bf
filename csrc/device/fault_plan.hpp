// Which calls of a virtual device are to fail. Not thread-safe: the device's lock guards it.
#pragma once

#include <algorithm>
#include <vector>

#include "device/virtual_device.hpp"

namespace kvmem {

class FaultPlan {
 public:
  void add(DeviceCall call, std::uint64_t nth, Fault how, std::uint64_t times) {
    planned_.push_back({call, nth, times, how});
  }
  void forget() noexcept { planned_.clear(); }
  void pause(bool paused) noexcept { paused_ = paused; }
  [[nodiscard]] std::uint64_t injected() const noexcept { return injected_; }

  // A call is made: does it fail?
  [[nodiscard]] std::optional<Fault> next(DeviceCall call) noexcept {
    std::optional<Fault> verdict;
    if (paused_) return verdict;
    for (Planned& planned : planned_) {
      if (planned.call != call && planned.call != DeviceCall::any) continue;
      if (planned.before_it > 1) {
        --planned.before_it;
        continue;
      }
      --planned.times;
      verdict = planned.how;
    }
    std::erase_if(planned_, [](const Planned& planned) { return planned.times == 0; });
    if (verdict) ++injected_;
    return verdict;
  }

 private:
  struct Planned {
    DeviceCall call;
    std::uint64_t before_it, times;
    Fault how;
  };
  std::vector<Planned> planned_;
  std::uint64_t injected_ = 0;
  bool paused_ = false;
};

}  // namespace kvmem
