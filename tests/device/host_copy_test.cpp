#include "device/host_copy.hpp"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/crc32c.hpp"

namespace kvmem {
namespace {

using Bytes = std::vector<std::byte>;

Bytes noise(std::size_t bytes) {
  std::minstd_rand random(1);
  Bytes some(bytes);
  for (auto& byte : some) byte = static_cast<std::byte>(random() >> 8);
  return some;
}

// A target between guard bytes. Both begin at an address that is a multiple of 64.
struct alignas(64) Area {
  static constexpr std::size_t guard = 128;
  static constexpr std::size_t most = 20'000;
  std::byte bytes[guard + most + guard];
};

class HostCopy : public ::testing::TestWithParam<CopyKernel> {
 protected:
  HostCopy() : source_(noise(Area::most + 64)) {}

  void expect_exact(std::size_t bytes, std::size_t target_at, std::size_t source_at) {
    std::memset(area_->bytes, 0xA5, sizeof area_->bytes);
    std::memcpy(expected_->bytes, area_->bytes, sizeof area_->bytes);
    std::byte* const target = area_->bytes + Area::guard + target_at;
    std::memcpy(expected_->bytes + Area::guard + target_at, source_.data() + source_at, bytes);
    const auto* next = reinterpret_cast<const std::byte*>(std::uintptr_t{64});  // never mapped
    GetParam().copy(target, source_.data() + source_at, bytes, next);
    store_fence();
    ASSERT_EQ(std::memcmp(area_->bytes, expected_->bytes, sizeof area_->bytes), 0)
        << bytes << " bytes from " << source_at << " to " << target_at;

    std::memset(area_->bytes, 0xA5, sizeof area_->bytes);
    const std::uint32_t crc =
        GetParam().copy_crc32c(target, source_.data() + source_at, bytes, before, nullptr);
    store_fence();
    ASSERT_EQ(crc, crc32c(before, source_.data() + source_at, bytes))
        << bytes << " bytes from " << source_at << " to " << target_at;
    ASSERT_EQ(std::memcmp(area_->bytes, expected_->bytes, sizeof area_->bytes), 0)
        << bytes << " bytes from " << source_at << " to " << target_at << " with a CRC";
  }

 private:
  static constexpr std::uint32_t before = 0x5eed1234;  // the CRC of what came before

  Bytes source_;
  std::unique_ptr<Area> area_ = std::make_unique<Area>();
  std::unique_ptr<Area> expected_ = std::make_unique<Area>();
};

TEST_P(HostCopy, EverySmallSizeIsExactAtEveryAlignmentOfTheTarget) {
  for (std::size_t bytes = 0; bytes <= 130; ++bytes) {
    for (std::size_t at = 0; at < 64; ++at) expect_exact(bytes, at, at * 7 % 64);
  }
}

TEST_P(HostCopy, SizesAroundTheStreamingThresholdAreExactAtEveryAlignment) {
  for (const std::size_t bytes : {2047U, 2048U, 2049U, 2111U, 2112U, 2113U, 2303U, 2304U, 2368U}) {
    for (std::size_t target = 0; target < 64; ++target) {
      for (std::size_t source = 0; source < 64; ++source) expect_exact(bytes, target, source);
    }
  }
}

TEST_P(HostCopy, EverySizeOfAFewLinesMoreIsExact) {
  for (std::size_t bytes = 4000; bytes < 4000 + 5 * 64; ++bytes) {
    for (const std::size_t at : {0U, 1U, 32U, 63U}) expect_exact(bytes, at, (at + 5) % 64);
  }
}

TEST_P(HostCopy, RandomSizesAndAlignmentsAreExact) {
  std::minstd_rand random(2);
  for (int i = 0; i < 5000; ++i) {
    expect_exact(random() % (Area::most - 64), random() % 64, random() % 64);
  }
}

// Sizes at which a quarter is just shorter or longer than what is read ahead of it.
TEST_P(HostCopy, SizesAroundWhatIsReadAheadAreExact) {
  for (const std::size_t lines : {127U, 128U, 129U, 131U, 132U, 133U, 140U}) {
    for (const std::size_t more : {0U, 1U, 63U}) {
      for (const std::size_t at : {0U, 1U, 63U}) expect_exact(lines * 64 + more, at, 64 - at);
    }
  }
}

TEST_P(HostCopy, ALargeSegmentIsExact) {
  const Bytes source = noise((std::size_t{5} << 20) + 77);
  Bytes target(source.size());
  GetParam().copy(target.data(), source.data(), source.size(), nullptr);
  store_fence();
  EXPECT_TRUE(target == source);
}

TEST_P(HostCopy, ALargeSegmentIsExactWithItsCrc) {
  const Bytes source = noise((std::size_t{5} << 20) + 77);
  Bytes target(source.size());
  const std::uint32_t crc =
      GetParam().copy_crc32c(target.data(), source.data(), source.size(), 0, source.data());
  store_fence();
  EXPECT_TRUE(target == source);
  EXPECT_EQ(crc, crc32c(0, source.data(), source.size()));
}

TEST_P(HostCopy, TheCrcOfSegmentsIsThatOfTheirBytesBehindOneAnother) {
  const Bytes source = noise(100'000);
  Bytes target(source.size());
  std::uint32_t crc = 0;
  for (std::size_t at = 0, bytes = 1; at < source.size(); at += bytes, bytes = bytes * 3 + 1) {
    bytes = std::min(bytes, source.size() - at);
    crc = GetParam().copy_crc32c(target.data() + at, source.data() + at, bytes, crc,
                                 source.data() + at + bytes);
  }
  store_fence();
  EXPECT_EQ(target, source);
  EXPECT_EQ(crc, crc32c(0, source.data(), source.size()));
}

std::string alphanumeric(const ::testing::TestParamInfo<CopyKernel>& kernel) {
  std::string name = kernel.param.name;
  std::erase_if(name, [](unsigned char letter) { return std::isalnum(letter) == 0; });
  return name;
}

INSTANTIATE_TEST_SUITE_P(Kernels, HostCopy,
                         ::testing::ValuesIn(copy_kernels().begin(), copy_kernels().end()),
                         alphanumeric);

TEST(HostCopyChoice, TheKernelInUseIsOneOfThoseThatTheMachineHas) {
  const std::string name = copy_kernel_name();
  EXPECT_TRUE(std::ranges::any_of(copy_kernels(), [&](auto& one) { return one.name == name; }));
  EXPECT_STREQ(copy_kernels().back().name, "memcpy");
}

TEST(HostCopyChoice, CopyBytesCopies) {
  const Bytes source = noise(10'000);
  Bytes target(source.size()), again(source.size());
  copy_bytes(target.data(), source.data(), source.size());
  const std::uint32_t crc = copy_bytes_crc32c(again.data(), source.data(), source.size(), 0);
  store_fence();
  EXPECT_EQ(target, source);
  EXPECT_EQ(again, source);
  EXPECT_EQ(crc, crc32c(0, source.data(), source.size()));
}

}  // namespace
}  // namespace kvmem
