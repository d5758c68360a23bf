// What the simulation does, as data: an operation is a kind and four numbers, which mean "the a-th
// of what there is" at the time. So any part of a program is a program too, and can be run by
// itself.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace kvmem::sim {

enum class Kind : std::uint8_t {
  acquire,        // slots of the pool
  ticket,         // wait for slots: join the FIFO, take what was granted, or give the place up
  share,          // a second holder of slots, or of part of a host copy
  release,        // slots, or a host copy
  release_after,  // slots, as of a point on a stream
  offload,
  offload_into,
  admit,  // wait for the bounds of an offload: join, go on with it, or give up
  restore,
  wait_on,
  wait,
  cancel,
  drop,  // a transfer's handle
  poll,
  drain,
  rebind,
  close,  // the manager, and a new one on the same pool
  write,  // a kernel of the engine's writes a block
  read,   // a kernel of the engine's reads a block
  stall,  // hold a stream of the engine's back, or let it go on
  step,   // one copy ends
  advance,
  hold,  // copies that never end, until they are let go
  fail,  // a later call of the device
  lose,  // the device, and a new one
};
inline constexpr std::size_t kinds = 25;
[[nodiscard]] const char* name_of(Kind kind);

struct Operation {
  Kind kind = Kind::step;
  std::array<std::uint32_t, 4> draw{};
};

// How often each kind comes is in the source.
[[nodiscard]] std::vector<Operation> make_program(std::uint64_t seed, std::size_t operations);

}  // namespace kvmem::sim
