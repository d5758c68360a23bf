// A plan that nobody will finish otherwise.
#pragma once

#include "cache/index.hpp"

namespace kvmem {

class PlanGuard {
 public:
  PlanGuard(Index& index, PlanId plan) : index_(index), plan_(plan) {}
  PlanGuard(const PlanGuard&) = delete;
  PlanGuard& operator=(const PlanGuard&) = delete;
  ~PlanGuard() {
    if (plan_ != 0) static_cast<void>(index_.finish(plan_, 0, false));
  }
  void keep() noexcept { plan_ = 0; }

 private:
  Index& index_;
  PlanId plan_;
};

}  // namespace kvmem
