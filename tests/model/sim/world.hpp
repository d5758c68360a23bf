// What the simulation runs against: a virtual device, a device cache in ordinary memory, a pool and
// a manager, small enough that every bound is reached.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/virtual_device.hpp"
#include "offload/manager.hpp"
#include "support/cuda_over_fake.hpp"

namespace kvmem::sim {

struct WorldShape {
  std::size_t device_blocks = 4;
  std::size_t slots = 4;
  Pin pin = Pin::automatic;
  VirtualOptions device;
  std::optional<test::OverFake> over_fake{};  // the CUDA device, on a fake runtime over that one
  ManagerConfig manager;
};
[[nodiscard]] WorldShape shape_of(std::uint64_t seed);  // any

// A block is three segments of whole words, in regions whose strides have gaps. Stages 4 and 9.
inline constexpr std::size_t regions = 3;
inline constexpr std::array<std::size_t, regions> payloads{24, 8, 40};
inline constexpr std::array<std::size_t, regions> strides{32, 8, 64};
inline constexpr std::array<std::int64_t, regions> stages{4, 9, 4};
inline constexpr std::size_t block_bytes = 72;
using BlockBytes = std::array<std::byte, block_bytes>;  // in the order of the slot

class Cache {
 public:
  Cache(std::size_t blocks, std::shared_ptr<Device> device);
  [[nodiscard]] KVLayout layout() const;
  [[nodiscard]] std::byte* segment(BlockId block, std::size_t region) noexcept;
  [[nodiscard]] BlockBytes read(BlockId block);
  [[nodiscard]] bool gaps_are_untouched() const;

 private:
  static constexpr std::byte gap{0xA5};
  [[nodiscard]] std::size_t start(std::size_t region) const noexcept;
  std::size_t blocks_;
  std::vector<std::byte> bytes_;
  test::DeclaredMemory declared_;
};

// Memory that the engine's kernels read from and write to: pinned, one block each.
class Scratch {
 public:
  explicit Scratch(VirtualDevice& device);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  [[nodiscard]] std::byte* take() noexcept;  // null: all are in use
  void give_back(std::byte* place) { free_.push_back(place); }

 private:
  static constexpr std::size_t places = 64, bytes = 8192;
  VirtualDevice& device_;
  std::byte* base_;
  std::vector<std::byte*> free_;
};

}  // namespace kvmem::sim
