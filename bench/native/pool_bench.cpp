#include "pool_bench.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/host_device.hpp"
#include "host/block_pool.hpp"

namespace kvmem::bench {

namespace {

// The same sequence for every contender; 2 ns or less a step.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 1) {}
  std::uint32_t below(std::uint32_t bound) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::uint32_t>(((state_ >> 32) * bound) >> 32);
  }

 private:
  std::uint64_t state_;
};

class BareList {
 public:
  using Block = std::uint32_t;

  explicit BareList(const PoolSetup& setup) {
    for (std::uint32_t i = setup.capacity; i > 0; --i) free_.push_back(i - 1);
  }
  Block acquire() {
    const std::lock_guard lock(mutex_);
    const Block block = free_.back();
    free_.pop_back();
    return block;
  }
  void release(Block block) {
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
  }

 private:
  std::mutex mutex_;
  std::vector<std::uint32_t> free_;
};

BlockPool make_pool(const PoolSetup& setup) {
  PoolOptions options;
  options.block_bytes = setup.block_bytes;
  options.capacity_bytes = round_up(setup.block_bytes, slot_alignment_bytes) * setup.capacity;
  HostDeviceOptions device;
  device.workers = 1;
  return BlockPool(make_host_device(device), options);
}

class Handles {
 public:
  using Block = HostBlocks;

  explicit Handles(const PoolSetup& setup) : pool_(make_pool(setup)) {}
  Block acquire() { return std::move(*pool_.try_acquire(1)); }
  void release(Block& block) { block.release(); }

 private:
  BlockPool pool_;
};

class Indices {
 public:
  using Block = SlotIndex;

  explicit Indices(const PoolSetup& setup) : pool_(make_pool(setup)) {}
  Block acquire() {
    std::array<SlotIndex, 1> slot{};
    (void)pool_.try_acquire(slot);  // there are enough
    return slot[0];
  }
  void release(Block block) { pool_.release(std::array<SlotIndex, 1>{block}); }

 private:
  BlockPool pool_;
};

// Through pointers for every one of them, so that no compiler sees what malloc is.
class Malloc {
 public:
  using Block = void*;
  using Allocate = void* (*)(std::size_t);
  using Free = void (*)(void*);

  Malloc(const PoolSetup& setup, Allocate allocate, Free free)
      : bytes_(setup.block_bytes), allocate_(allocate), free_(free) {}
  Block acquire() { return allocate_(bytes_); }
  void release(Block block) { free_(block); }

 private:
  std::size_t bytes_;
  Allocate allocate_;
  Free free_;
};

template <class Allocator>
class Churn final : public PoolBench {
 public:
  template <class... Arguments>
  explicit Churn(const PoolSetup& setup, Arguments... arguments)
      : allocator_(setup, arguments...), held_(setup.threads) {
    for (auto& blocks : held_) {
      for (std::uint32_t i = 0; i < setup.live / setup.threads; ++i) {
        blocks.push_back(allocator_.acquire());
      }
    }
  }
  ~Churn() override {
    for (auto& blocks : held_) {
      for (auto& block : blocks) allocator_.release(block);
    }
  }
  Churn(const Churn&) = delete;
  Churn& operator=(const Churn&) = delete;

  void run(std::uint64_t operations) override {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < held_.size(); ++i) {
      others.emplace_back([this, i, operations] { churn(i, operations); });
    }
    churn(0, operations);
  }

 private:
  void churn(std::size_t thread, std::uint64_t operations) {
    std::vector<typename Allocator::Block>& held = held_[thread];
    Random random(thread + 1);
    const auto live = static_cast<std::uint32_t>(held.size());
    for (std::uint64_t i = 0; i < operations; ++i) {
      typename Allocator::Block& block = held[random.below(live)];
      allocator_.release(block);
      block = allocator_.acquire();
    }
  }

  Allocator allocator_;
  std::vector<std::vector<typename Allocator::Block>> held_;
};

// Loaded beside the malloc that everybody else uses. Never unloaded: its threads' caches outlive
// us.
std::unique_ptr<PoolBench> loaded(const PoolSetup& setup, const char* library, const char* allocate,
                                  const char* free) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) throw NotInstalled(std::string(library) + " is not installed");
  void* allocate_symbol = dlsym(handle, allocate);
  void* free_symbol = dlsym(handle, free);
  if (allocate_symbol == nullptr || free_symbol == nullptr) {
    throw NotInstalled(std::string(library) + " has no " + allocate);
  }
  return std::make_unique<Churn<Malloc>>(setup, reinterpret_cast<Malloc::Allocate>(allocate_symbol),
                                         reinterpret_cast<Malloc::Free>(free_symbol));
}

}  // namespace

std::unique_ptr<PoolBench> make_pool_bench(const std::string& contender, const PoolSetup& setup) {
  if (setup.threads == 0 || setup.live < setup.threads || setup.live > setup.capacity) {
    throw std::invalid_argument("1 thread or more, 1 to `capacity` live blocks for each");
  }
  if (contender == "bare list") return std::make_unique<Churn<BareList>>(setup);
  if (contender == "indices") return std::make_unique<Churn<Indices>>(setup);
  if (contender == "handles") return std::make_unique<Churn<Handles>>(setup);
  if (contender == "glibc") return std::make_unique<Churn<Malloc>>(setup, &std::malloc, &std::free);
  if (contender == "mimalloc") return loaded(setup, "libmimalloc.so.2", "mi_malloc", "mi_free");
  if (contender == "tcmalloc") {
    return loaded(setup, "libtcmalloc_minimal.so.4", "tc_malloc", "tc_free");
  }
  throw std::invalid_argument("no contender " + contender);
}

}  // namespace kvmem::bench
