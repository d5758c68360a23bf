// Copies bytes at the speed of memory, past the caches: what is offloaded is not read again soon.
//
// A segment is cut in four quarters that are streamed interleaved, which keeps more lines in flight
// than one stream can. Streaming stores are weakly ordered: whoever publishes the bytes to another
// thread calls store_fence() on the copying thread first. Any thread; nothing here throws.
#pragma once

#include <cstddef>
#include <span>

namespace kvmem {

struct CopyKernel {
  const char* name;
  void (*copy)(std::byte* target, const std::byte* source, std::size_t bytes) noexcept;
};

// The kernels that this machine can run, fastest first. The last one is plain memcpy.
[[nodiscard]] std::span<const CopyKernel> copy_kernels() noexcept;

// `target` and `source` must not overlap. Any alignment, any size.
void copy_bytes(std::byte* target, const std::byte* source, std::size_t bytes) noexcept;
void store_fence() noexcept;
[[nodiscard]] const char* copy_kernel_name() noexcept;  // of copy_bytes()

}  // namespace kvmem
