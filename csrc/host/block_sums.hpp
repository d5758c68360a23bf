// The checksums of a pool's slots: one word each, a CRC32C of the block's payload or nothing.
//
// A sum is that of what the slot held when it was set. Whoever lets the slot be written again
// forgets it before that begins. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/types.hpp"

namespace kvmem {

class BlockSums {
 public:
  explicit BlockSums(std::size_t slots) : words_(slots) {}

  [[nodiscard]] std::optional<std::uint32_t> get(SlotIndex slot) const noexcept {
    const std::uint64_t word = words_[slot].load(std::memory_order_acquire);
    if ((word & known) == 0) return std::nullopt;
    return static_cast<std::uint32_t>(word);
  }
  void set(SlotIndex slot, std::uint32_t sum) noexcept {
    words_[slot].store(known | sum, std::memory_order_release);
  }
  void forget(std::span<const SlotIndex> slots) noexcept {
    for (const SlotIndex slot : slots) words_[slot].store(0, std::memory_order_release);
  }

 private:
  static constexpr std::uint64_t known = std::uint64_t{1} << 32;
  std::vector<std::atomic<std::uint64_t>> words_;
};

}  // namespace kvmem
