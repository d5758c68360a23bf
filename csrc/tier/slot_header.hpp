// The 4 KiB in front of the payload of each slot, and again behind it, and what a reader makes of
// them. Every byte is in docs/DISK_FORMAT.md.
//
// A slot is believed only if its header says that it was written, here, by this tier, for this key,
// group and manifest, in this generation, and if both sums are right. The sum over the payload
// begins with that over all those facts, so a payload is bound to its key and manifest: an old
// header in front of new bytes, or the other way round, is a miss.
//
// No threads, no exceptions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvmem {

using Digest16 = std::array<std::byte, 16>;

inline constexpr std::size_t disk_page_bytes = 4096;  // of all offsets, sizes and buffers
inline constexpr std::size_t disk_key_bytes_max = 64;
inline constexpr std::uint32_t disk_format_version = 2;

// How a read, a write or the look at a header ended. Everything behind `ok` has a counter.
enum class DiskOutcome : std::uint8_t {
  ok,
  // Nothing was ever written there, or it was erased.
  empty,
  torn,  // a write began and did not end: the header behind the payload is another one
  // The header is none of ours.
  bad_magic,
  bad_version,
  bad_header_sum,
  // The header is good and stands for something else.
  foreign_tier,
  misplaced,
  other_manifest,
  other_key,  // or group
  other_generation,
  other_size,
  bad_data_sum,
  truncated,  // the file ends before the slot does
  io_error,   // `error` says which
  shortage,   // of memory or descriptors: nothing is wrong with the data
  timed_out,  // stood in the queue for too long
  closed,
};
inline constexpr std::size_t disk_outcomes = static_cast<std::size_t>(DiskOutcome::closed) + 1;
[[nodiscard]] const char* name(DiskOutcome outcome) noexcept;

struct DiskKey {
  std::array<std::byte, disk_key_bytes_max> bytes{};  // zeros behind the key
  std::uint32_t size = 0;
  friend bool operator==(const DiskKey&, const DiskKey&) = default;
};

// The first `size` bytes of one.
[[nodiscard]] inline DiskKey disk_key(std::span<const std::byte> key) noexcept {
  DiskKey made;
  made.size = static_cast<std::uint32_t>(std::min(key.size(), disk_key_bytes_max));
  std::copy_n(key.begin(), made.size, made.bytes.begin());
  return made;
}

struct SlotHeader {
  enum class State : std::uint32_t { empty = 0, written = 1 };

  State state = State::empty;
  std::uint64_t tier = 0;
  std::uint64_t slot = 0;
  std::uint64_t generation = 0;
  std::uint64_t payload_bytes = 0;
  Digest16 manifest{};
  std::uint32_t group = 0;
  std::uint32_t data_sum = 0;
  DiskKey key{};
};

struct alignas(disk_page_bytes) HeaderBlock {
  std::array<std::byte, disk_page_bytes> bytes{};
  friend bool operator==(const HeaderBlock& a, const HeaderBlock& b) noexcept {
    return std::memcmp(a.bytes.data(), b.bytes.data(), disk_page_bytes) == 0;
  }
};

void encode(const SlotHeader& header, HeaderBlock& block) noexcept;
// ok, empty, bad_magic, bad_version, bad_header_sum.
[[nodiscard]] DiskOutcome decode(const HeaderBlock& block, SlotHeader& header) noexcept;

// From the CRC32C of the payload: that of the header's facts gone on with over the payload.
[[nodiscard]] std::uint32_t data_sum(const SlotHeader& header, std::uint32_t payload_sum) noexcept;

}  // namespace kvmem
