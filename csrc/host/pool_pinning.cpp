// How the memory of a pool comes to be pinned: before the pool is there, or behind its back.
#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/signals.hpp"
#include "host/pool_core.hpp"

namespace kvmem::detail {

namespace {
constexpr Nanoseconds longest_unasked = 50'000'000;  // progress is where signals are looked at
}  // namespace

bool PoolCore::pinned(std::span<const SlotIndex> slots) const noexcept {
  const std::size_t bytes = region_.pinned_bytes();
  if (bytes == region_.bytes()) return true;
  return std::ranges::all_of(
      slots, [&](SlotIndex slot) { return (slot + std::size_t{1}) * slot_bytes_ <= bytes; });
}

void PoolCore::pin_first(const TouchProgress& progress) {
  const std::size_t all = region_.bytes();
  const auto tell = [&] {
    const std::size_t done = region_.pinned_bytes();
    if (progress && done > 0 && !progress(all + done, 2 * all))
      throw Cancelled(text("pinning was cancelled after ", done, " of ", all, " bytes"));
  };
  const auto go_on = [&](Nanoseconds pause) {
    for (tell(); pause > 0; tell()) {
      const Nanoseconds nap = std::min(pause, longest_unasked);
      std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
      pause -= nap;
    }
    return true;
  };
  region_.start_pinning(device_, pace_.chunk_bytes(slot_bytes_));
  try {
    pin_at_pace(region_, *device_, pace_, go_on);
  } catch (...) {
    region_.unpin();
    throw;
  }
}

void PoolCore::pin_behind() {
  region_.start_pinning(device_, pace_.chunk_bytes(slot_bytes_));
  ++handles_;
  const SignalsBlocked blocked;
  try {
    // Detached: it is a holder like any other, and may be the last.
    std::thread([this] { pin_in_background(); }).detach();
  } catch (const std::system_error&) {  // the same as a chunk that fails
    --handles_;
    pin_error_ = std::current_exception();
  }
}

void PoolCore::pin_in_background() noexcept {
  std::exception_ptr error;
  device_->adopt_thread();
  try {
    pin_at_pace(region_, *device_, pace_, [this](Nanoseconds pause) { return note_pinned(pause); });
  } catch (...) {
    error = std::current_exception();
  }
  pinning_ended(error);
}

// Asked before each chunk: sleeps for as long as the pace wants.
bool PoolCore::note_pinned(Nanoseconds pause) {
  if (mark_.must_leak()) return false;
  std::unique_lock lock(mutex_);
  const std::size_t ready = region_.pinned_bytes() / slot_bytes_;
  table_.make_ready(static_cast<std::uint32_t>(std::min<std::size_t>(ready, capacity_)));
  return !pinning_ends_.wait_for(lock, std::chrono::nanoseconds(pause), [this] { return closed_; });
}

}  // namespace kvmem::detail
