#include "tier/slot_header.hpp"

#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "base/crc32c.hpp"

namespace kvmem::test {
namespace {

SlotHeader random_header(unsigned seed) {
  std::mt19937_64 random(seed);
  SlotHeader header{.state = SlotHeader::State::written,
                    .tier = random(),
                    .slot = random(),
                    .generation = random(),
                    .payload_bytes = random(),
                    .group = static_cast<std::uint32_t>(random()),
                    .data_sum = static_cast<std::uint32_t>(random())};
  header.key.size = 16 + seed % 49;
  for (std::size_t i = 0; i < header.key.size; ++i)
    header.key.bytes[i] = static_cast<std::byte>(random());
  for (std::byte& byte : header.manifest) byte = static_cast<std::byte>(random());
  return header;
}

TEST(SlotHeader, IsReadAsItWasWritten) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    const SlotHeader header = random_header(seed);
    HeaderBlock block;
    encode(header, block);
    SlotHeader read;
    ASSERT_EQ(decode(block, read), DiskOutcome::ok);
    EXPECT_EQ(read.tier, header.tier);
    EXPECT_EQ(read.slot, header.slot);
    EXPECT_EQ(read.generation, header.generation);
    EXPECT_EQ(read.payload_bytes, header.payload_bytes);
    EXPECT_EQ(read.manifest, header.manifest);
    EXPECT_EQ(read.group, header.group);
    EXPECT_EQ(read.data_sum, header.data_sum);
    EXPECT_EQ(read.key, header.key);
  }
}

TEST(SlotHeader, WithAnyOfItsBitsFlippedIsNotBelieved) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    HeaderBlock block;
    encode(random_header(seed), block);
    SlotHeader read;
    for (std::size_t bit = 0; bit < disk_page_bytes * 8; ++bit) {
      block.bytes[bit / 8] ^= std::byte{1} << bit % 8;
      ASSERT_NE(decode(block, read), DiskOutcome::ok) << "bit " << bit;
      block.bytes[bit / 8] ^= std::byte{1} << bit % 8;
    }
    ASSERT_EQ(decode(block, read), DiskOutcome::ok);
  }
}

// The bytes of docs/DISK_FORMAT.md: a change of the layout needs a new version.
TEST(SlotHeader, LiesOnDiskAsTheDocumentSays) {
  SlotHeader header{.state = SlotHeader::State::written,
                    .tier = 0x1111111111111111,
                    .slot = 0x2222222222222222,
                    .generation = 0x3333333333333333,
                    .payload_bytes = 0x4444444444444444,
                    .group = 0x66666666,
                    .data_sum = 0x99999999};
  header.manifest.fill(std::byte{0x55});
  header.key.size = 20;
  std::fill_n(header.key.bytes.begin(), 20, std::byte{0x88});
  std::string expected = "KVMSLOT\n";
  const auto add = [&](std::size_t count, char byte) { expected.append(count, byte); };
  add(1, 2), add(3, 0);  // version
  add(1, 1), add(3, 0);  // state
  add(8, 0x11), add(8, 0x22), add(8, 0x33), add(8, 0x44);
  add(16, 0x55), add(4, 0x66), add(1, 20), add(3, 0);
  add(20, '\x88'), add(44, 0), add(4, '\x99');
  add(4092 - expected.size(), 0);
  const std::uint32_t sum = crc32c(0, expected.data(), expected.size());
  expected.append(reinterpret_cast<const char*>(&sum), 4);
  HeaderBlock block;
  encode(header, block);
  EXPECT_EQ(std::memcmp(block.bytes.data(), expected.data(), expected.size()), 0);
}

TEST(SlotHeader, OfZerosIsEmptyAndOfAnotherVersionIsSaidToBe) {
  HeaderBlock block;
  SlotHeader read;
  EXPECT_EQ(decode(block, read), DiskOutcome::empty);
  encode(random_header(1), block);
  block.bytes[8] = std::byte{1};
  EXPECT_EQ(decode(block, read), DiskOutcome::bad_version);
}

TEST(SlotHeader, BindsTheSumOfThePayloadToEachFact) {
  const SlotHeader header = [] {
    SlotHeader made = random_header(7);
    made.payload_bytes = 100;
    return made;
  }();
  constexpr std::uint32_t payload_sum = 0x12345678;
  const std::uint32_t sum = data_sum(header, payload_sum);
  const auto differs = [&](auto change) {
    SlotHeader other = header;
    change(other);
    return data_sum(other, payload_sum) != sum;
  };
  EXPECT_TRUE(differs([](SlotHeader& h) { ++h.tier; }));
  EXPECT_TRUE(differs([](SlotHeader& h) { ++h.slot; }));
  EXPECT_TRUE(differs([](SlotHeader& h) { ++h.generation; }));
  EXPECT_TRUE(differs([](SlotHeader& h) { ++h.payload_bytes; }));
  EXPECT_TRUE(differs([](SlotHeader& h) { ++h.group; }));
  EXPECT_TRUE(differs([](SlotHeader& h) { h.key.bytes[0] ^= std::byte{1}; }));
  EXPECT_TRUE(differs([](SlotHeader& h) { h.manifest[15] ^= std::byte{1}; }));
  EXPECT_FALSE(differs([](SlotHeader& h) { ++h.data_sum; }));
  EXPECT_NE(data_sum(header, payload_sum + 1), sum);
}

// As docs/DISK_FORMAT.md has it: the sum over the facts, gone on with over the payload.
TEST(SlotHeader, HasTheSumOfItsFactsAndThePayloadInOneGo) {
  SlotHeader header = random_header(3);
  std::vector<std::byte> payload(5000);
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<std::byte>(i * 7);
  header.payload_bytes = payload.size();
  HeaderBlock block;
  encode(header, block);
  const std::uint32_t facts = crc32c(0, block.bytes.data(), 136);
  EXPECT_EQ(data_sum(header, crc32c(0, payload.data(), payload.size())),
            crc32c(facts, payload.data(), payload.size()));
}

}  // namespace
}  // namespace kvmem::test
