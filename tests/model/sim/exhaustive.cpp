// Small worlds, exhaustively: every sequence of a few operations, each chosen to mean one thing.
#include "model/sim/runner.hpp"

namespace kvmem::sim {

namespace {

WorldShape smallest_world() {
  WorldShape shape;
  shape.device_blocks = 2;
  shape.slots = 3;
  shape.device.latency = 0;
  shape.manager.max_queued_bytes = 2 * block_bytes;
  shape.manager.max_transfers = 2;
  shape.manager.max_reports = 2;
  shape.manager.window_descriptors = 8;  // so that a transfer of three segments is sliced
  shape.manager.timeline_records = 4;
  return shape;
}

constexpr std::uint32_t named = 0, stream_only = 3U << 2 | 1U << 7;  // see request_for()

// There is something to restore from the start.
constexpr std::array<Operation, 3> prelude{{
    {Kind::write, {0, 0, 0, 0}},
    {Kind::offload, {0, 0, named, 0}},
    {Kind::drain, {0, 0, 0, 0}},
}};

// Each is one thing on one block; `draw` as its function reads it.
constexpr std::array<Operation, 13> of_transfers{{
    {Kind::write, {0, 0, 0, 0}},
    {Kind::offload, {0, 0, named | 1U << 7, 0}},   // block 0, tagged, demand
    {Kind::offload, {1, 0, stream_only | 3U, 0}},  // block 1, background
    {Kind::restore, {0, 0, 0, named}},             // into block 0, behind what is in the way
    {Kind::restore, {1, 0, 0, stream_only << 4}},  // into block 1
    {Kind::wait_on, {8, 0, 2, 0}},
    {Kind::read, {0, 0, 0, 0}},
    {Kind::cancel, {8, 0, 0, 0}},
    {Kind::drop, {8, 0, 0, 0}},
    {Kind::step, {0, 0, 0, 0}},
    {Kind::poll, {0, 0, 0, 0}},
    {Kind::stall, {0, 0, 0, 0}},
    {Kind::fail, {6, 0, 1, 0}},  // the next copy, which runs all the same
}};

constexpr std::array<Operation, 11> of_slots{{
    {Kind::acquire, {0, 0, 0, 0}},
    {Kind::acquire, {1, 0, 0, 0}},  // two slots
    {Kind::ticket, {0, 0, 0, 0}},   // joins, or takes what was granted
    {Kind::ticket, {0, 0, 2, 0}},   // the same, for all three slots
    {Kind::ticket, {1, 0, 0, 0}},   // gives its place up
    {Kind::share, {0, 0, 0, 0}},
    {Kind::release, {0, 0, 0, 0}},
    {Kind::release_after, {0, 1, 0, 0}},
    {Kind::stall, {0, 0, 0, 0}},
    {Kind::write, {0, 0, 0, 0}},
    {Kind::step, {0, 0, 0, 0}},
}};

std::uint64_t power(std::uint64_t base, std::size_t exponent) {
  std::uint64_t product = 1;
  while (exponent-- > 0) product *= base;
  return product;
}

}  // namespace

std::uint64_t sequence_count(std::size_t length) {
  return power(of_transfers.size(), length) + power(of_slots.size(), length);
}

Cases sequences(std::size_t length) {
  return [length](std::uint64_t number) {
    const std::uint64_t first = power(of_transfers.size(), length);
    const std::span<const Operation> alphabet =
        number < first ? std::span<const Operation>(of_transfers) : of_slots;
    if (number >= first) number -= first;
    Case one{smallest_world(), {prelude.begin(), prelude.end()}};
    for (std::size_t i = 0; i < length; ++i, number /= alphabet.size()) {
      one.program.push_back(alphabet[number % alphabet.size()]);
    }
    return one;
  };
}

}  // namespace kvmem::sim
