#include "tier/slot_header.hpp"

#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "base/crc32c.hpp"

namespace kvmem {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

// As it lies on disk. The sum is over the whole block but itself.
struct OnDisk {
  std::array<char, 8> magic{};
  std::uint32_t version = 0;
  std::uint32_t state = 0;
  std::uint64_t tier = 0;
  std::uint64_t slot = 0;
  std::uint64_t generation = 0;
  std::uint64_t payload_bytes = 0;
  std::array<std::byte, 16> manifest{};
  std::uint32_t group = 0;
  std::uint32_t key_bytes = 0;
  std::array<std::byte, disk_key_bytes_max> key{};
  std::uint32_t data_sum = 0;
};
constexpr std::size_t facts_bytes = offsetof(OnDisk, data_sum);
constexpr std::size_t sum_offset = disk_page_bytes - sizeof(std::uint32_t);
constexpr std::array<char, 8> magic = {'K', 'V', 'M', 'S', 'L', 'O', 'T', '\n'};
static_assert(facts_bytes == 136 && std::is_trivially_copyable_v<OnDisk>);

OnDisk on_disk(const SlotHeader& header) noexcept {
  OnDisk out;
  out.magic = magic;
  out.version = disk_format_version;
  out.state = static_cast<std::uint32_t>(header.state);
  out.tier = header.tier;
  out.slot = header.slot;
  out.generation = header.generation;
  out.payload_bytes = header.payload_bytes;
  out.manifest = header.manifest;
  out.group = header.group;
  out.key_bytes = header.key.size;
  out.key = header.key.bytes;
  out.data_sum = header.data_sum;
  return out;
}

bool is_zero(const HeaderBlock& block) noexcept {
  return block.bytes[0] == std::byte{0} &&
         std::memcmp(block.bytes.data(), block.bytes.data() + 1, disk_page_bytes - 1) == 0;
}

}  // namespace

const char* name(DiskOutcome outcome) noexcept {
  static constexpr const char* names[] = {"ok",
                                          "empty",
                                          "torn",
                                          "bad_magic",
                                          "bad_version",
                                          "bad_header_sum",
                                          "foreign_tier",
                                          "misplaced",
                                          "other_manifest",
                                          "other_key",
                                          "other_generation",
                                          "other_size",
                                          "bad_data_sum",
                                          "truncated",
                                          "io_error",
                                          "shortage",
                                          "timed_out",
                                          "closed"};
  static_assert(std::size(names) == disk_outcomes);
  return names[static_cast<std::size_t>(outcome)];
}

void encode(const SlotHeader& header, HeaderBlock& block) noexcept {
  block.bytes.fill(std::byte{0});
  const OnDisk out = on_disk(header);
  std::memcpy(block.bytes.data(), &out, sizeof out);
  const std::uint32_t sum = crc32c(0, block.bytes.data(), sum_offset);
  std::memcpy(block.bytes.data() + sum_offset, &sum, sizeof sum);
}

DiskOutcome decode(const HeaderBlock& block, SlotHeader& header) noexcept {
  OnDisk in;
  std::memcpy(&in, block.bytes.data(), sizeof in);
  if (in.magic != magic) return is_zero(block) ? DiskOutcome::empty : DiskOutcome::bad_magic;
  if (in.version != disk_format_version) return DiskOutcome::bad_version;
  std::uint32_t sum = 0;
  std::memcpy(&sum, block.bytes.data() + sum_offset, sizeof sum);
  if (sum != crc32c(0, block.bytes.data(), sum_offset)) return DiskOutcome::bad_header_sum;
  header = {.state = static_cast<SlotHeader::State>(in.state),
            .tier = in.tier,
            .slot = in.slot,
            .generation = in.generation,
            .payload_bytes = in.payload_bytes,
            .manifest = in.manifest,
            .group = in.group,
            .data_sum = in.data_sum,
            .key = {.bytes = in.key, .size = in.key_bytes}};
  return header.state == SlotHeader::State::written ? DiskOutcome::ok : DiskOutcome::empty;
}

std::uint32_t data_sum(const SlotHeader& header, std::uint32_t payload_sum) noexcept {
  const OnDisk facts = on_disk(header);
  return crc32c_combine(crc32c(0, &facts, facts_bytes), payload_sum, header.payload_bytes);
}

}  // namespace kvmem
