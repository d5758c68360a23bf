// How fast memory is registered, and how much at a time.
//
// A registration holds locks of the driver that other processes and running requests wait for, so
// a limit means both: pauses between chunks, and chunks that are no longer than half a second.
#pragma once

#include <cstddef>
#include <functional>

#include "base/types.hpp"
#include "host/pinned_region.hpp"

namespace kvmem {

struct PinPace {
  double bytes_per_second = 0;  // at least 1; 0: as fast as it goes

  // Whole slots and whole pages, up to 1 GiB and to half a second, else one slot. Throws as
  // PinnedRegion::bytes_a_pin().
  [[nodiscard]] std::size_t chunk_bytes(std::size_t slot_bytes) const;
  [[nodiscard]] Nanoseconds time_for(std::size_t bytes) const noexcept;  // at most some 30 years
};

// Registers what there is left of a region that start_pinning() was called for, by the device's
// clock. `go_on` is asked before each chunk, and once more behind the last: it sleeps for `pause`,
// and says false to stop. Throws what the device does, and what `go_on` does; what was registered
// stays so.
void pin_at_pace(PinnedRegion& region, const Device& device, const PinPace& pace,
                 const std::function<bool(Nanoseconds pause)>& go_on);

}  // namespace kvmem
