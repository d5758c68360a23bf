// Transfers while the pool is being pinned. The test says when a chunk is pinned, and the device
// refuses a copy of memory that is not, or of two registrations at once.

#include <atomic>
#include <thread>

#include "support/offload_world.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t slot_bytes = 8192;
constexpr double one_byte_a_second = 1;  // hours between two chunks, each of one slot

class PinningBehindTransfers : public ::testing::Test {
 protected:
  // Before a chunk is pinned, by another thread than the test's.
  void before_each_chunk(std::size_t chunks, const std::function<void()>& hook) {
    const auto self = std::this_thread::get_id();
    for (std::size_t pin = 0; pin < chunks + 2; ++pin) {  // two rings
      device_->before_next(CallKind::pin, [self, hook] {
        if (std::this_thread::get_id() != self) hook();
      });
    }
  }
  void hold_the_only_chunk() {
    before_each_chunk(1, [this] { static_cast<void>(comes_true([this] { return go_.load(); })); });
  }
  void make_world(double pin_bytes_per_second = 0) {
    world_ = std::make_unique<World>(device_,
                                     WorldOptions{.device_blocks = 8,
                                                  .slots = 8,
                                                  .config = without_reaper(),
                                                  .pin = Pin::background,
                                                  .pin_bytes_per_second = pin_bytes_per_second});
  }
  void TearDown() override {
    EXPECT_EQ(device_->unpinned_copies(), 0U);
    go_ = true;
    staged_ = direct_ = nullptr;
    slot_.release();
    world_.reset();
    EXPECT_TRUE(comes_true([&] { return device_.use_count() == 1; }));
    EXPECT_TRUE(device_->pinned().empty());
  }

  // A staged offload of block 2 into the slot, and a direct one of block 3 behind it.
  void offload_twice_into_the_slot() {
    hold_the_only_chunk();
    make_world();
    world_->cache().fill(2, 100);
    world_->cache().fill(3, 101);
    slot_ = *world_->pool().try_acquire(1);
    staged_ = world_->offload_into({.blocks = {2}}, slot_.share());
    go_ = true;
    ASSERT_TRUE(comes_true([&] { return world_->pool().pinned(); }));
    direct_ = world_->offload_into({.blocks = {3}, .after = world_->after_transfer(*staged_)},
                                   slot_.share());
    ASSERT_TRUE(staged_->job()->staged());
    ASSERT_FALSE(direct_->job()->staged());
  }

  std::atomic<bool> go_{false};
  std::shared_ptr<ScriptedDevice> device_ = std::make_shared<ScriptedDevice>(
      ScriptedOptions{.needs_pinned_host = true, .runs_in_sleep = true});
  std::unique_ptr<World> world_;
  HostBlocks slot_;
  std::shared_ptr<Transfer> staged_, direct_;
};

TEST_F(PinningBehindTransfers, AnOffloadBehindAStagedOneIsNotOverwrittenByIt) {
  offload_twice_into_the_slot();
  device_->run_all();
  EXPECT_FALSE(direct_->job()->begun()) << "the first one has still to be brought home";
  direct_->wait(10);
  staged_->wait(10);
  EXPECT_TRUE(CacheMemory::holds(slot_, 0, 101));
}

TEST_F(PinningBehindTransfers, WhoWaitsOnAStreamWaitsUntilTheStagedOneIsBroughtHome) {
  offload_twice_into_the_slot();
  const Stream engine(device_);
  direct_->wait_on(engine.handle(), std::nullopt);
  EXPECT_TRUE(staged_->done());
  EXPECT_TRUE(direct_->job()->begun());
  direct_->wait(10);
  EXPECT_TRUE(CacheMemory::holds(slot_, 0, 101));
}

TEST_F(PinningBehindTransfers, ACancelledStagedOffloadLetsGoWhatRunsBehindIt) {
  offload_twice_into_the_slot();
  EXPECT_EQ(staged_->cancel(), CancelOutcome::draining);
  device_->run_all();
  EXPECT_FALSE(direct_->job()->begun()) << "its bytes are brought home all the same";
  direct_->wait(10);
  EXPECT_EQ(staged_->state(), TransferState::cancelled);
  EXPECT_TRUE(CacheMemory::holds(slot_, 0, 101));
}

TEST_F(PinningBehindTransfers, WhatRunsBehindAStagedOffloadIsCancelledAtOnce) {
  offload_twice_into_the_slot();
  EXPECT_EQ(direct_->cancel(), CancelOutcome::not_submitted);
  staged_->wait(10);
  EXPECT_TRUE(CacheMemory::holds(slot_, 0, 100));
}

TEST_F(PinningBehindTransfers, WhatIsNotPinnedYetIsStagedAndWhatIsGoesDirectly) {
  hold_the_only_chunk();
  make_world();
  world_->cache().fill(2, 100);
  world_->cache().fill(3, 101);
  const auto staged = world_->offload({.blocks = {2, 3}});
  staged->wait(10);
  EXPECT_TRUE(staged->job()->staged());
  const auto copy = staged->result();
  EXPECT_TRUE(CacheMemory::holds(copy->blocks(), 0, 100));
  EXPECT_TRUE(CacheMemory::holds(copy->blocks(), 1, 101));
  const auto staged_back = world_->restore({.blocks = {4, 5}}, *copy);
  staged_back->wait(10);
  EXPECT_TRUE(staged_back->job()->staged());
  EXPECT_TRUE(world_->cache().holds(4, 100));
  EXPECT_TRUE(world_->cache().holds(5, 101));

  go_ = true;
  ASSERT_TRUE(comes_true([&] { return world_->pool().pinned(); }));
  const auto direct_back = world_->restore({.blocks = {6, 7}}, *copy);  // the same slots
  direct_back->wait(10);
  EXPECT_FALSE(direct_back->job()->staged());
  EXPECT_TRUE(world_->cache().holds(6, 100));
  EXPECT_TRUE(world_->cache().holds(7, 101));
  const auto direct = world_->offload({.blocks = {6, 7}});
  direct->wait(10);
  EXPECT_FALSE(direct->job()->staged());
  EXPECT_TRUE(CacheMemory::holds(direct->result()->blocks(), 1, 101));
  EXPECT_TRUE(world_->cache().padding_is_untouched());
}

TEST_F(PinningBehindTransfers, OneSlotThatIsNotPinnedMakesTheTransferAStagedOne) {
  make_world(one_byte_a_second);
  ASSERT_TRUE(comes_true([&] { return world_->pool().pinned(std::vector<SlotIndex>{0}); }));
  const auto direct = world_->offload({.blocks = {2}});
  direct->wait(10);
  EXPECT_EQ(direct->result()->blocks().slots()[0], 0U);
  EXPECT_FALSE(direct->job()->staged());
  const auto copy = direct->result();
  HostBlocks other = *world_->pool().try_acquire(1);
  EXPECT_FALSE(other.pinned());
  const auto into_other = world_->offload_into({.blocks = {3}}, std::move(other));
  into_other->wait(10);
  EXPECT_TRUE(into_other->job()->staged());
  HostBlocks both = world_->pool().share_indices(std::vector<SlotIndex>{0, 1});
  const auto into_both = world_->offload_into({.blocks = {4, 5}}, std::move(both));
  into_both->wait(10);
  EXPECT_TRUE(into_both->job()->staged());
  EXPECT_TRUE(CacheMemory::holds(copy->blocks(), 0, 4));
  EXPECT_TRUE(CacheMemory::holds(into_other->result()->blocks(), 0, 5));
}

TEST_F(PinningBehindTransfers, AChunkThatFailsLeavesTheRestStaged) {
  device_->fail(CallKind::pin, 3);  // behind the two rings, because the chunk is held
  hold_the_only_chunk();
  make_world();
  go_ = true;
  ASSERT_TRUE(comes_true([&] { return world_->pool().stats().pin_error.has_value(); }));
  const auto transfer = world_->offload({.blocks = {2}});
  transfer->wait(10);
  EXPECT_TRUE(transfer->job()->staged());
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, 2));
}

// Segments that touch on both sides are one copy, but not across the edge of a chunk.
TEST_F(PinningBehindTransfers, NoCopyCrossesFromOneChunkIntoTheNext) {
  constexpr std::size_t blocks = 8;
  // The clock says that each chunk took its time: nobody pauses.
  const auto take_time = [this] {
    device_->sleep(device_->progress().value(), 1'000'000'000, true);
  };
  for (const std::size_t slots_a_chunk : {1U, 2U, 3U}) {
    ASSERT_TRUE(comes_true([&] { return device_->pinned().empty(); }));
    before_each_chunk(blocks, take_time);
    std::vector<std::byte> cache(blocks * slot_bytes, std::byte{7});
    Region region;
    region.address = reinterpret_cast<std::uintptr_t>(cache.data());
    region.stride_bytes = region.payload_bytes = slot_bytes;
    region.block_count = blocks;
    region.memory = "host";
    PoolOptions options;
    options.block_bytes = slot_bytes;
    options.capacity_bytes = blocks * slot_bytes;
    options.pin = Pin::background;
    options.pin_bytes_per_second = 2.0 * static_cast<double>(slots_a_chunk * slot_bytes);
    const auto pool = std::make_shared<BlockPool>(device_, options);
    ASSERT_TRUE(comes_true([&] { return pool->pinned(); }));
    ASSERT_EQ(device_->pinned().size(), (blocks + slots_a_chunk - 1) / slots_a_chunk);
    const auto manager =
        Manager::make(Runtime::make(device_), KVLayout({region}), pool, without_reaper());
    TransferRequest request;
    for (std::size_t block = 0; block < blocks; ++block)
      request.blocks.push_back(static_cast<BlockId>(block));
    const auto all = pool->try_acquire(blocks);
    HostBlocks in_order = pool->share_indices(std::vector<SlotIndex>{0, 1, 2, 3, 4, 5, 6, 7});
    Admission admission = manager->admit(TransferKind::offload, request, false);
    ASSERT_TRUE(admission.try_take());
    const auto transfer = manager->offload_into(request, std::move(in_order), std::move(admission));
    transfer->wait(10);
    EXPECT_FALSE(transfer->job()->staged());
    EXPECT_EQ(transfer->job()->batch().count(), device_->pinned().size());
  }
}

}  // namespace
}  // namespace kvmem::test
