#include "base/crc32c.hpp"

#include <array>
#include <cstring>

#include "base/crc32c_fold.hpp"

namespace kvmem {

namespace {

using crc32c_fold::multiply;
using crc32c_fold::power_of_x;

// ---- anywhere: eight tables, eight bytes a step ----

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[n][byte]: what `byte` leaves in the register when n more bytes have followed it.
constexpr Tables make_tables() {
  constexpr std::uint32_t one_byte = power_of_x(8);
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    tables[0][byte] = multiply(byte, one_byte);
    for (std::size_t n = 1; n < 8; ++n) tables[n][byte] = multiply(tables[n - 1][byte], one_byte);
  }
  return tables;
}

const Tables& tables() noexcept {
  static constexpr Tables made = make_tables();
  return made;
}

std::uint32_t sum_by_table(std::uint32_t crc, const std::byte* data, std::size_t bytes) noexcept {
  const Tables& of = tables();
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    const std::byte* const low = data;
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint32_t byte = (crc >> (8 * i)) & 0xFF;
      next ^= of[7 - i][byte ^ std::to_integer<std::uint32_t>(low[i])];
      next ^= of[3 - i][std::to_integer<std::uint32_t>(low[i + 4])];
    }
    crc = next;
  }
  for (; bytes > 0; --bytes, ++data) {
    crc = of[0][(crc & 0xFF) ^ std::to_integer<std::uint32_t>(*data)] ^ (crc >> 8);
  }
  return ~crc;
}

// x^(8 * 2^n - short_of) for each n: the factors that move a CRC by any number of bytes. The order
// of x divides 2^31 - 1, which is taken for what is less than nothing.
constexpr std::array<std::uint32_t, 64> make_steps(std::uint64_t short_of) {
  constexpr std::uint64_t order = 0x7FFFFFFF;
  std::array<std::uint32_t, 64> steps{};
  std::uint64_t exponent = 8;
  for (std::uint32_t& step : steps) {
    step = power_of_x((exponent + order - short_of) % order);
    exponent = exponent * 2 % order;
  }
  return steps;
}

std::uint32_t combine_anywhere(std::uint32_t first, std::uint32_t second,
                               std::uint64_t bytes_of_second) noexcept {
  static constexpr auto steps = make_steps(0);
  for (std::size_t n = 0; bytes_of_second != 0; ++n, bytes_of_second >>= 1) {
    if ((bytes_of_second & 1) != 0) first = multiply(first, steps[n]);
  }
  return first ^ second;
}

#if defined(__x86_64__)

// ---- SSE 4.2: the instruction, in three chains, since one alone waits for itself ----

#define KVMEM_TARGET __attribute__((target("sse4.2,pclmul")))

KVMEM_TARGET std::uint32_t combine_by_clmul(std::uint32_t first, std::uint32_t second,
                                            std::uint64_t bytes_of_second) noexcept {
  static constexpr auto steps = make_steps(33);
  for (std::size_t n = 0; bytes_of_second != 0; ++n, bytes_of_second >>= 1) {
    if ((bytes_of_second & 1) == 0) continue;
    const __m128i product =
        _mm_clmulepi64_si128(_mm_cvtsi64_si128(first), _mm_cvtsi64_si128(steps[n]), 0x00);
    const auto word = static_cast<std::uint64_t>(_mm_cvtsi128_si64(product));
    first = static_cast<std::uint32_t>(_mm_crc32_u64(0, word));
  }
  return first ^ second;
}

std::uint64_t word_at(const std::byte* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Of a raw register.
KVMEM_TARGET std::uint32_t one_chain(std::uint32_t raw, const std::byte* data,
                                     std::size_t bytes) noexcept {
  std::uint64_t sum = raw;
  for (; bytes >= 8; bytes -= 8, data += 8) sum = _mm_crc32_u64(sum, word_at(data));
  raw = static_cast<std::uint32_t>(sum);
  for (; bytes > 0; --bytes, ++data) {
    raw = _mm_crc32_u8(raw, std::to_integer<unsigned char>(*data));
  }
  return raw;
}

KVMEM_TARGET std::uint32_t sum_in_three_chains(std::uint32_t crc, const std::byte* data,
                                               std::size_t bytes) noexcept {
  constexpr std::size_t most_third = 4096;  // so that all three stay within what is fetched ahead
  std::uint32_t raw = ~crc;
  while (bytes >= 768) {
    // A power of two is one factor.
    std::size_t third = most_third;
    while (3 * third > bytes) third /= 2;
    std::uint64_t a = raw, b = 0, c = 0;
    for (std::size_t at = 0; at < third; at += 8) {
      a = _mm_crc32_u64(a, word_at(data + at));
      b = _mm_crc32_u64(b, word_at(data + third + at));
      c = _mm_crc32_u64(c, word_at(data + 2 * third + at));
    }
    const auto first = static_cast<std::uint32_t>(a), second = static_cast<std::uint32_t>(b);
    raw = combine_by_clmul(combine_by_clmul(first, second, third), static_cast<std::uint32_t>(c),
                           third);
    data += 3 * third;
    bytes -= 3 * third;
  }
  return ~one_chain(raw, data, bytes);
}

#undef KVMEM_TARGET

// ---- AVX-512: four lines at once, folded ----

__attribute__((target("avx512f,vpclmulqdq,sse4.2,pclmul"))) std::uint32_t sum_folded(
    std::uint32_t crc, const std::byte* data, std::size_t bytes) noexcept {
  using crc32c_fold::fold;
  constexpr std::size_t line = 64, step = 4 * line;
  if (bytes < 2 * step) return sum_in_three_chains(crc, data, bytes);
  const __m512i by_step = crc32c_fold::in_each_lane(crc32c_fold::distance(step));
  const __m512i by_line = crc32c_fold::in_each_lane(crc32c_fold::distance(line));
  __m512i sums[4];
  for (std::size_t i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(data + i * line);
  const __m128i before = _mm_cvtsi32_si128(static_cast<int>(~crc));
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(before));
  std::size_t at = step;
  for (; at + step <= bytes; at += step) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      sums[i] = fold(sums[i], by_step, _mm512_loadu_si512(data + at + i * line));
    }
  }
  __m512i sum = sums[0];
  for (std::size_t i = 1; i < 4; ++i) sum = fold(sum, by_line, sums[i]);
  for (; at + line <= bytes; at += line) sum = fold(sum, by_line, _mm512_loadu_si512(data + at));
  std::byte same_remainder[line];
  _mm512_storeu_si512(same_remainder, sum);
  return ~one_chain(one_chain(0, same_remainder, line), data + at, bytes - at);
}

constexpr Crc32cKernel kernels[] = {{"vpclmulqdq", sum_folded, combine_by_clmul},
                                    {"sse4.2", sum_in_three_chains, combine_by_clmul},
                                    {"table", sum_by_table, combine_anywhere}};

std::size_t first_supported() noexcept {
  if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return 2;
  return crc32c_fold::can_fold() ? 0 : 1;
}

#else

constexpr Crc32cKernel kernels[] = {{"table", sum_by_table, combine_anywhere}};

std::size_t first_supported() noexcept { return 0; }

#endif

const Crc32cKernel& chosen() noexcept {
  static const Crc32cKernel kernel = crc32c_kernels().front();
  return kernel;
}

}  // namespace

std::span<const Crc32cKernel> crc32c_kernels() noexcept {
  return std::span(kernels).subspan(first_supported());
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept {
  return chosen().sum(crc, static_cast<const std::byte*>(data), bytes);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second,
                             std::uint64_t bytes_of_second) noexcept {
  return chosen().combine(first, second, bytes_of_second);
}

}  // namespace kvmem
