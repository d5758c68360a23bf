// When an event was reached, on the host's monotonic clock. CUDA tells only the time between two
// events of a device, as a float of milliseconds that grows coarse within seconds: so a recent
// event whose host time is known, the anchor, is renewed every other second. Any thread; one at a
// time inside.
#pragma once

#include <mutex>

#include "device/cuda/cuda_calls.hpp"

namespace kvmem::cuda {

class EventClock {
 public:
  explicit EventClock(Calls& calls) : calls_(calls) {}
  EventClock(const EventClock&) = delete;
  EventClock& operator=(const EventClock&) = delete;
  ~EventClock();

  [[nodiscard]] static Nanoseconds now() noexcept;
  // Of a timing event that is done. Throws InvalidArgument for one without timing, never recorded
  // or pending, CopyFailed where no anchor can be had, DeviceLost.
  [[nodiscard]] Nanoseconds time_of(EventHandle event);

 private:
  struct Anchor {
    Event event = nullptr;
    Nanoseconds at = 0;
    Nanoseconds error = -1;  // at most; below 0: it is none yet
  };
  Error prepare(const Functions& call) noexcept;
  Error renew(const Functions& call) noexcept;

  Calls& calls_;
  std::mutex mutex_;
  Stream stream_ = nullptr;  // of its own, so that nothing delays the anchor
  Anchor anchor_, next_;
  Nanoseconds recorded_at_ = -1;  // of next_, where its end was not seen yet
  Nanoseconds tried_at_ = 0;
};

}  // namespace kvmem::cuda
