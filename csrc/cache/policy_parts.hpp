// What the policies share; for their own sources.
#pragma once

#include "base/check.hpp"
#include "cache/policy.hpp"

namespace kvmem {

inline EntryId expect_capacity(EntryId capacity) {
  KVMEM_EXPECTS(capacity >= 1 && capacity <= most_policy_entries, "capacity is ", capacity,
                ", which must be 1 to ", most_policy_entries);
  return capacity;
}

}  // namespace kvmem
