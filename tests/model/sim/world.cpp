#include "model/sim/world.hpp"

#include <cstdlib>
#include <cstring>
#include <random>

namespace kvmem::sim {

WorldShape shape_of(std::uint64_t seed) {
  std::mt19937_64 random(seed ^ 0x5EED);
  const auto one_of = [&](std::size_t from, std::size_t to) {
    return from + static_cast<std::size_t>(random() % (to - from + 1));
  };
  WorldShape shape;
  shape.device_blocks = one_of(3, 10);
  shape.slots = one_of(3, 16);
  shape.device.seed = random();
  shape.device.bytes_per_second = one_of(0, 1) == 0 ? 1e9 : 1e8;
  shape.device.latency = one_of(0, 1) == 0 ? 0 : 1000;
  shape.device.shared_link = one_of(0, 3) == 0;
  shape.device.max_descriptors = one_of(0, 3) == 0 ? 3 : std::size_t{1} << 20;
  shape.device.needs_pinned_host = one_of(0, 2) == 0;
  if (one_of(0, 1) == 0) shape.pin = Pin::never;  // staged, if the device needs pinned memory
  shape.manager.reaper = one_of(0, 2) > 0;
  shape.manager.max_queued_bytes = one_of(3, 12) * block_bytes;
  shape.manager.max_transfers = one_of(2, 8);
  shape.manager.max_reports = one_of(3, 8);
  shape.manager.window_descriptors = one_of(2, 24);
  shape.manager.staging_pieces = one_of(1, 2);
  shape.manager.staging_piece_bytes = slot_alignment_bytes;
  shape.manager.timeline = one_of(0, 3) == 0;
  shape.manager.timeline_records = 2 * shape.manager.max_transfers + one_of(0, 2);
  return shape;
}

Cache::Cache(std::size_t blocks, std::shared_ptr<Device> device)
    : blocks_(blocks),
      bytes_(start(regions), gap),
      declared_(std::move(device), bytes_.data(), bytes_.size()) {}

std::size_t Cache::start(std::size_t region) const noexcept {
  std::size_t at = 0;
  for (std::size_t r = 0; r < region; ++r) at += strides[r] * blocks_ + 64;
  return at;
}

KVLayout Cache::layout() const {
  std::vector<Region> declared;
  for (std::size_t r = 0; r < regions; ++r) {
    Region region;
    region.address = reinterpret_cast<std::uintptr_t>(bytes_.data()) + start(r);
    region.stride_bytes = strides[r];
    region.payload_bytes = payloads[r];
    region.block_count = blocks_;
    region.memory = "virtual";
    region.stage = stages[r];
    declared.push_back(region);
  }
  return KVLayout(std::move(declared));
}

std::byte* Cache::segment(BlockId block, std::size_t region) noexcept {
  return bytes_.data() + start(region) + static_cast<std::size_t>(block) * strides[region];
}

BlockBytes Cache::read(BlockId block) {
  BlockBytes bytes;
  std::byte* to = bytes.data();
  for (std::size_t r = 0; r < regions; to += payloads[r++]) {
    std::memcpy(to, segment(block, r), payloads[r]);
  }
  return bytes;
}

bool Cache::gaps_are_untouched() const {
  for (std::size_t r = 0; r < regions; ++r) {
    const std::size_t end = start(r) + strides[r] * blocks_;
    for (std::size_t i = start(r); i < end; ++i) {
      if ((i - start(r)) % strides[r] >= payloads[r] && bytes_[i] != gap) return false;
    }
    for (std::size_t i = end; i < end + 64; ++i) {
      if (bytes_[i] != gap) return false;
    }
  }
  return true;
}

Scratch::Scratch(VirtualDevice& device)
    : device_(device),
      base_(static_cast<std::byte*>(std::aligned_alloc(slot_alignment_bytes, bytes))) {
  device_.pin(base_, bytes);
  for (std::size_t i = 0; i < places; ++i) free_.push_back(base_ + i * (bytes / places));
}

Scratch::~Scratch() {
  device_.unpin(base_, bytes);
  std::free(base_);
}

std::byte* Scratch::take() noexcept {
  if (free_.empty()) return nullptr;
  std::byte* const place = free_.back();
  free_.pop_back();
  return place;
}

}  // namespace kvmem::sim
