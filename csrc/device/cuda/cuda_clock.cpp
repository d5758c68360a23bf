#include "device/cuda/cuda_clock.hpp"

#include <chrono>
#include <utility>

#include "base/error.hpp"

namespace kvmem::cuda {

namespace {

constexpr Nanoseconds renew_after = 2'000'000'000;    // a float of ms is then good to 0.25 us
constexpr Nanoseconds patience = 2'000'000;           // with an idle stream's event
constexpr Nanoseconds try_again_after = 100'000'000;  // where an older anchor will do
constexpr int tries = 3;

}  // namespace

EventClock::~EventClock() {
  calls_.run_quietly([this](const Functions& call) {
    for (const Event event : {anchor_.event, next_.event}) {
      if (event != nullptr) static_cast<void>(call.event_destroy(event));
    }
    return stream_ != nullptr ? call.stream_destroy(stream_) : success;
  });
}

Nanoseconds EventClock::now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Nanoseconds EventClock::time_of(EventHandle event) {
  const std::lock_guard lock(mutex_);
  const bool is_old = now() - anchor_.at > renew_after && now() - tried_at_ > try_again_after;
  if (anchor_.error < 0 || is_old) {
    tried_at_ = now();
    const Error error = calls_.run([&](const Functions& call) { return renew(call); });
    if (anchor_.error < 0) {  // an old one is still better than none
      calls_.expect_success("the clock of events", error == success ? not_ready : error);
    }
  }
  float milliseconds = 0;
  const Error error = calls_.run([&](const Functions& call) {
    return call.event_elapsed_time(&milliseconds, anchor_.event, event_of(event));
  });
  if (error == not_ready) throw InvalidArgument(text("event ", event, " is still pending"));
  if (error == invalid_resource_handle) {
    throw InvalidArgument(
        text("event ", event, " has no time: it was made without timing, or never recorded"));
  }
  calls_.expect_success("cudaEventElapsedTime", error);
  return anchor_.at + static_cast<Nanoseconds>(static_cast<double>(milliseconds) * 1e6);
}

Error EventClock::prepare(const Functions& call) noexcept {
  Error error = success;
  if (stream_ == nullptr) error = call.stream_create_with_flags(&stream_, stream_non_blocking);
  for (Anchor* const anchor : {&anchor_, &next_}) {
    if (error == success && anchor->event == nullptr)
      error = call.event_create_with_flags(&anchor->event, event_default);
  }
  return error;
}

// Records, and looks until it is done: it was reached between the two looks at the clock. The
// narrowest of a few tries counts.
Error EventClock::renew(const Functions& call) noexcept {
  Error error = prepare(call);
  Nanoseconds best = -1;
  for (int i = 0; i < tries && error == success; ++i) {
    const bool is_late = recorded_at_ >= 0;  // an earlier one, too late to tell a time
    if (!is_late) {
      recorded_at_ = now();
      error = call.event_record(next_.event, stream_);
      if (error != success) recorded_at_ = -1;
    }
    if (error != success) break;
    const Nanoseconds since = now();
    do {
      error = call.event_query(next_.event);
    } while (error == not_ready && now() - since < patience);
    if (error != success) break;
    const Nanoseconds width = now() - recorded_at_, from = std::exchange(recorded_at_, -1);
    if (is_late || (best >= 0 && width >= best)) continue;
    best = width;
    next_.at = from + width / 2;
    next_.error = width / 2;
    std::swap(anchor_, next_);
  }
  return best >= 0 ? success : error;
}

}  // namespace kvmem::cuda
