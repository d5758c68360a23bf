// The simulation, for as long as a test may take; kvmem-sim runs it for longer. And that it tells
// of what goes wrong.
#include <algorithm>
#include <cstdlib>

#include <gtest/gtest.h>

#include "model/sim/runner.hpp"

namespace kvmem::sim {
namespace {

std::uint64_t setting(const char* name, std::uint64_t usual) {
  const char* const given = std::getenv(name);
  return given == nullptr ? usual : std::strtoull(given, nullptr, 10);
}

std::string told(const SweepResult& result) {
  return text("case ", result.failed_case, ", operation ", result.outcome.at, ": ",
              result.outcome.what, "; kvmem-sim makes it short");
}

TEST(Simulation, AnyProgramInAnyWorldKeepsEveryInvariant) {
  const std::uint64_t seeds = setting("KVMEM_SIM_SEEDS", 60);
  const SweepResult result = run_cases(seeded(1500), {.count = seeds, .jobs = 2});
  EXPECT_FALSE(result.outcome.failed) << told(result) << " (kvmem-sim --ops 1500)";
  EXPECT_EQ(result.cases_run, seeds);
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    EXPECT_GE(result.tally.accepted[kind] * 10, result.tally.tried[kind] * 3)
        << name_of(static_cast<Kind>(kind)) << " is hardly ever accepted";
    EXPECT_GT(result.tally.accepted[kind], 0U) << name_of(static_cast<Kind>(kind));
  }
  EXPECT_GT(result.tally.failed, 0U);
  EXPECT_GT(result.tally.cancelled, 0U);
  EXPECT_GT(result.tally.blocks_compared, result.tally.done);
}

TEST(Simulation, TheCudaDeviceOverAFakeRuntimeKeepsEveryInvariantToo) {
  const std::uint64_t seeds = setting("KVMEM_SIM_SEEDS", 60) / 6;
  for (const test::OverFake& fake : {test::OverFake{.major = 12}, test::OverFake{.major = 13},
                                     test::OverFake{.major = 13, .batch = false}}) {
    const SweepResult result = run_cases(over(seeded(1000), fake), {.count = seeds, .jobs = 2});
    EXPECT_FALSE(result.outcome.failed)
        << told(result) << " (kvmem-sim --ops 1000 --device cuda" << fake.major << ")";
    EXPECT_GT(result.tally.done, 0U);
    EXPECT_GT(result.tally.blocks_compared, result.tally.done);
  }
}

TEST(Simulation, EverySequenceOfAFewOperationsKeepsEveryInvariant) {
  const std::size_t length = setting("KVMEM_SIM_LENGTH", 3);
  const SweepResult result =
      run_cases(sequences(length), {.count = sequence_count(length), .jobs = 2});
  EXPECT_FALSE(result.outcome.failed)
      << told(result) << " (kvmem-sim --sequences " << length << ")";
  EXPECT_GT(result.tally.accepted[static_cast<std::size_t>(Kind::restore)], 0U);
}

TEST(Simulation, TheSameCaseGivesTheSameRun) {
  const auto run_once = [] {
    Tally tally;
    EXPECT_FALSE(run(seeded(3000)(7), tally).failed);
    return tally;
  };
  const Tally one = run_once(), other = run_once();
  EXPECT_EQ(one.accepted, other.accepted);
  EXPECT_EQ(one.blocks_compared, other.blocks_compared);
  EXPECT_EQ(one.faults, other.faults);
}

TEST(Shrinking, LeavesExactlyWhatIsNeeded) {
  const auto fails = [](const std::vector<std::size_t>& places) {
    return std::ranges::includes(places, std::vector<std::size_t>{3, 50, 51, 799});
  };
  EXPECT_EQ(shrink(800, fails), (std::vector<std::size_t>{3, 50, 51, 799}));
}

TEST(Runner, AChildThatCrashesOrHangsIsAnOutcome) {
  const Cases crash = [](std::uint64_t number) -> Case {
    if (number == 5) std::abort();
    return seeded(10)(number);
  };
  const SweepResult result = run_cases(crash, {.count = 20, .jobs = 2});
  EXPECT_TRUE(result.outcome.failed);
  EXPECT_EQ(result.failed_case, 5U);
  EXPECT_FALSE(result.outcome.what.empty());
}

TEST(Runner, AViolationIsTheOutcomeOfItsCase) {
  const Cases impossible = [](std::uint64_t number) {
    Case one = seeded(10)(number);
    if (number == 3) one.shape.slots = 0;  // no such pool can be made
    return one;
  };
  const SweepResult result = run_cases(impossible, {.count = 20, .jobs = 2});
  EXPECT_TRUE(result.outcome.failed);
  EXPECT_EQ(result.failed_case, 3U);
}

}  // namespace
}  // namespace kvmem::sim
