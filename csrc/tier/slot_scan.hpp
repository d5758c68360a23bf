// What the headers of a volume say, read once when a tier is opened.
//
// Several threads, the calling one among them. Payloads are not looked at, unless slots are so
// small that reading on is cheaper than skipping. Throws Cancelled, and what progress throws.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tier/volume.hpp"

namespace kvmem::detail {

struct SlotScan {
  std::vector<FoundSlot> found;       // oldest first
  std::vector<FoundSlot> superseded;  // by a later write of the same key
  std::vector<SlotIndex> unreadable;
  std::array<std::uint64_t, disk_outcomes> headers{};
  std::uint64_t last_generation = 0;
};

[[nodiscard]] SlotScan scan_slots(Volume& volume, const DiskOptions& options);

}  // namespace kvmem::detail
