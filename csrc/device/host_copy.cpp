#include "device/host_copy.hpp"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvmem {

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool sanitized = true;  // streaming stores are invisible to a sanitizer, memcpy is not
#else
constexpr bool sanitized = false;
#endif

void copy_plain(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
  std::memcpy(target, source, bytes);
}

#if defined(__x86_64__)

constexpr std::size_t line_bytes = 64;
// Below this, streaming gains nothing.
constexpr std::size_t smallest_streamed_bytes = 2048;

// Streams four quarters of whole lines each. The target is aligned to a line.
using QuarterLoop = void (*)(std::byte* target, const std::byte* source, std::size_t quarter_bytes);

void copy_streamed(std::byte* target, const std::byte* source, std::size_t bytes,
                   QuarterLoop stream_quarters) noexcept {
  if (bytes < smallest_streamed_bytes) return copy_plain(target, source, bytes);
  const std::size_t past_line = reinterpret_cast<std::uintptr_t>(target) % line_bytes;
  const std::size_t head = past_line == 0 ? 0 : line_bytes - past_line;
  const std::size_t quarter = (bytes - head) / (4 * line_bytes) * line_bytes;
  const std::size_t tail = head + 4 * quarter;
  std::memcpy(target, source, head);
  stream_quarters(target + head, source + head, quarter);
  std::memcpy(target + tail, source + tail, bytes - tail);
}

__attribute__((target("avx512f"))) void stream_quarters_avx512(std::byte* target,
                                                               const std::byte* source,
                                                               std::size_t quarter_bytes) {
  for (std::size_t line = 0; line < quarter_bytes; line += line_bytes) {
#pragma GCC unroll 4
    for (std::size_t quarter = 0; quarter < 4; ++quarter) {
      const std::size_t at = line + quarter * quarter_bytes;
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), _mm512_loadu_si512(source + at));
    }
  }
}

__attribute__((target("avx2"))) void stream_quarters_avx2(std::byte* target,
                                                          const std::byte* source,
                                                          std::size_t quarter_bytes) {
  for (std::size_t line = 0; line < quarter_bytes; line += line_bytes) {
#pragma GCC unroll 4
    for (std::size_t quarter = 0; quarter < 4; ++quarter) {
      const std::size_t at = line + quarter * quarter_bytes;
      const auto* from = reinterpret_cast<const __m256i*>(source + at);
      auto* to = reinterpret_cast<__m256i*>(target + at);
      const __m256i low = _mm256_loadu_si256(from);
      const __m256i high = _mm256_loadu_si256(from + 1);
      _mm256_stream_si256(to, low);  // both halves of a line at once, so that it leaves in one go
      _mm256_stream_si256(to + 1, high);
    }
  }
}

void copy_avx512(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
  copy_streamed(target, source, bytes, stream_quarters_avx512);
}

void copy_avx2(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
  copy_streamed(target, source, bytes, stream_quarters_avx2);
}

constexpr CopyKernel kernels[] = {
    {"avx512 4-stream", copy_avx512}, {"avx2 4-stream", copy_avx2}, {"memcpy", copy_plain}};

std::size_t first_supported() noexcept {
  if (__builtin_cpu_supports("avx512f")) return 0;
  return __builtin_cpu_supports("avx2") ? 1 : 2;
}

#else

constexpr CopyKernel kernels[] = {{"memcpy", copy_plain}};

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

void copy_bytes(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
  chosen().copy(target, source, bytes);
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
