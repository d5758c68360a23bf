// One group's blocks on a device, in ordinary memory; what is in a block follows from key and
// group.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "copy/kv_layout.hpp"
#include "support/declared_memory.hpp"

namespace kvmem::test {

// Groups differ in size, and each block is two segments in regions with gaps.
class GroupMemory {
 public:
  GroupMemory(const std::shared_ptr<Device>& device, std::size_t blocks, std::size_t group)
      : memory_(device->info().name),
        blocks_(blocks),
        group_(group),
        payloads_{40 + 8 * group, 24},
        bytes_((payloads_[0] + payloads_[1] + 2 * gap) * blocks),
        declared_(device, bytes_.data(), bytes_.size()) {}

  [[nodiscard]] KVLayout layout() const {
    std::vector<Region> regions;
    for (std::size_t r = 0; r < payloads_.size(); ++r) {
      Region region;
      region.address = reinterpret_cast<std::uintptr_t>(bytes_.data()) + start(r);
      region.stride_bytes = payloads_[r] + gap;
      region.payload_bytes = payloads_[r];
      region.block_count = blocks_;
      region.memory = memory_;
      region.stage = static_cast<std::int64_t>(r);
      regions.push_back(region);
    }
    return KVLayout(std::move(regions));
  }
  [[nodiscard]] std::size_t block_bytes() const { return payloads_[0] + payloads_[1]; }

  void fill(BlockId block, std::uint64_t key) {
    each_byte(block, [&](std::byte& byte, std::size_t at) { byte = pattern(key, at); });
  }
  void spoil(BlockId block) {
    each_byte(block, [](std::byte& byte, std::size_t) { byte ^= std::byte{0x5A}; });
  }
  [[nodiscard]] bool holds(BlockId block, std::uint64_t key) {
    bool equal = true;
    each_byte(block, [&](const std::byte& byte, std::size_t at) {
      equal = equal && byte == pattern(key, at);
    });
    return equal;
  }

 private:
  static constexpr std::size_t gap = 8;

  [[nodiscard]] std::size_t start(std::size_t region) const {
    return region == 0 ? 0 : (payloads_[0] + gap) * blocks_;
  }
  [[nodiscard]] std::byte pattern(std::uint64_t key, std::size_t at) const {
    const std::uint64_t mixed =
        (key * 8 + group_ + 1) * 0x9E3779B97F4A7C15U + at * 0xBF58476D1CE4E5B9U;
    return static_cast<std::byte>((mixed ^ mixed >> 29U) * 0x94D049BB133111EBU >> 56U);
  }
  template <class Visit>
  void each_byte(BlockId block, const Visit& visit) {
    std::size_t at = 0;
    for (std::size_t r = 0; r < payloads_.size(); ++r) {
      const std::size_t first = start(r) + static_cast<std::size_t>(block) * (payloads_[r] + gap);
      for (std::size_t i = 0; i < payloads_[r]; ++i) visit(bytes_[first + i], at++);
    }
  }

  std::string memory_;
  std::size_t blocks_, group_;
  std::array<std::size_t, 2> payloads_;
  std::vector<std::byte> bytes_;
  DeclaredMemory declared_;
};

}  // namespace kvmem::test
