// Ids and units that every room shares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmem {

using SlotIndex = std::uint32_t;   // place of one block in a pool
using BlockId = std::int64_t;      // number of one block in the device cache
using Nanoseconds = std::int64_t;  // a point or a span on a device's clock
using StreamHandle = std::uintptr_t;
using EventHandle = std::uintptr_t;

enum class Direction : std::uint8_t { to_host, to_device };  // offload, restore
enum class Priority : std::uint8_t { demand, background };

inline constexpr std::size_t slot_alignment_bytes = 4096;

constexpr std::size_t round_up(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

}  // namespace kvmem
