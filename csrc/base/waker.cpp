#include "base/waker.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace kvmem {

WakeList::WakeList() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (descriptor_ < 0) throw Error(text("eventfd: ", std::strerror(errno)));
}

WakeList::~WakeList() { close(descriptor_); }

void WakeList::reserve() {
  const std::lock_guard lock(mutex_);
  if (wakers_ + 1 > fired_.capacity()) fired_.reserve(2 * (wakers_ + 1));
  ++wakers_;
}

void WakeList::forget() noexcept {
  if (mark_.must_leak()) return;
  const std::lock_guard lock(mutex_);
  --wakers_;
}

void WakeList::fire(std::uint64_t token) noexcept {
  const std::lock_guard lock(mutex_);
  fired_.push_back(token);
  const std::uint64_t one = 1;
  // Full means that the loop is already woken.
  static_cast<void>(!write(descriptor_, &one, sizeof one));
}

std::vector<std::uint64_t> WakeList::drain() {
  const std::lock_guard lock(mutex_);
  // A copy: fired_ keeps its room. Before the read: without memory for it, it stays readable.
  std::vector<std::uint64_t> fired = fired_;
  std::uint64_t count = 0;
  static_cast<void>(!read(descriptor_, &count, sizeof count));
  fired_.clear();
  wakers_ -= fired.size();
  return fired;
}

}  // namespace kvmem
