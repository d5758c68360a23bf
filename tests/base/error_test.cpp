#include "base/error.hpp"

#include <gtest/gtest.h>

#include "base/check.hpp"
#include "base/types.hpp"

namespace kvmem {
namespace {

TEST(Error, AShortageCarriesItsNumbersAsFieldsAndInTheMessage) {
  const Shortage numbers{
      .bound = "pool blocks", .wanted = 5, .free = 2, .largest = 9, .held = 4, .quarantined = 3};
  try {
    throw PoolExhausted("no blocks", numbers);
  } catch (const AtBound& error) {
    EXPECT_EQ(error.shortage.wanted, 5U);
    EXPECT_EQ(error.shortage.largest, 9U);
    EXPECT_STREQ(
        error.what(),
        "no blocks: pool blocks wanted 5, free 2, largest possible 9, held 4, quarantined 3");
  }
}

TEST(Error, EveryKindIsCaughtAsError) {
  EXPECT_THROW(throw CapacityError("x", {}), Error);
  EXPECT_THROW(throw Busy("x", 1, 2), Error);
  EXPECT_THROW(throw Incompatible("x", {"dtype"}), Error);
  EXPECT_THROW(throw Forked("x"), Error);
}

TEST(Check, AnExpectationThrowsItsMessageAndPutsItTogetherOnlyThen) {
  int built = 0;
  const auto part = [&] { return ++built; };
  EXPECT_NO_THROW([&] { KVMEM_EXPECTS(true, "part ", part()); }());
  EXPECT_EQ(built, 0);
  try {
    KVMEM_EXPECTS(1 > 2, "part ", part());
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "part 1");
  }
}

#if KVMEM_CHECKED
TEST(CheckDeathTest, ABrokenInvariantNamesItselfAndStopsTheProcess) {
  EXPECT_DEATH(KVMEM_INVARIANT(1 > 2), "invariant broken: 1 > 2");
}
#else
TEST(Check, AnInvariantCostsNothingInAnUncheckedBuild) {
  int evaluated = 0;
  KVMEM_INVARIANT(++evaluated > 5);
  EXPECT_EQ(evaluated, 0);
}
#endif

TEST(Types, RoundingUpIsExactAtTheEdges) {
  EXPECT_EQ(round_up(0, 4096), 0U);
  EXPECT_EQ(round_up(1, 4096), 4096U);
  EXPECT_EQ(round_up(4096, 4096), 4096U);
  EXPECT_EQ(round_up((std::size_t{1} << 40) + 1, 4096), (std::size_t{1} << 40) + 4096);
}

}  // namespace
}  // namespace kvmem
