// Two hundred operations of an engine on a scripted device, with what must hold after each of them.
//
// Whatever fails: no block is handed out while a copy may touch it, nothing hangs, every transfer
// ends once, bytes are right, nothing leaks, and the manager goes on working; or the device is lost
// and says so. Calls into kvmem, and nothing else, run with armed allocations.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/allocation_faults.hpp"
#include "support/cuda_over_fake.hpp"
#include "support/offload_world.hpp"
#include "support/sanitizers.hpp"

namespace kvmem::test {

// Every k in the plain builds. Under the sanitizers every so many, and of the calls of which there
// are thousands still fewer.
constexpr std::size_t stride_of_many = sanitized ? 17 : 1, stride_of_few = sanitized ? 3 : 1;

enum class HostMemory : std::uint8_t {
  ordinary,  // the device asks for nothing
  pinned,    // it needs pinned memory, and the pool is
  staged,    // it needs pinned memory, and the pool is not
};

struct ScenarioOptions {
  HostMemory memory = HostMemory::ordinary;
  bool timeline = false;
  bool checksum = false;                // of every block, in the calls
  std::optional<OverFake> over_fake{};  // the CUDA device, on a fake runtime over the scripted one
};

[[nodiscard]] inline std::shared_ptr<ScriptedDevice> scenario_device(
    const ScenarioOptions& options) {
  return std::make_shared<ScriptedDevice>(
      ScriptedOptions{.needs_pinned_host = options.memory != HostMemory::ordinary,
                      .runs_in_sleep = true,
                      .virtual_time = options.checksum});
}

template <class Call>
auto armed(Call&& call) {
  const ArmedAllocations now;
  return call();
}
// What fails for want of memory has changed nothing: the second try does it.
template <class Call>
auto surely(Call&& call) {
  try {
    return armed(call);
  } catch (const std::bad_alloc&) {
    return call();
  }
}

class Scenario {
 public:
  static constexpr std::size_t device_blocks = 12, slots = 10;
  static constexpr int operations = 200;

  Scenario(std::shared_ptr<ScriptedDevice> device, const ScenarioOptions& options)
      : device_(std::move(device)), used_(device_), options_(options), keys_(device_blocks) {
    for (std::size_t i = 0; i < device_blocks; ++i) keys_[i] = i;
    if (options_.over_fake)
      used_ = std::make_shared<CudaOver<ModelDevice>>(*options_.over_fake, device_);
    const ArmedAllocations now;
    world_ = std::make_unique<World>(used_, world_options());
    engine_ = std::make_unique<Stream>(used_);
    wake_list_ = std::make_shared<WakeList>();
  }
  Scenario(const Scenario&) = delete;
  Scenario& operator=(const Scenario&) = delete;
  ~Scenario() {
    const ArmedAllocations now;
    held_.clear();
    copies_.clear();
    live_.clear();
    stall_.reset();
    engine_.reset();
    world_.reset();
  }

  void run() {
    for (int i = 0; i < operations; ++i) {
      settle_ended();
      try {
        operate();
      } catch (const Error&) {  // typed, and nothing else
        ++errors_;
      } catch (const std::bad_alloc&) {
        ++errors_;
      }
      look();
      if (::testing::Test::HasFailure()) return;
    }
  }

  // Everything ends, and what there is afterwards is right.
  void finish() {
    stall_.reset();
    device_->heal();
    ASSERT_TRUE(surely([&] { return manager().drain(100, {}); })) << "something never ends";
    look();
    poll();
    ASSERT_EQ(reported_, accepted_) << "each transfer ends once";
    settle_ended();
    ASSERT_TRUE(live_.empty());
    copies_.clear();
    held_.clear();
    Runtime& runtime = world_->runtime();
    const auto quiet = [&] { return runtime.recycle().in_flight() == 0; };
    ASSERT_TRUE(runtime.wait_until(quiet, runtime.deadline_after(100), {}));
    const SlotCounts counts = world_->slots();
    ASSERT_EQ(counts.free + counts.poisoned, slots);
    ASSERT_TRUE(device_->lost() || counts.poisoned == 0);
    for (const DirectionStats& side : manager().stats().directions) {
      ASSERT_EQ(side.active + side.waiting + side.queued_bytes + side.lanes_owned, 0U);
      ASSERT_EQ(side.window_bytes + side.window_descriptors, 0U);
    }
    if (device_->lost()) {
      ASSERT_THROW(world_->offload({.blocks = {0}}), DeviceLost);
    } else {
      const auto copy = world_->stored(0, 777);
      world_->restore({.blocks = {1}}, *copy)->wait(10);
      ASSERT_TRUE(world_->cache().holds(1, 777));
    }
    ASSERT_TRUE(world_->cache().padding_is_untouched());
    ASSERT_EQ(device_->unpinned_copies(), 0U);
    ASSERT_TRUE(manager().close(100, {}).quiet);
  }

  void expect_that_it_did_much() const {
    EXPECT_GT(accepted_, 45U);
    EXPECT_GT(offloaded_, 15U);
    EXPECT_GT(restored_, 8U);
    EXPECT_GT(errors_, 0U) << "of the kind Busy";
  }
  [[nodiscard]] std::weak_ptr<Manager> weak_manager() { return world_->manager_ptr(); }

 private:
  struct Live {
    std::shared_ptr<Transfer> transfer;  // null: dropped
    TransferKind kind;
    BlockId block;
    std::optional<std::uint64_t> key;  // none: behind a restore that may fail
  };
  struct Stored {
    std::shared_ptr<HostCopy> copy;
    std::uint64_t key;
  };

  [[nodiscard]] WorldOptions world_options() const {
    ManagerConfig config = without_reaper();
    config.timeline = options_.timeline;
    config.timeline_records = 16;
    if (options_.checksum) config.checksum = Checksum::always;
    config.max_reports = 64;
    config.staging_pieces = 2;
    config.staging_piece_bytes = 4096;  // a block needs two
    return {.device_blocks = device_blocks,
            .slots = slots,
            .config = config,
            .pin = options_.memory == HostMemory::staged ? Pin::never : Pin::automatic};
  }
  [[nodiscard]] Manager& manager() { return world_->manager(); }
  std::size_t pick(std::size_t below) { return random_() % below; }

  void operate() {
    switch (pick(17)) {
      case 0:
      case 1:
      case 2:
        return offload(std::nullopt);
      case 3:
      case 4:
        return restore();
      case 5:
        return cancel_or_drop();
      case 6:
        return wait();
      case 7:
        return wait_on();
      case 8:
        return release_after();
      case 9:
        return toggle_stall();
      case 10:
      case 11:
        return static_cast<void>(device_->run_one());
      case 12:
        return offload(into());
      case 13:
        return offload_in_time();
      case 14:
        return wake_and_unwake();
      case 15:
        return armed([&] { static_cast<void>(manager().timeline()); });
      default:
        poll();
    }
  }

  After some_after() {
    switch (pick(6)) {
      case 0:
        return {};
      case 1:
        return armed([&] {
          Event event = world_->runtime().events()->acquire();
          event.record(engine_->handle());
          return world_->after_event(event.handle());
        });
      case 2:
      case 3:
        if (live_.empty() || !live_.back().transfer) return {};
        return armed([&] {
          After after = world_->after_stream(engine_->handle());
          manager().add_transfer(after, *live_.back().transfer);
          return after;
        });
      default:
        return armed([&] { return world_->after_stream(engine_->handle()); });
    }
  }

  [[nodiscard]] bool is_idle(BlockId block) {
    return armed([&] { return manager().busy(std::vector<BlockId>{block}).empty(); });
  }

  // A block with a known key, unless a restore writes it.
  BlockId filled_block() {
    const auto block = static_cast<BlockId>(pick(device_blocks));
    auto& key = keys_[static_cast<std::size_t>(block)];
    if (!key && is_idle(block)) world_->cache().fill(block, *(key = next_key_++));
    return block;
  }

  void accepted(std::shared_ptr<Transfer> transfer, TransferKind kind, BlockId block,
                std::optional<std::uint64_t> key) {
    if (!transfer) return;
    ++accepted_;
    live_.push_back({std::move(transfer), kind, block, key});
  }
  void accepted_offload(std::shared_ptr<Transfer> transfer, BlockId block) {
    const bool written = std::ranges::any_of(live_, [&](const Live& live) {
      return live.kind == TransferKind::restore && live.block == block;
    });
    accepted(std::move(transfer), TransferKind::offload, block,
             written ? std::nullopt : keys_[static_cast<std::size_t>(block)]);
  }

  std::optional<HostBlocks> into() {
    return armed([&] { return world_->pool().try_acquire(1); });
  }
  void offload(std::optional<HostBlocks> into) {
    const BlockId block = filled_block();
    const World::Ask ask{.blocks = {block}, .after = some_after(), .tag = next_tag()};
    accepted_offload(armed([&] {
                       return into ? world_->offload_into(ask, std::move(*into))
                                   : world_->try_offload(ask);
                     }),
                     block);
  }

  // One that waits for a slot, in line with whoever else does.
  void offload_in_time() {
    const BlockId block = filled_block();
    const TransferRequest request{.blocks = {block}, .after = some_after(), .tag = next_tag()};
    accepted_offload(armed([&] {
                       Admission admission = manager().admit(TransferKind::offload, request, true);
                       if (!manager().wait_for(admission, 1e-4, {})) admission.throw_timed_out();
                       return manager().offload(request, std::move(admission));
                     }),
                     block);
  }

  void restore() {
    if (copies_.empty()) return;
    const Stored& stored = copies_[pick(copies_.size())];
    const auto block = static_cast<BlockId>(pick(device_blocks));
    const World::Ask ask{.blocks = {block}, .after = some_after(), .tag = next_tag()};
    accepted(armed([&] { return world_->try_restore(ask, *stored.copy); }), TransferKind::restore,
             block, stored.key);
  }

  [[nodiscard]] Tag next_tag() const { return static_cast<std::int64_t>(accepted_); }

  void cancel_or_drop() {
    if (live_.empty()) return;
    Live& live = live_[pick(live_.size())];
    if (!live.transfer) return;
    const ArmedAllocations now;
    if (pick(2) == 0) static_cast<void>(live.transfer->cancel());
    // A restore's outcome decides what its block holds, so its handle is kept.
    else if (live.kind == TransferKind::offload)
      live.transfer.reset();
  }

  void wait() {
    if (live_.empty()) return;
    const auto transfer = live_[pick(live_.size())].transfer;
    if (!transfer) return;
    try {
      armed([&] { transfer->wait(0.01); });
    } catch (const TimedOut&) {  // behind the stall
    }
  }

  void wait_on() {
    if (live_.empty() || !live_.back().transfer) return;
    const auto transfer = live_.back().transfer;
    // Behind one whose event could not be recorded, it waits for that one's end: behind the stall.
    if (transfer->state() == TransferState::queued) stall_.reset();
    armed([&] { transfer->wait_on(engine_->handle(), std::nullopt); });
  }

  void wake_and_unwake() {
    if (live_.empty() || !live_.back().transfer) return;
    const auto transfer = live_.back().transfer;
    const std::uint64_t token = accepted_;
    armed([&] {
      transfer->wake(wake_list_, token);
      static_cast<void>(wake_list_->drain());
      transfer->unwake(wake_list_, token);
    });
  }

  void release_after() {
    held_.clear();
    auto blocks = armed([&] { return world_->pool().try_acquire(1); });
    if (!blocks) return;
    held_.push_back(std::move(*blocks));
    armed([&] {
      const auto mark = world_->runtime().mark_stream(engine_->handle());
      world_->runtime().release_after(held_.back(), {mark});
    });
  }

  void toggle_stall() {
    if (stall_)
      stall_.reset();
    else
      stall_ = std::make_unique<Stall>(used_, engine_->handle());
  }

  void poll() {
    for (const Report& report : surely([&] { return manager().poll(); })) {
      ++reported_;
      EXPECT_TRUE(ids_.insert(report.id).second) << "reported twice";
      EXPECT_TRUE(!report.error.empty() || report.state != TransferState::failed);
    }
    settle_ended();
  }

  // What ended done holds what it should; what did not leaves the block undefined.
  void settle_ended() {
    for (auto live = live_.begin(); live != live_.end();) {
      if (live->transfer && !live->transfer->done()) {
        ++live;
        continue;
      }
      if (live->transfer) settle(live);
      live = live_.erase(live);
    }
  }
  void settle(std::vector<Live>::iterator live) {
    const bool done = live->transfer->state() == TransferState::done;
    if (live->kind == TransferKind::restore) {
      keys_[static_cast<std::size_t>(live->block)] = done ? live->key : std::nullopt;
      const bool again = std::any_of(std::next(live), live_.end(), [&](const Live& later) {
        return later.kind == TransferKind::restore && later.block == live->block;
      });
      if (!done || again) return;
      ++restored_;
      EXPECT_TRUE(world_->cache().holds(live->block, *live->key));
    } else if (done && live->key) {
      ++offloaded_;
      const auto copy = surely([&] { return live->transfer->result(); });
      EXPECT_TRUE(CacheMemory::holds(copy->blocks(), 0, *live->key));
      if (copies_.size() == 3) copies_.erase(copies_.begin());
      copies_.push_back({copy, *live->key});
    }
  }

  // After every step: nothing that could be handed out may still be touched, on either side.
  void look() {
    world_->pool().check();
    const SlotCounts counts = world_->slots();
    ASSERT_EQ(counts.free + counts.held + counts.quarantined + counts.poisoned, slots);
    device_->forget_calls();  // they would be many
    if (device_->pending_copies() == 0) return;
    if (counts.free > 0) {
      const auto free = world_->pool().try_acquire(counts.free);
      ASSERT_TRUE(free);
      for (std::size_t i = 0; i < free->size(); ++i) {
        ASSERT_FALSE(device_->may_touch(free->data(i), CacheMemory::block_bytes()))
            << "a free slot is still in use by a copy";
      }
    }
    if (device_->lost()) return;
    std::vector<BlockId> idle(device_blocks);
    std::iota(idle.begin(), idle.end(), BlockId{0});
    for (const BlockId used : manager().busy(idle)) std::erase(idle, used);
    for (const BlockId block : idle) {
      for (std::size_t region = 0; region < 3; ++region) {
        ASSERT_FALSE(device_->may_touch(world_->cache().segment(block, region),
                                        CacheMemory::payloads[region]))
            << "device block " << block << " is still in use by a copy";
      }
    }
  }

  std::shared_ptr<ScriptedDevice> device_;  // what happens
  std::shared_ptr<ModelDevice> used_;       // what kvmem sees of it
  const ScenarioOptions options_;
  std::unique_ptr<World> world_;
  std::unique_ptr<Stream> engine_;
  std::shared_ptr<WakeList> wake_list_;
  std::unique_ptr<Stall> stall_;
  std::vector<std::optional<std::uint64_t>> keys_;  // none: undefined
  std::vector<Live> live_;
  std::vector<Stored> copies_;
  std::vector<HostBlocks> held_;
  std::mt19937 random_{12345};
  std::uint64_t next_key_ = 10'000;
  std::size_t accepted_ = 0, reported_ = 0, errors_ = 0;
  std::size_t offloaded_ = 0, restored_ = 0;  // and their bytes looked at
  std::set<std::uint64_t> ids_;
};

}  // namespace kvmem::test
