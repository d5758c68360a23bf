// First touch of a mapping, in parallel: afterwards every page exists, and no later access can
// fail.
//
// Threads: returns on the calling thread, which is the only one that calls `progress`; the others
// are joined by then. Throws CapacityError when the kernel has no page to give, Cancelled when
// `progress` returns false, and what it throws. The pages touched so far stay: the caller unmaps.
#pragma once

#include <cstddef>
#include <functional>

namespace kvmem {

inline constexpr std::size_t touch_chunk_bytes = std::size_t{64} << 20;

struct TouchJob {
  std::byte* base = nullptr;
  std::size_t bytes = 0;  // whole pages
  std::size_t page_bytes = 4096;
  int memfd = -1;        // its space is reserved before the touch, from offset 0
  unsigned threads = 0;  // 0: one per core, at most 8
};

using TouchProgress = std::function<bool(std::size_t done_bytes, std::size_t total_bytes)>;

void touch_pages(const TouchJob& job, const TouchProgress& progress);

}  // namespace kvmem
