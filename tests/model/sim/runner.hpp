// Runs programs of the simulation, each in a child process where it may crash or hang, and makes
// those that fail short.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/sim/simulation.hpp"

namespace kvmem::sim {

struct Outcome {
  bool failed = false;
  std::size_t at = 0;  // the operation, or how many there are: the end
  std::string what;
};

// A program with its world. Cases have numbers, so that one can be run again.
struct Case {
  WorldShape shape;
  std::vector<Operation> program;
};
using Cases = std::function<Case(std::uint64_t number)>;
[[nodiscard]] Cases over(Cases cases, const test::OverFake& fake);  // the same on the CUDA device
[[nodiscard]] Cases seeded(std::size_t operations);  // any world, any program; a seed each
// Every sequence of so many operations out of a few, in the smallest world.
[[nodiscard]] Cases sequences(std::size_t length);
[[nodiscard]] std::uint64_t sequence_count(std::size_t length);

struct Sweep {
  std::uint64_t first = 0, count = 0;
  unsigned jobs = 1;
  bool progress = false;  // a line on stderr now and then
};
struct SweepResult {
  Tally tally;
  std::uint64_t cases_run = 0;
  std::uint64_t failed_case = 0;
  Outcome outcome;  // of the failed case, if it failed
};
// In child processes, until the first case that fails.
[[nodiscard]] SweepResult run_cases(const Cases& cases, const Sweep& sweep);

// In this process: a violation is an outcome, a crash is a crash.
[[nodiscard]] Outcome run(const Case& one, Tally& tally);
// The same in a child process that is killed after `seconds`.
[[nodiscard]] Outcome run_in_child(const Case& one, unsigned seconds);

// Which of a failing program's first `operations` are enough to make it fail, by their places in
// it. `fails` runs some of them.
[[nodiscard]] std::vector<std::size_t> shrink(
    std::size_t operations, const std::function<bool(const std::vector<std::size_t>&)>& fails);
[[nodiscard]] Case only(const Case& one, const std::vector<std::size_t>& places);

}  // namespace kvmem::sim
