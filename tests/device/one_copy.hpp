// What the tests of the host device share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "device/device.hpp"

namespace kvmem::test {

using Bytes = std::vector<std::byte>;
inline constexpr Nanoseconds second = 1'000'000'000;
inline constexpr std::size_t piece = std::size_t{256} << 10;

inline Bytes filled(std::size_t bytes, int value) {
  return Bytes(bytes, static_cast<std::byte>(value));
}

// One copy, with arrays that live as long as it does.
class OneCopy {
 public:
  OneCopy(std::span<std::byte> target, std::span<const std::byte> source)
      : target_(target.data()), source_(source.data()), bytes_(source.size()) {}
  OneCopy(const OneCopy&) = delete;
  OneCopy& operator=(const OneCopy&) = delete;

  void queue(Device& device, StreamHandle stream) const {
    device.copy({&target_, &source_, &bytes_, 1}, Direction::to_host, SourceAccess::stream_order,
                stream);
  }

 private:
  std::byte* target_;
  const std::byte* source_;
  std::size_t bytes_;
};

inline void settle(Device& device, EventHandle event, bool help) {
  const Nanoseconds limit = device.now() + 60 * second;
  while (true) {
    const std::uint64_t seen = device.progress().value();
    if (device.query(event) != EventState::pending) return;
    ASSERT_LT(device.now(), limit) << "the event is never reached";
    device.sleep(seen, second, help);
  }
}

inline EventHandle record_now(Device& device, StreamHandle stream) {
  const EventHandle event = device.create_event(true);
  device.record(event, stream);
  return event;
}

}  // namespace kvmem::test
