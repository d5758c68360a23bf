// What a CRC32C is made of: remainders modulo the polynomial, and the fold by carry-less
// multiplication. For whoever sums bytes in passing, as the copy kernels do; else: crc32c.hpp.
//
// Remainders are reflected: bit 31 is the coefficient of 1, bit 0 that of x^31. The product of two
// reflected numbers comes out one bit off, and crc32 instructions multiply by x^32 besides, so each
// factor below is short of 33 powers of x. The fold is that of Gopal et al., Fast CRC Computation
// for Generic Polynomials Using PCLMULQDQ Instruction (Intel, 2009).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvmem::crc32c_fold {

inline constexpr std::uint32_t polynomial = 0x82F63B78;  // 0x1EDC6F41 reflected

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 0x80000000; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? polynomial : 0);
  }
  return product;
}

constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
  std::uint32_t power = 0x80000000, square = 0x40000000;  // 1 and x
  for (; exponent != 0; exponent >>= 1, square = multiply(square, square)) {
    if ((exponent & 1) != 0) power = multiply(power, square);
  }
  return power;
}

#if defined(__x86_64__)

// Moves the 16 bytes of each lane this far towards the end of the data.
struct Distance {
  long long low, high;  // factors of the two halves of a lane
};

constexpr Distance distance(std::uint64_t bytes) {
  return {power_of_x(8 * bytes + 64 - 33), power_of_x(8 * bytes - 33)};
}

// A line of 64 bytes behind another one: the sum so far, moved by `distance`, and `line`.
__attribute__((target("avx512f,vpclmulqdq"), always_inline)) inline __m512i fold(
    __m512i sum, __m512i distance, __m512i line) noexcept {
  constexpr int all_three_differ = 0x96;  // a ^ b ^ c
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, distance, 0x00),
                                   _mm512_clmulepi64_epi128(sum, distance, 0x11), line,
                                   all_three_differ);
}

__attribute__((target("avx512f"), always_inline)) inline __m512i in_each_lane(
    Distance by) noexcept {
  return _mm512_set4_epi64(by.high, by.low, by.high, by.low);
}

// What fold() needs besides AVX-512.
inline bool can_fold() noexcept {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

#endif

}  // namespace kvmem::crc32c_fold
