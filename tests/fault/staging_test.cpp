// Staged copies that fail, or whose device is lost under them.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "fault/scenario.hpp"

namespace kvmem::test {
namespace {

class StagingFault : public ::testing::Test {
 protected:
  static WorldOptions options() {
    ManagerConfig config = without_reaper();
    config.staging_pieces = 2;
    config.staging_piece_bytes = 8192;
    return {.device_blocks = 16, .slots = 16, .config = config, .pin = Pin::never};
  }
  // Nobody's bytes.
  HostBlocks marked_slot() {
    HostBlocks blocks = *world_->pool().try_acquire(1);
    std::memset(blocks.data(0), 0x77, CacheMemory::block_bytes());
    return blocks;
  }
  static bool is_marked(const HostBlocks& blocks) {
    return std::all_of(blocks.data(0), blocks.data(0) + CacheMemory::block_bytes(),
                       [](std::byte byte) { return byte == std::byte{0x77}; });
  }

  std::shared_ptr<ScriptedDevice> device_ = scenario_device({.memory = HostMemory::staged});
  std::unique_ptr<World> world_ = std::make_unique<World>(device_, options());
};

// The piece still holds what went through it before.
TEST_F(StagingFault, AFailedCopyBringsNoStaleBytesHome) {
  for (const Failure how : {Failure::refused, Failure::no_memory}) {
    static_cast<void>(world_->stored(1, 100));
    static_cast<void>(world_->stored(2, 200));  // both pieces are used
    const HostBlocks owned = marked_slot();
    device_->fail(CallKind::copy, 1, how);
    const auto transfer = world_->offload_into({.blocks = {3}}, owned.share());
    EXPECT_THROW(transfer->wait(10), std::exception);
    EXPECT_EQ(transfer->state(), TransferState::failed);
    EXPECT_TRUE(is_marked(owned)) << "another transfer's bytes came home";
  }
}

TEST_F(StagingFault, ALostCopyBringsNoStaleBytesHome) {
  static_cast<void>(world_->stored(1, 100));
  static_cast<void>(world_->stored(2, 200));
  const HostBlocks owned = marked_slot();
  const auto transfer = world_->offload_into({.blocks = {3}}, owned.share());
  device_->lose();
  EXPECT_THROW(transfer->wait(10), DeviceLost);
  EXPECT_TRUE(is_marked(owned));
}

TEST_F(StagingFault, TransfersThatWaitForAPieceEndWhenTheDeviceIsLost) {
  const auto stored = world_->stored(1, 100);
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (BlockId block = 2; block < 8; ++block)
    transfers.push_back(world_->offload({.blocks = {block}}));
  for (BlockId block = 8; block < 14; ++block)
    transfers.push_back(world_->restore({.blocks = {block}}, *stored));
  ASSERT_EQ(transfers[5]->state(), TransferState::queued) << "there are two pieces";
  ASSERT_EQ(transfers[11]->state(), TransferState::queued);
  device_->lose();
  EXPECT_TRUE(world_->manager().drain(10, {}));
  for (const auto& transfer : transfers) EXPECT_THROW(transfer->wait(10), DeviceLost);
}

// Both the pieces and the arrays of descriptors: the device may go on reading and writing.
TEST_F(StagingFault, WhatALostDeviceMayStillTouchStaysForEver) {
  auto stored = world_->stored(1, 100);
  auto offload = world_->offload({.blocks = {2}});
  auto restore = world_->restore({.blocks = {3}}, *stored);
  const std::vector<CopyDescriptors> batches = device_->pending_batches();
  ASSERT_EQ(batches.size(), 3U) << "an offload, and two stages of a restore";
  const auto in_arrays = [&] {
    std::vector<std::tuple<std::byte*, const std::byte*, std::size_t>> copies;
    for (const CopyDescriptors& batch : batches) {
      for (std::size_t i = 0; i < batch.count; ++i)
        copies.emplace_back(batch.targets[i], batch.sources[i], batch.sizes[i]);
    }
    return copies;
  };
  const auto copies = in_arrays();
  const auto rings = device_->pinned();
  const std::uint64_t leaked_before = leaked_region_bytes();
  device_->lose();
  EXPECT_THROW(offload->wait(10), DeviceLost);
  EXPECT_THROW(restore->wait(10), DeviceLost);
  offload.reset();
  restore.reset();
  stored.reset();
  world_.reset();
  EXPECT_EQ(in_arrays(), copies);
  EXPECT_EQ(device_->pinned(), rings);
  for (const auto& [base, bytes] : rings) std::memset(base, 1, bytes);  // still mapped
  EXPECT_GE(leaked_region_bytes(), leaked_before + 2 * 2 * 8192) << "a ring for each direction";
}

}  // namespace
}  // namespace kvmem::test
