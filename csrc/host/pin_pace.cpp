#include "host/pin_pace.hpp"

#include <algorithm>

namespace kvmem {

std::size_t PinPace::chunk_bytes(std::size_t slot_bytes) const {
  const double most = bytes_per_second > 0 ? bytes_per_second / 2 : 0;
  const bool limited = most > 0 && most < static_cast<double>(PinnedRegion::most_bytes_a_pin);
  return PinnedRegion::bytes_a_pin(
      slot_bytes, limited ? static_cast<std::size_t>(most) : PinnedRegion::most_bytes_a_pin);
}

Nanoseconds PinPace::time_for(std::size_t bytes) const noexcept {
  constexpr double most = 1e18;  // so that no clock overflows
  if (bytes_per_second <= 0) return 0;
  return static_cast<Nanoseconds>(
      std::min(static_cast<double>(bytes) / bytes_per_second * 1e9, most));
}

void pin_at_pace(PinnedRegion& region, const Device& device, const PinPace& pace,
                 const std::function<bool(Nanoseconds pause)>& go_on) {
  Nanoseconds pause = 0;
  for (std::size_t before = region.pinned_bytes(); go_on(pause);) {
    const Nanoseconds started = device.now();
    if (!region.pin_next()) return;
    const Nanoseconds took = device.now() - started;
    const std::size_t now = region.pinned_bytes();
    const bool last = now == region.bytes();
    pause = last ? 0 : std::max<Nanoseconds>(pace.time_for(now - before) - took, 0);
    before = now;
  }
}

}  // namespace kvmem
