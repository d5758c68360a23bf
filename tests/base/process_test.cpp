#include "base/process.hpp"

#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/child_process.hpp"

namespace kvmem {
namespace {

bool answer_at_the_last_moment = false;

// Handlers run in reverse order: this one is registered before the library's own, so it runs behind
// it.
__attribute__((constructor(101))) void register_early() {
  std::atexit([] {
    if (answer_at_the_last_moment) std::_Exit(process_is_exiting() ? 42 : 1);
  });
}

TEST(ProcessMark, IsUsableInTheProcessThatMadeIt) {
  const ProcessMark mark;
  EXPECT_FALSE(mark.forked());
  EXPECT_FALSE(mark.must_leak());
  EXPECT_NO_THROW(mark.expect_same_process("a thing"));
}

TEST(ProcessMark, AForkedChildIsRefusedByName) {
  const ProcessMark mark;
  EXPECT_TRUE(test::true_in_child([&] {
    try {
      mark.expect_same_process("a thing");
    } catch (const Forked& error) {
      return mark.forked() && mark.must_leak() && std::string(error.what()).starts_with("a thing");
    }
    return false;
  }));
  EXPECT_FALSE(mark.forked());
}

TEST(ProcessMark, AMarkMadeInTheChildIsGoodThere) {
  EXPECT_TRUE(test::true_in_child([] { return !ProcessMark().forked(); }));
}

TEST(ProcessMark, AnExitingProcessLeaks) {
  EXPECT_TRUE(test::true_in_child([] {
    const ProcessMark mark;
    const bool before = mark.must_leak();
    set_process_exiting();
    return !before && mark.must_leak() && !mark.forked() && process_is_exiting();
  }));
}

TEST(ProcessMarkDeathTest, ExitSetsTheFlagByItself) {
  EXPECT_EXIT(
      {
        answer_at_the_last_moment = true;
        std::exit(0);
      },
      ::testing::ExitedWithCode(42), "");
}

}  // namespace
}  // namespace kvmem
