// CRC32C: the polynomial 0x1EDC6F41 (Castagnoli), bits reflected, register preset to all ones and
// inverted at the end, as RFC 3720 (section 12.1, vectors in B.4) has it.
//
// A CRC can be gone on with: crc32c(crc32c(0, a), b) is that of a and b one behind the other.
// Any thread, any alignment, any size; nothing here throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvmem {

// `crc` is that of what came before, 0 at the beginning.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
// From the CRC of each to that of both. Linear, so it moves a raw register (neither preset nor
// inverted) by `bytes_of_second` too.
[[nodiscard]] std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second,
                                           std::uint64_t bytes_of_second) noexcept;

// Ways to do it, for tests and benchmarks.
struct Crc32cKernel {
  const char* name;
  std::uint32_t (*sum)(std::uint32_t crc, const std::byte* data, std::size_t bytes) noexcept;
  std::uint32_t (*combine)(std::uint32_t first, std::uint32_t second,
                           std::uint64_t bytes_of_second) noexcept;
};

// Those that this machine can run, fastest first. The last one is the table.
[[nodiscard]] std::span<const Crc32cKernel> crc32c_kernels() noexcept;

}  // namespace kvmem
