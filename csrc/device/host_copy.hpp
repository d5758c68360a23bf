// Copies bytes at the speed of memory, past the caches: what is offloaded is not read again soon.
//
// A segment is cut in four quarters that are streamed interleaved, each read two KiB ahead of where
// it is copied; at its end the next segment is read ahead already. So more lines are in flight than
// the processor's own prefetcher has, which begins anew at each page. Streaming stores are weakly
// ordered: whoever publishes the bytes to another thread calls store_fence() on the copying thread
// first. Any thread; nothing here throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvmem {

// `target` and `source` must not overlap. Any alignment, any size.
//
// `next` is where the next call will read: a hint that is best for a segment of the same size. It
// is never accessed, so it may be any address; null where nothing follows.
void copy_bytes(std::byte* target, const std::byte* source, std::size_t bytes,
                const std::byte* next = nullptr) noexcept;
// The same, and returns the CRC32C of the bytes behind those with the CRC `crc` (see
// base/crc32c.hpp). With AVX-512 and VPCLMULQDQ it is summed as the bytes pass; elsewhere tiles are
// copied and read again while they are in a cache, so the source must not change meanwhile. Nothing
// but benchmarks and tests calls it yet: it is for checksums of stored blocks.
[[nodiscard]] std::uint32_t copy_bytes_crc32c(std::byte* target, const std::byte* source,
                                              std::size_t bytes, std::uint32_t crc,
                                              const std::byte* next = nullptr) noexcept;
void store_fence() noexcept;
[[nodiscard]] const char* copy_kernel_name() noexcept;  // of both

struct CopyKernel {
  const char* name;
  void (*copy)(std::byte* target, const std::byte* source, std::size_t bytes,
               const std::byte* next) noexcept;
  std::uint32_t (*copy_crc32c)(std::byte* target, const std::byte* source, std::size_t bytes,
                               std::uint32_t crc, const std::byte* next) noexcept;
};

// The kernels that this machine can run, fastest first. The last one is plain memcpy.
[[nodiscard]] std::span<const CopyKernel> copy_kernels() noexcept;

}  // namespace kvmem
