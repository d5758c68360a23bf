// A device with a cache in its memory, a pool and a manager: what the tests of transfers stand on.
//
// A device block holds a pattern that is a function of a key, so that any byte of a wrong block
// shows. The three regions have different payloads, strides and stages; their padding holds a mark
// that nobody may touch.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "device/host_device.hpp"
#include "offload/manager.hpp"
#include "support/declared_memory.hpp"
#include "support/scripted_device.hpp"
#include "support/stall.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {

struct WorldOptions {
  std::size_t device_blocks = 32;
  std::size_t slots = 32;
  ManagerConfig config;
  Pin pin = Pin::automatic;
  double pin_bytes_per_second = 0;
};

// The bytes of one device cache.
class CacheMemory {
 public:
  explicit CacheMemory(std::size_t blocks, std::size_t shift = 0)
      : blocks_(blocks), bytes_(start(3, blocks) + 64 + shift, mark), shift_(shift) {}

  [[nodiscard]] KVLayout layout(const std::string& memory = "host") const {
    std::vector<Region> regions;
    for (std::size_t r = 0; r < 3; ++r) {
      Region region;
      region.address = reinterpret_cast<std::uintptr_t>(bytes_.data()) + shift_ + start(r, blocks_);
      region.stride_bytes = strides[r];
      region.payload_bytes = payloads[r];
      region.block_count = blocks_;
      region.memory = memory;
      region.stage = stages[r];
      regions.push_back(region);
    }
    return KVLayout(std::move(regions));
  }

  static constexpr std::size_t payloads[3] = {1500, 700, 2048};
  static constexpr std::int64_t stages[3] = {4, 9, 4};
  using Block = std::array<std::byte, payloads[0] + payloads[1] + payloads[2]>;
  [[nodiscard]] static std::size_t block_bytes() { return std::tuple_size_v<Block>; }

  // Whole words, and below whole segments: a byte at a time takes the sanitizers long.
  [[nodiscard]] static Block pattern(std::uint64_t key) {
    Block bytes;
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
      std::uint64_t mixed = (key + 1) * 0x9E3779B97F4A7C15ULL + at * 0xBF58476D1CE4E5B9ULL;
      mixed = (mixed ^ mixed >> 29) * 0x94D049BB133111EBULL;
      mixed ^= mixed >> 32;
      std::memcpy(bytes.data() + at, &mixed, sizeof mixed);
    }
    return bytes;
  }

  [[nodiscard]] const std::vector<std::byte>& memory() const noexcept { return bytes_; }

  void fill(BlockId block, std::uint64_t key) {
    const Block bytes = pattern(key);
    std::size_t at = 0;
    for (std::size_t r = 0; r < 3; at += payloads[r++])
      std::memcpy(segment(block, r), bytes.data() + at, payloads[r]);
  }
  [[nodiscard]] bool holds(BlockId block, std::uint64_t key) const {
    const Block bytes = pattern(key);
    std::size_t at = 0;
    bool equal = true;
    for (std::size_t r = 0; r < 3; at += payloads[r++])
      equal &= std::memcmp(segment(block, r), bytes.data() + at, payloads[r]) == 0;
    return equal;
  }
  [[nodiscard]] static bool holds(const HostBlocks& blocks, std::size_t i, std::uint64_t key) {
    return std::memcmp(blocks.data(i), pattern(key).data(), block_bytes()) == 0;
  }
  [[nodiscard]] bool padding_is_untouched() const {
    std::vector<std::byte> rest = bytes_;
    for (BlockId block = 0; block < static_cast<BlockId>(blocks_); ++block) {
      for (std::size_t r = 0; r < 3; ++r) {
        const auto at = static_cast<std::size_t>(segment(block, r) - bytes_.data());
        std::memset(rest.data() + at, static_cast<int>(mark), payloads[r]);
      }
    }
    return rest.front() == mark && std::memcmp(rest.data(), rest.data() + 1, rest.size() - 1) == 0;
  }

  // Address and length of a block's part in a region, for a kernel of the engine's.
  [[nodiscard]] std::byte* segment(BlockId block, std::size_t region) {
    return const_cast<std::byte*>(std::as_const(*this).segment(block, region));
  }
  [[nodiscard]] const std::byte* segment(BlockId block, std::size_t region) const {
    return bytes_.data() + shift_ + start(region, blocks_) +
           static_cast<std::size_t>(block) * strides[region];
  }

 private:
  static constexpr std::size_t strides[3] = {1600, 700, 3000};
  static constexpr std::byte mark{0xA5};

  static std::size_t start(std::size_t region, std::size_t blocks) {
    std::size_t bytes = 0;
    for (std::size_t r = 0; r < region; ++r) bytes += strides[r] * blocks + 40;
    return bytes;
  }

  std::size_t blocks_;
  std::vector<std::byte> bytes_;
  std::size_t shift_;
};

class World {
 public:
  explicit World(std::shared_ptr<ModelDevice> device, const WorldOptions& options = {})
      : device_(std::move(device)),
        cache_(options.device_blocks),
        declared_(device_, cache_.memory().data(), cache_.memory().size()),
        runtime_(Runtime::make(device_)),
        pool_(make_pool(options)),
        manager_(
            Manager::make(runtime_, cache_.layout(device_->info().name), pool_, options.config)) {
    for (BlockId block = 0; block < static_cast<BlockId>(options.device_blocks); ++block) {
      cache_.fill(block, static_cast<std::uint64_t>(block));
    }
  }

  World(const World&) = delete;
  World& operator=(const World&) = delete;
  // Lets everything end: what is never observed to end is leaked, and rightly so. A reaper that was
  // the last to hold the manager takes it apart; at the exit of the process it would leak it.
  ~World() {
    if (manager_) drain();
    manager_.reset();
    EXPECT_TRUE(comes_true([&] { return runtime_.use_count() == 1; }));
  }

  [[nodiscard]] ModelDevice& device() { return *device_; }
  [[nodiscard]] const std::shared_ptr<ModelDevice>& device_ptr() { return device_; }
  [[nodiscard]] CacheMemory& cache() { return cache_; }
  [[nodiscard]] Runtime& runtime() { return *runtime_; }
  [[nodiscard]] BlockPool& pool() { return *pool_; }
  [[nodiscard]] Manager& manager() { return *manager_; }
  [[nodiscard]] std::shared_ptr<Manager>& manager_ptr() { return manager_; }
  [[nodiscard]] std::shared_ptr<BlockPool>& pool_ptr() { return pool_; }
  [[nodiscard]] SlotCounts slots() const { return pool_->stats().slots; }
  [[nodiscard]] const DirectionStats stats(Direction direction) const {
    return manager_->stats().directions[static_cast<std::size_t>(direction)];
  }

  // What an engine asks for. `after` empty: the caller asserts that nothing is pending.
  struct Ask {
    std::vector<BlockId> blocks;
    After after = {};
    std::optional<Priority> priority = std::nullopt;
    std::optional<Tag> tag = std::nullopt;
  };

  // Null at a bound.
  std::shared_ptr<Transfer> try_offload(const Ask& ask) {
    Admission admission =
        manager_->admit(TransferKind::offload, request(ask, Priority::background), true);
    if (!admission.try_take()) return nullptr;
    return manager_->offload(request(ask, Priority::background), std::move(admission));
  }
  std::shared_ptr<Transfer> offload(const Ask& ask) {
    auto transfer = try_offload(ask);
    if (!transfer) throw std::logic_error("the test's offload found a bound");
    return transfer;
  }
  std::shared_ptr<Transfer> try_restore(const Ask& ask, const HostCopy& copy) {
    Admission admission =
        manager_->admit(TransferKind::restore, request(ask, Priority::demand), false);
    if (!admission.try_take()) return nullptr;
    return manager_->restore(request(ask, Priority::demand), copy, std::move(admission));
  }
  std::shared_ptr<Transfer> restore(const Ask& ask, const HostCopy& copy) {
    auto transfer = try_restore(ask, copy);
    if (!transfer) throw std::logic_error("the test's restore found a bound");
    return transfer;
  }
  std::shared_ptr<Transfer> offload_into(const Ask& ask, HostBlocks target) {
    Admission admission =
        manager_->admit(TransferKind::offload, request(ask, Priority::background), false);
    if (!admission.try_take()) throw std::logic_error("the test's offload found a bound");
    return manager_->offload_into(request(ask, Priority::background), std::move(target),
                                  std::move(admission));
  }
  // Blocks in host memory that hold `key`, from device block `block`, which holds it then too.
  std::shared_ptr<HostCopy> stored(BlockId block, std::uint64_t key) {
    cache_.fill(block, key);
    const auto transfer = offload({.blocks = {block}});
    transfer->wait(10);
    return transfer->result();
  }

  After after_stream(StreamHandle stream) {
    After after;
    manager_->add_stream(after, stream);
    return after;
  }
  After after_event(EventHandle event) {
    After after;
    manager_->add_event(after, event);
    return after;
  }
  After after_transfer(const Transfer& transfer) {
    After after;
    manager_->add_transfer(after, transfer);
    return after;
  }

 private:
  void drain() {
    auto* const scripted = dynamic_cast<ScriptedDevice*>(device_.get());
    if (scripted != nullptr) scripted->heal();
    bool quiet = false;
    for (int tries = 0; tries < 1000 && !quiet; ++tries) {
      if (scripted != nullptr) scripted->run_all();
      quiet = manager_->drain(0.01, {});
    }
    EXPECT_TRUE(quiet) << "a test left something that never ends";
  }
  std::shared_ptr<BlockPool> make_pool(const WorldOptions& options) {
    PoolOptions pool;
    pool.block_bytes = CacheMemory::block_bytes();
    pool.capacity_bytes = options.slots * round_up(pool.block_bytes, slot_alignment_bytes);
    pool.pin = options.pin;
    pool.pin_bytes_per_second = options.pin_bytes_per_second;
    return std::make_shared<BlockPool>(device_, pool);
  }
  static TransferRequest request(const Ask& ask, Priority usual) {
    TransferRequest made;
    made.blocks = ask.blocks;
    made.after = ask.after;
    made.priority = ask.priority.value_or(usual);
    made.tag = ask.tag;
    return made;
  }

  std::shared_ptr<ModelDevice> device_;
  CacheMemory cache_;
  DeclaredMemory declared_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<BlockPool> pool_;
  std::shared_ptr<Manager> manager_;
};

inline std::shared_ptr<ModelDevice> still_device() {
  return make_host_device({.no_workers = true});
}

[[nodiscard]] inline ManagerConfig without_reaper() {
  ManagerConfig config;
  config.reaper = false;
  return config;
}

}  // namespace kvmem::test
