// The main() of the test programs.
#include <filesystem>
#include <iterator>

#include <gtest/gtest.h>

#include "support/sanitizers.hpp"
#include "support/wait_for.hpp"

namespace {

std::ptrdiff_t threads() {
  using Entries = std::filesystem::directory_iterator;
  return std::distance(Entries("/proc/self/task"), Entries());
}

}  // namespace

// The last share of a device or a pool may be that of a thread on its way out. Once the process
// exits such a share is leaked on purpose, and LeakSanitizer would report it.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  if (!kvmem::test::thread_sanitized) {  // TSan has a thread of its own, and looks for no leaks
    static_cast<void>(
        kvmem::test::comes_true([] { return threads() == 1; }, std::chrono::seconds(5)));
  }
  return failed;
}
