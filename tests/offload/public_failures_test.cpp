// Failures that users of other systems reported in public: whole transfers.
// docs/decisions/public-failures.md has the cases.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/virtual_device.hpp"
#include "support/offload_world.hpp"
#include "support/sanitizers.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

std::vector<BlockId> first_blocks(std::size_t count) {
  std::vector<BlockId> blocks(count);
  std::iota(blocks.begin(), blocks.end(), BlockId{0});
  return blocks;
}

// Eight keys take turns in four device blocks; each transfer runs behind those before it there.
class EightKeys {
 public:
  void step() {
    const auto block = static_cast<BlockId>(random_() % blocks_.size());
    const std::uint64_t choice = random_() % 5;
    if (choice < 2)
      load(block, random_() % 8);
    else if (choice < 4)
      store(block);
    else
      compute(block);
  }
  void end() {
    for (BlockId block = 0; block < static_cast<BlockId>(blocks_.size()); ++block) check(block);
    stored_ = {};
    EXPECT_TRUE(world_.manager().drain(60, {}));
    EXPECT_EQ(world_.slots().free, 64U);
    EXPECT_GT(checks_, 1000);
  }

 private:
  struct Block {
    std::uint64_t content = 0;  // key + 8 * version
    std::vector<std::shared_ptr<Transfer>> users;
  };
  struct Stored {
    std::uint64_t content = 0;
    std::shared_ptr<Transfer> store;
  };

  // Behind all that is unfinished there: whoever is not named is in the way.
  After behind(Block& block) {
    if (block.users.size() > 8) settle(block);
    After after;
    for (const auto& user : block.users) world_.manager().add_transfer(after, *user);
    return after;
  }
  void load(BlockId id, std::uint64_t key) {
    const Stored& stored = stored_[key];
    if (!stored.store) return;
    Block& block = blocks_[static_cast<std::size_t>(id)];
    stored.store->wait(60);
    const auto transfer =
        world_.restore({.blocks = {id}, .after = behind(block)}, *stored.store->result());
    block.content = stored.content;
    block.users.push_back(transfer);
  }
  void store(BlockId id) {
    Block& block = blocks_[static_cast<std::size_t>(id)];
    const auto transfer = world_.offload({.blocks = {id}, .after = behind(block)});
    block.users.push_back(transfer);
    stored_[block.content % 8] = {block.content, transfer};
  }
  void compute(BlockId id) {
    check(id);
    Block& block = blocks_[static_cast<std::size_t>(id)];
    block.content = random_() % 8 + 8 * ++versions_;
    world_.cache().fill(id, block.content);
  }
  void check(BlockId id) {
    Block& block = blocks_[static_cast<std::size_t>(id)];
    settle(block);
    ASSERT_TRUE(world_.cache().holds(id, block.content)) << "bytes of another key";
    ++checks_;
  }
  static void settle(Block& block) {
    for (const auto& user : block.users) user->wait(60);
    block.users.clear();
  }

  World world_{make_host_device({.workers = 2}), {.device_blocks = 4, .slots = 64, .config = {}}};
  std::mt19937_64 random_{5};
  std::array<Block, 4> blocks_{Block{0, {}}, Block{1, {}}, Block{2, {}}, Block{3, {}}};
  std::array<Stored, 8> stored_;
  std::uint64_t versions_ = 0;
  int checks_ = 0;
};

// Public failure 5: with a host tier an answer had tokens of another prompt.
TEST(PublicFailures, EveryLoadBringsTheBytesOfItsOwnKey) {
  EightKeys keys;
  for (int step = 0; step < 10'000 && !::testing::Test::HasFatalFailure(); ++step) keys.step();
  keys.end();
}

// Public failure 20: a caller was told that all was stored while the last chunk was on its way.
TEST(PublicFailures, AStoreIsNotDoneBeforeItsLastChunk) {
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.max_descriptors = 3});
  World world(device, {.config = without_reaper()});
  const auto transfer = world.offload({.blocks = {0, 2, 4, 6, 8, 10, 12, 14}, .tag = 1});
  ASSERT_GE(device->pending_copies(), 8U);
  while (device->pending_copies() > 1) {
    device->run_one();
    EXPECT_TRUE(world.manager().poll().empty());
    EXPECT_FALSE(transfer->done());
    EXPECT_THROW(static_cast<void>(transfer->result()), NotDone);
  }
  device->run_one();
  EXPECT_EQ(world.manager().poll().size(), 1U);
  const auto copy = transfer->result();
  for (std::size_t i = 0; i < 8; ++i) EXPECT_TRUE(CacheMemory::holds(copy->blocks(), i, 2 * i));
}

// Public failure 36: the tail of a prefetch that was ended half-way went back to the pool twice.
TEST(PublicFailures, ATransferEndedHalfWayGivesEachBlockBackOnce) {
  ManagerConfig config;
  config.window_bytes = smallest_window_bytes;
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
  World world(device, {.device_blocks = 100, .slots = 100, .config = config});
  auto transfer = world.offload({.blocks = first_blocks(100)});
  // The reaper may be the one to submit the next slice, so it is there in a moment.
  for (int slices = 0; slices < 3; ++slices) {
    ASSERT_TRUE(comes_true([&] {
      static_cast<void>(world.manager().poll());
      return device->run_one();
    }));
  }
  ASSERT_TRUE(comes_true([&] {
    static_cast<void>(world.manager().poll());
    return device->pending_copies() > 0;
  }));
  EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  EXPECT_EQ(transfer->cancel(), CancelOutcome::draining);
  transfer.reset();
  EXPECT_EQ(world.slots().quarantined, 100U);
  device->run_all();
  EXPECT_TRUE(world.manager().drain(60, {}));
  EXPECT_EQ(world.slots().free, 100U);
  auto all = world.pool().try_acquire(100);
  ASSERT_TRUE(all);
  EXPECT_EQ(std::set(all->slots().begin(), all->slots().end()).size(), 100U);
  EXPECT_FALSE(world.pool().try_acquire(1));
  world.pool().check();
}

// Public failure 87: with padded pages the arithmetic assumed rows without gaps, and read beyond
// the end. What lies behind the last payload, and in front of the first, cannot be touched here.
TEST(PublicFailures, TheLastBlockMayEndWhereItsMemoryEnds) {
  constexpr std::size_t page = 4096, stride = 1024, payload = 576, blocks = 9;
  constexpr std::size_t used = (blocks - 1) * stride + payload;
  constexpr std::size_t open = round_up(used, page);
  void* const mapped =
      mmap(nullptr, open + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  auto* const memory = static_cast<std::byte*>(mapped);
  ASSERT_EQ(mprotect(memory + open, page, PROT_NONE), 0);
  std::byte* const first = memory + open - used;
  std::memset(first, 0xEE, used);
  std::memset(first + (blocks - 1) * stride, 7, payload);

  const auto device = make_host_device({.workers = 1});
  const auto runtime = Runtime::make(device);
  Region region;
  region.address = reinterpret_cast<std::uintptr_t>(first);
  region.stride_bytes = stride;
  region.payload_bytes = payload;
  region.block_count = blocks;
  PoolOptions pool;
  pool.block_bytes = payload;
  pool.capacity_bytes = page;
  const auto manager = Manager::make(runtime, KVLayout({region}),
                                     std::make_shared<BlockPool>(device, pool), ManagerConfig{});
  TransferRequest request;
  request.blocks = {blocks - 1};
  Admission store = manager->admit(TransferKind::offload, request, true);
  ASSERT_TRUE(store.try_take());
  const auto stored = manager->offload(request, std::move(store));
  stored->wait(60);
  std::memset(first + (blocks - 1) * stride, 0, payload);
  for (const BlockId target : {BlockId{blocks - 1}, BlockId{0}}) {
    request.blocks = {target};
    Admission load = manager->admit(TransferKind::restore, request, false);
    ASSERT_TRUE(load.try_take());
    manager->restore(request, *stored->result(), std::move(load))->wait(60);
  }
  for (std::size_t i = 0; i < used; ++i) {
    const bool restored = i < payload || i >= (blocks - 1) * stride;
    ASSERT_EQ(first[i], restored ? std::byte{7} : std::byte{0xEE}) << i;
  }
  EXPECT_TRUE(manager->close(60, {}).quiet);
  munmap(mapped, open + page);
}

// Public failure 105: a load failed, and the request ran on whatever was in the blocks, counted as
// a hit.
TEST(PublicFailures, AFailedLoadIsNeverTakenForADoneOne) {
  for (const Failure how : {Failure::refused, Failure::in_flight}) {
    const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
    World world(device, {.config = without_reaper()});
    const Stream consumer(device);
    const auto copy = world.stored(0, 500);
    world.cache().fill(5, 600);  // another key's bytes
    device->fail(CallKind::copy, 1, how);
    const auto failed = world.restore({.blocks = {5}, .tag = 1}, *copy);
    EXPECT_THROW(failed->wait_on(consumer.handle(), std::nullopt), CopyFailed);
    EXPECT_THROW(failed->wait(60), CopyFailed);
    EXPECT_EQ(failed->state(), TransferState::failed);
    EXPECT_THROW(static_cast<void>(failed->result()), CopyFailed);
    EXPECT_THROW(failed->wait_on(consumer.handle(), std::nullopt), CopyFailed);
    EXPECT_EQ(world.stats(Direction::to_device).blocks_done, 0U);
    EXPECT_EQ(world.stats(Direction::to_device).done, 0U);
    EXPECT_EQ(world.stats(Direction::to_device).failed, 1U);
    const auto reports = world.manager().poll();
    ASSERT_EQ(reports.size(), 1U);
    EXPECT_EQ(reports[0].state, TransferState::failed);
    EXPECT_FALSE(reports[0].error.empty());
    world.restore({.blocks = {5}}, *copy)->wait(60);  // the source is as good as before
    EXPECT_TRUE(world.cache().holds(5, 500));
  }
}

// Public failure 167: submission itself blocked once about a thousand copies were on a stream.
TEST(PublicFailures, ManySmallStoresNeverFillTheDevicesQueues) {
  constexpr std::size_t count = 2000;
  ManagerConfig config;
  config.window_bytes = smallest_window_bytes;
  const auto device = std::make_shared<ScriptedDevice>();
  World world(device, {.slots = count, .config = config});
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::size_t most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    transfers.push_back(world.offload({.blocks = {static_cast<BlockId>(i % 32)}}));
    most = std::max(most, device->pending_copies());
  }
  EXPECT_LE(most, smallest_window_bytes / CacheMemory::block_bytes() + 1);
  while (!std::ranges::all_of(transfers, [](const auto& each) { return each->done(); })) {
    device->run_all();
    static_cast<void>(world.manager().poll());
  }
  for (const auto& transfer : transfers) EXPECT_EQ(transfer->state(), TransferState::done);
  EXPECT_LE(device->calls(CallKind::create_stream).size(), 2 * CopyQueue::lanes);
  EXPECT_LT(device->calls(CallKind::create_event).size(), 200U) << "events are used again";
}

// Public failure 170: offsets were narrowed to 32 bits with very large pools. Here the addresses
// that the device was given are asked for. Nothing stands behind them.
TEST(PublicFailures, TheDeviceIsGivenExactAddressesInAPoolOfTerabytes) {
  if (thread_sanitized) GTEST_SKIP() << "TSan leaves no terabytes of addresses";
  constexpr std::uint64_t block_bytes = std::uint64_t{1} << 28, blocks = 8192;
  constexpr std::uint64_t whole = blocks * block_bytes;  // 2^41
  const auto device = make_virtual_device({.moves_bytes = false});
  Region region;
  region.address = std::uint64_t{1} << 46;
  region.stride_bytes = block_bytes + 4096;
  region.payload_bytes = block_bytes;
  region.block_count = blocks;
  region.memory = device->info().name;
  PoolOptions options;
  options.block_bytes = block_bytes;
  options.capacity_bytes = whole;
  const auto pool = std::make_shared<BlockPool>(device, options);
  ManagerConfig config = without_reaper();
  config.max_queued_bytes = 2 * whole;
  const auto manager = Manager::make(Runtime::make(device), KVLayout({region}), pool, config);
  auto all = pool->try_acquire(blocks);
  ASSERT_TRUE(all);
  for (const std::uint64_t slot : {0UL, 7UL, 8UL, 16UL, 4096UL, 8191UL}) {  // 2^31, 2^32, 2^40
    const auto block = static_cast<BlockId>(slot);
    TransferRequest request;
    request.blocks = {block};
    Admission admission = manager->admit(TransferKind::offload, request, false);
    ASSERT_TRUE(admission.try_take());
    const auto transfer = manager->offload_into(request, all->share(slot, 1), std::move(admission));
    const std::byte* const host = pool->data() + all->slots()[slot] * block_bytes;
    const auto* const source =
        reinterpret_cast<const std::byte*>(region.address + slot * region.stride_bytes);
    for (const std::byte* const begin : {host, source}) {
      EXPECT_TRUE(device->may_touch(begin, 1));
      EXPECT_TRUE(device->may_touch(begin + block_bytes - 1, 1));
      EXPECT_FALSE(device->may_touch(begin - 1, 1));
      EXPECT_FALSE(device->may_touch(begin + block_bytes, 1));
    }
    transfer->wait(60);
    EXPECT_FALSE(device->may_touch(host, block_bytes));
  }
  EXPECT_EQ(manager->stats().directions[0].bytes_done, 6 * block_bytes);
}

}  // namespace
}  // namespace kvmem::test
