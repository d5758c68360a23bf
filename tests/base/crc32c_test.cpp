#include "base/crc32c.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "base/crc32c_fold.hpp"

namespace kvmem {
namespace {

using Bytes = std::vector<std::byte>;

Bytes noise(std::size_t bytes) {
  std::minstd_rand random(1);
  Bytes some(bytes);
  for (auto& byte : some) byte = static_cast<std::byte>(random() >> 8);
  return some;
}

// One bit at a time, by the definition.
std::uint32_t bitwise(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  crc = ~crc;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= std::to_integer<std::uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

Bytes filled(std::byte value) { return Bytes(32, value); }

Bytes counting(bool up) {
  Bytes bytes(32);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(up ? i : 31 - i);
  return bytes;
}

// The SCSI read command of the RFC.
Bytes command() {
  const unsigned char words[] = {0x01, 0xc0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                                 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00,
                                 0x00, 0x00, 0x04, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00,
                                 0x00, 0x18, 0x28, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                                 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
  Bytes bytes(sizeof words);
  std::memcpy(bytes.data(), words, sizeof words);
  return bytes;
}

class Crc32c : public ::testing::TestWithParam<Crc32cKernel> {
 protected:
  std::uint32_t sum(const Bytes& bytes) { return GetParam().sum(0, bytes.data(), bytes.size()); }
};

TEST_P(Crc32c, GivesTheVectorsOfTheRfc) {
  EXPECT_EQ(sum(filled(std::byte{0})), 0x8a9136aaU);
  EXPECT_EQ(sum(filled(std::byte{0xFF})), 0x62a8ab43U);
  EXPECT_EQ(sum(counting(true)), 0x46dd794eU);
  EXPECT_EQ(sum(counting(false)), 0x113fdb5cU);
  EXPECT_EQ(sum(command()), 0xd9963a56U);
  const std::string_view digits = "123456789";
  Bytes text(digits.size());
  std::memcpy(text.data(), digits.data(), digits.size());
  EXPECT_EQ(sum(text), 0xe3069283U);
  EXPECT_EQ(sum({}), 0U);
}

TEST_P(Crc32c, EverySizeUpToAPageEqualsTheDefinition) {
  const Bytes data = noise(4096 + 64);
  for (const std::size_t at : {0U, 1U, 7U, 63U}) {
    std::uint32_t expected = 0x12345678;
    for (std::size_t bytes = 0; bytes <= 4096; ++bytes) {
      ASSERT_EQ(GetParam().sum(0x12345678, data.data() + at, bytes), expected)
          << bytes << " bytes at " << at;
      expected = bitwise(expected, data.data() + at + bytes, 1);
    }
  }
}

TEST_P(Crc32c, EveryAlignmentEqualsTheDefinition) {
  const Bytes data = noise(70'000);
  for (std::size_t at = 0; at < 64; ++at) {
    for (const std::size_t bytes : {5UL, 511UL, 768UL, 1537UL, 3333UL, 12'288UL, 69'900UL}) {
      ASSERT_EQ(GetParam().sum(0, data.data() + at, bytes), bitwise(0, data.data() + at, bytes))
          << bytes << " bytes at " << at;
    }
  }
}

TEST_P(Crc32c, CanBeGoneOnWithAtAnyByte) {
  const Bytes data = noise(3000);
  const std::uint32_t whole = bitwise(0, data.data(), data.size());
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    const std::uint32_t first = GetParam().sum(0, data.data(), cut);
    ASSERT_EQ(GetParam().sum(first, data.data() + cut, data.size() - cut), whole) << cut;
  }
}

TEST_P(Crc32c, TwoCombineToThatOfBoth) {
  const Bytes data = noise(3000);
  const std::uint32_t whole = bitwise(0, data.data(), data.size());
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    const std::uint32_t first = bitwise(0, data.data(), cut);
    const std::uint32_t second = bitwise(0, data.data() + cut, data.size() - cut);
    ASSERT_EQ(GetParam().combine(first, second, data.size() - cut), whole) << cut;
  }
}

// Doubling what follows is combining twice, so each size is held to half of it.
TEST_P(Crc32c, CombinesOverAnyNumberOfBytes) {
  const auto combine = GetParam().combine;
  for (std::uint64_t bytes = 1; bytes < std::uint64_t{1} << 63; bytes *= 2) {
    const std::uint32_t twice = combine(combine(0x9d3f00b1, 0, bytes), 0, bytes);
    ASSERT_EQ(combine(0x9d3f00b1, 0, 2 * bytes), twice) << bytes;
    ASSERT_EQ(combine(0x9d3f00b1, 0, 2 * bytes + 1), combine(twice, 0, 1)) << bytes;
  }
}

std::string alphanumeric(const ::testing::TestParamInfo<Crc32cKernel>& kernel) {
  std::string name = kernel.param.name;
  std::erase_if(name, [](unsigned char letter) { return std::isalnum(letter) == 0; });
  return name;
}

INSTANTIATE_TEST_SUITE_P(Kernels, Crc32c,
                         ::testing::ValuesIn(crc32c_kernels().begin(), crc32c_kernels().end()),
                         alphanumeric);

TEST(Crc32cChoice, TheTableIsThereEverywhereAndLast) {
  EXPECT_STREQ(crc32c_kernels().back().name, "table");
}

TEST(Crc32cChoice, TheOneInUseSumsAndCombines) {
  const Bytes data = noise(5000);
  const std::uint32_t first = crc32c(0, data.data(), 2000);
  const std::uint32_t second = crc32c(0, data.data() + 2000, 3000);
  EXPECT_EQ(first, bitwise(0, data.data(), 2000));
  EXPECT_EQ(crc32c_combine(first, second, 3000), bitwise(0, data.data(), 5000));
}

TEST(Crc32cFold, ThePowersOfXAreThoseOfTheRegister) {
  std::uint32_t power = 0x80000000;
  for (std::uint64_t exponent = 0; exponent < 1000; ++exponent) {
    ASSERT_EQ(crc32c_fold::power_of_x(exponent), power);
    power = (power >> 1) ^ ((power & 1) != 0 ? 0x82F63B78U : 0U);
  }
  EXPECT_EQ(crc32c_fold::power_of_x(0x7FFFFFFF), crc32c_fold::power_of_x(0));
}

}  // namespace
}  // namespace kvmem
