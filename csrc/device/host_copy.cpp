#include "device/host_copy.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "base/crc32c.hpp"
#include "base/crc32c_fold.hpp"

namespace kvmem {

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool sanitized = true;  // streaming stores are invisible to a sanitizer, memcpy is not
#else
constexpr bool sanitized = false;
#endif

void copy_plain(std::byte* target, const std::byte* source, std::size_t bytes,
                const std::byte* /*next*/) noexcept {
  std::memcpy(target, source, bytes);
}

using CopyFunction = decltype(CopyKernel::copy);

// Reads each tile twice, but the second time from a cache.
template <CopyFunction copy>
std::uint32_t copy_then_sum(std::byte* target, const std::byte* source, std::size_t bytes,
                            std::uint32_t crc, const std::byte* next) noexcept {
  constexpr std::size_t tile_bytes = std::size_t{32} << 10;
  while (bytes > 0) {
    const std::size_t tile = std::min(bytes, tile_bytes);
    copy(target, source, tile, bytes > tile ? source + tile : next);
    crc = crc32c(crc, source, tile);
    target += tile;
    source += tile;
    bytes -= tile;
  }
  return crc;
}

#if defined(__x86_64__)

constexpr std::size_t line_bytes = 64;
constexpr std::size_t ahead_bytes = 2048;  // of each quarter; 1 and 4 KiB are about as good
// Below this, streaming gains nothing.
constexpr std::size_t smallest_streamed_bytes = 2048;

// Four quarters of whole lines, the target aligned to a line; `tail` is what they leave over.
struct Quarters {
  std::size_t head, quarter, tail;
};

Quarters cut(const std::byte* target, std::size_t bytes) noexcept {
  const std::size_t past_line = reinterpret_cast<std::uintptr_t>(target) % line_bytes;
  const std::size_t head = past_line == 0 ? 0 : line_bytes - past_line;
  const std::size_t quarter = (bytes - head) / (4 * line_bytes) * line_bytes;
  return {head, quarter, bytes - head - 4 * quarter};
}

// What is fetched while the line at `line` of a quarter is copied: what is to be copied soon. The
// other quarters fetch as far behind it as they lie apart.
const std::byte* ahead_of(std::size_t line, const std::byte* source, std::size_t quarter,
                          const std::byte* next) noexcept {
  const std::size_t soon = line + std::min(quarter, ahead_bytes);
  return soon < quarter ? source + soon : next + (soon - quarter);
}

// Copies four quarters that lie one behind the other.
using QuarterLoop = void (*)(std::byte* target, const std::byte* source, std::size_t quarter,
                             const std::byte* next) noexcept;

__attribute__((target("avx512f"))) void stream_avx512(std::byte* target, const std::byte* source,
                                                      std::size_t quarter,
                                                      const std::byte* next) noexcept {
  for (std::size_t line = 0; line < quarter; line += line_bytes) {
    const std::byte* const ahead = ahead_of(line, source, quarter, next);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t at = line + i * quarter;
      _mm_prefetch(ahead + i * quarter, _MM_HINT_T0);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), _mm512_loadu_si512(source + at));
    }
  }
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* target, const std::byte* source,
                                                 std::size_t quarter,
                                                 const std::byte* next) noexcept {
  for (std::size_t line = 0; line < quarter; line += line_bytes) {
    const std::byte* const ahead = ahead_of(line, source, quarter, next);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t at = line + i * quarter;
      _mm_prefetch(ahead + i * quarter, _MM_HINT_T0);
      const auto* from = reinterpret_cast<const __m256i*>(source + at);
      auto* to = reinterpret_cast<__m256i*>(target + at);
      const __m256i low = _mm256_loadu_si256(from);
      const __m256i high = _mm256_loadu_si256(from + 1);
      _mm256_stream_si256(to, low);  // both halves of a line at once, so that it leaves in one go
      _mm256_stream_si256(to + 1, high);
    }
  }
}

template <QuarterLoop stream>
void copy_streamed(std::byte* target, const std::byte* source, std::size_t bytes,
                   const std::byte* next) noexcept {
  if (bytes < smallest_streamed_bytes) return copy_plain(target, source, bytes, next);
  const Quarters cuts = cut(target, bytes);
  const std::size_t tail = bytes - cuts.tail;
  std::memcpy(target, source, cuts.head);
  stream(target + cuts.head, source + cuts.head, cuts.quarter, next == nullptr ? source : next);
  std::memcpy(target + tail, source + tail, cuts.tail);
}

// Returns the raw register behind all four quarters, from that before them. Each quarter is folded
// by itself to the remainder of one line.
__attribute__((target("avx512f,vpclmulqdq"))) std::uint32_t stream_and_sum_avx512(
    std::byte* target, const std::byte* source, std::size_t quarter, const std::byte* next,
    std::uint32_t raw) noexcept {
  const __m512i by_line = crc32c_fold::in_each_lane(crc32c_fold::distance(line_bytes));
  __m512i sums[4] = {};
  for (std::size_t line = 0; line < quarter; line += line_bytes) {
    const std::byte* const ahead = ahead_of(line, source, quarter, next);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t at = line + i * quarter;
      _mm_prefetch(ahead + i * quarter, _MM_HINT_T0);
      const __m512i bytes = _mm512_loadu_si512(source + at);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), bytes);
      sums[i] = crc32c_fold::fold(sums[i], by_line, bytes);
    }
  }
  std::byte remainders[4][line_bytes];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 4; ++i) _mm512_storeu_si512(remainders[i], sums[i]);
  for (const auto& remainder : remainders) {
    const std::uint32_t of_quarter = ~crc32c(~0U, remainder, line_bytes);  // from raw zero
    raw = crc32c_combine(raw, of_quarter, quarter);
  }
  return raw;
}

std::uint32_t copy_and_sum_avx512(std::byte* target, const std::byte* source, std::size_t bytes,
                                  std::uint32_t crc, const std::byte* next) noexcept {
  constexpr auto plain = copy_then_sum<copy_plain>;
  if (bytes < smallest_streamed_bytes) return plain(target, source, bytes, crc, next);
  const Quarters cuts = cut(target, bytes);
  const std::size_t tail = bytes - cuts.tail;
  crc = plain(target, source, cuts.head, crc, next);
  crc = ~stream_and_sum_avx512(target + cuts.head, source + cuts.head, cuts.quarter,
                               next == nullptr ? source : next, ~crc);
  return plain(target + tail, source + tail, cuts.tail, crc, next);
}

constexpr CopyFunction copy_avx512 = copy_streamed<stream_avx512>;
constexpr CopyFunction copy_avx2 = copy_streamed<stream_avx2>;

constexpr CopyKernel kernels[] = {
    {"avx512 4-stream", copy_avx512, copy_and_sum_avx512},
    {"avx512 4-stream, crc in tiles", copy_avx512, copy_then_sum<copy_avx512>},
    {"avx2 4-stream", copy_avx2, copy_then_sum<copy_avx2>},
    {"memcpy", copy_plain, copy_then_sum<copy_plain>}};

std::size_t first_supported() noexcept {
  if (crc32c_fold::can_fold()) return 0;
  if (__builtin_cpu_supports("avx512f")) return 1;
  return __builtin_cpu_supports("avx2") ? 2 : 3;
}

#else

constexpr CopyKernel kernels[] = {{"memcpy", copy_plain, copy_then_sum<copy_plain>}};

std::size_t first_supported() noexcept { return 0; }

#endif

const CopyKernel& chosen() noexcept {
  static const CopyKernel kernel = sanitized ? copy_kernels().back() : copy_kernels().front();
  return kernel;
}

}  // namespace

std::span<const CopyKernel> copy_kernels() noexcept {
  return std::span(kernels).subspan(first_supported());
}

void copy_bytes(std::byte* target, const std::byte* source, std::size_t bytes,
                const std::byte* next) noexcept {
  chosen().copy(target, source, bytes, next);
}

std::uint32_t copy_bytes_crc32c(std::byte* target, const std::byte* source, std::size_t bytes,
                                std::uint32_t crc, const std::byte* next) noexcept {
  return chosen().copy_crc32c(target, source, bytes, crc, next);
}

void store_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

const char* copy_kernel_name() noexcept { return chosen().name; }

}  // namespace kvmem
