// How much host memory may still be taken, asked before any page is touched.
//
// The smallest of MemAvailable and every cgroup limit less its use, from our group up to the root
// (v2 and v1). A file that is absent or unreadable is no limit. Shared memory here is a memfd: it
// is in no mounted file system, so nothing else binds it. `root` is "/" but for tests, which give a
// folder of fake files. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvmem {

struct MemoryLimit {
  std::string name;  // "MemAvailable", "cgroup v2 /a/b memory.max", ...
  std::uint64_t limit_bytes = 0;
  std::uint64_t used_bytes = 0;
  [[nodiscard]] std::uint64_t free_bytes() const noexcept {
    return limit_bytes > used_bytes ? limit_bytes - used_bytes : 0;
  }
};

[[nodiscard]] std::vector<MemoryLimit> memory_limits(const std::string& root = "/");

// Throws CapacityError naming the tightest limit when `bytes` exceeds what is free under it.
void expect_memory_for(std::uint64_t bytes, const std::string& root = "/");

}  // namespace kvmem
