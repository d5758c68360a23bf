// The k-th device call of each kind fails, for every k, in a scenario of about a hundred
// operations.
//
// Whatever fails: no block is handed out while a copy may touch it, nothing hangs, every transfer
// ends once, nothing leaks, and the manager goes on working; or the device is lost and says so.
#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/offload_world.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t device_blocks = 12;
constexpr std::size_t slots = 10;
constexpr int operations = 100;

struct Fault {
  CallKind kind;
  Failure how;
  bool timeline;
  const char* name;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class Scenario {
 public:
  Scenario(std::shared_ptr<ScriptedDevice> device, bool timeline)
      : device_(std::move(device)),
        world_(device_,
               {.device_blocks = device_blocks, .slots = slots, .config = config(timeline)}),
        engine_(device_),
        keys_(device_blocks) {
    for (std::size_t i = 0; i < device_blocks; ++i) keys_[i] = i;
  }

  void run() {
    for (int i = 0; i < operations; ++i) {
      settle_ended();
      try {
        operate();
      } catch (const Error&) {  // typed, and nothing else
        ++errors_;
      }
      look();
      if (::testing::Test::HasFailure()) return;
    }
  }

  // Everything ends, and what there is afterwards is right.
  void finish(bool expect_working) {
    stall_.reset();
    device_->heal();
    ASSERT_TRUE(world_.manager().drain(100, {})) << "something never ends";
    look();
    poll();
    ASSERT_EQ(reported_, accepted_) << "each transfer ends once";
    live_.clear();
    copies_.clear();
    held_.clear();
    const auto quiet = [&] { return world_.runtime().recycle().in_flight() == 0; };
    ASSERT_TRUE(world_.runtime().wait_until(quiet, world_.runtime().deadline_after(100), {}));
    const SlotCounts counts = world_.slots();
    ASSERT_EQ(counts.free + counts.poisoned, slots);
    ASSERT_TRUE(device_->lost() || counts.poisoned == 0);
    if (expect_working && !device_->lost()) {
      const auto copy = world_.stored(0, 777);
      world_.restore({.blocks = {1}}, *copy)->wait(10);
      ASSERT_TRUE(world_.cache().holds(1, 777));
    }
    if (device_->lost()) {
      ASSERT_THROW(world_.offload({.blocks = {0}}), DeviceLost);
    }
    ASSERT_TRUE(world_.cache().padding_is_untouched());
    ASSERT_TRUE(world_.manager().close(100, {}).quiet);
  }

  void expect_that_it_did_much() const {
    EXPECT_GT(accepted_, 25U);
    EXPECT_GT(offloaded_, 5U);
    EXPECT_GT(restored_, 3U);
    EXPECT_GT(errors_, 0U) << "of the kind Busy";
  }
  [[nodiscard]] std::weak_ptr<Manager> manager() { return world_.manager_ptr(); }

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

  static ManagerConfig config(bool timeline) {
    ManagerConfig made = without_reaper();
    made.timeline = timeline;
    made.timeline_records = 16;
    return made;
  }
  std::size_t pick(std::size_t below) { return random_() % below; }

  void operate() {
    switch (pick(12)) {
      case 0:
      case 1:
      case 2:
        return offload();
      case 3:
      case 4:
        return restore();
      case 5:
        return cancel_or_drop();
      case 6:
        return wait();
      case 7: {
        if (!live_.empty() && live_.back().transfer) {
          // Behind one whose event could not be recorded, it waits for that one's end: behind the
          // stall.
          if (live_.back().transfer->state() == TransferState::queued) stall_.reset();
          live_.back().transfer->wait_on(engine_.handle(), std::nullopt);
        }
        return;
      }
      case 8:
        return release_after();
      case 9: {
        if (stall_)
          stall_.reset();
        else
          stall_ = std::make_unique<Stall>(device_, engine_.handle());
        return;
      }
      case 10:
        device_->run_one();
        return;
      default:
        poll();
    }
  }

  After some_after() {
    switch (pick(6)) {
      case 0:
        return {};
      case 2:
      case 3: {
        if (live_.empty() || !live_.back().transfer) return {};
        After after = world_.after_stream(engine_.handle());
        world_.manager().add_transfer(after, *live_.back().transfer);
        return after;
      }
      case 1: {
        Event event = world_.runtime().events()->acquire();
        event.record(engine_.handle());
        return world_.after_event(event.handle());
      }
      default:
        return world_.after_stream(engine_.handle());
    }
  }

  void offload() {
    const auto block = static_cast<BlockId>(pick(device_blocks));
    auto& key = keys_[static_cast<std::size_t>(block)];
    if (!key && world_.manager().busy(std::vector<BlockId>{block}).empty()) {
      world_.cache().fill(block, *(key = next_key_++));
    }
    const bool written = std::ranges::any_of(live_, [&](const Live& live) {
      return live.kind == TransferKind::restore && live.block == block;
    });
    const After after = some_after();
    const auto id = static_cast<std::int64_t>(accepted_);
    if (auto transfer = world_.try_offload({.blocks = {block}, .after = after, .tag = id})) {
      ++accepted_;
      live_.push_back(
          {std::move(transfer), TransferKind::offload, block, written ? std::nullopt : key});
    }
  }

  void restore() {
    if (copies_.empty()) return;
    const Stored& stored = copies_[pick(copies_.size())];
    const auto block = static_cast<BlockId>(pick(device_blocks));
    const After after = some_after();
    const auto id = static_cast<std::int64_t>(accepted_);
    if (auto transfer =
            world_.try_restore({.blocks = {block}, .after = after, .tag = id}, *stored.copy)) {
      ++accepted_;
      live_.push_back({std::move(transfer), TransferKind::restore, block, stored.key});
    }
  }

  void cancel_or_drop() {
    if (live_.empty()) return;
    Live& live = live_[pick(live_.size())];
    if (!live.transfer) return;
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
      transfer->wait(0.01);
    } catch (const TimedOut&) {  // behind the stall
    }
  }

  void release_after() {
    held_.clear();
    auto blocks = world_.pool().try_acquire(1);
    if (!blocks) return;
    held_.push_back(std::move(*blocks));
    const auto mark = world_.runtime().mark_stream(engine_.handle());
    world_.runtime().release_after(held_.back(), {mark});
  }

  void poll() {
    for (const Report& report : world_.manager().poll()) {
      ++reported_;
      EXPECT_TRUE(ids_.insert(report.id).second) << "reported twice";
      EXPECT_EQ(report.error.empty(), report.state != TransferState::failed);
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
      if (live->transfer) {
        const bool done = live->transfer->state() == TransferState::done;
        if (live->kind == TransferKind::restore) {
          keys_[static_cast<std::size_t>(live->block)] = done ? live->key : std::nullopt;
          const bool again = std::any_of(std::next(live), live_.end(), [&](const Live& later) {
            return later.kind == TransferKind::restore && later.block == live->block;
          });
          if (done && !again) {
            ++restored_;
            EXPECT_TRUE(world_.cache().holds(live->block, *live->key));
          }
        } else if (done && live->key) {
          ++offloaded_;
          EXPECT_TRUE(CacheMemory::holds(live->transfer->result()->blocks(), 0, *live->key));
          if (copies_.size() == 3) copies_.erase(copies_.begin());
          copies_.push_back({live->transfer->result(), *live->key});
        }
      }
      live = live_.erase(live);
    }
  }

  // After every step: nothing that could be handed out may still be touched, on either side.
  void look() {
    world_.pool().check();
    const SlotCounts counts = world_.slots();
    ASSERT_EQ(counts.free + counts.held + counts.quarantined + counts.poisoned, slots);
    if (counts.free > 0) {
      const auto free = world_.pool().try_acquire(counts.free);
      ASSERT_TRUE(free);
      for (std::size_t i = 0; i < free->size(); ++i) {
        ASSERT_FALSE(device_->may_touch(free->data(i), CacheMemory::block_bytes()))
            << "a free slot is still in use by a copy";
      }
    }
    for (BlockId block = 0; block < static_cast<BlockId>(device_blocks); ++block) {
      if (device_->lost() || !world_.manager().busy(std::vector<BlockId>{block}).empty()) continue;
      for (std::size_t region = 0; region < 3; ++region) {
        ASSERT_FALSE(device_->may_touch(world_.cache().segment(block, region),
                                        CacheMemory::payloads[region]))
            << "device block " << block << " is still in use by a copy";
      }
    }
  }

  std::shared_ptr<ScriptedDevice> device_;
  World world_;
  Stream engine_;
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

class KthCallFails : public ::testing::TestWithParam<Fault> {};

TEST_P(KthCallFails, ForEveryK) {
  const Fault& fault = GetParam();
  std::size_t k = 1;
  for (;; ++k) {
    SCOPED_TRACE(k);
    const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
    std::weak_ptr<Manager> manager;
    device->fail(fault.kind, k, fault.how);
    std::unique_ptr<Scenario> scenario;
    try {
      scenario = std::make_unique<Scenario>(device, fault.timeline);
    } catch (const Error&) {  // a manager that cannot be made leaves nothing behind
      ASSERT_EQ(device->injected(), 1U);
    }
    if (scenario) {
      manager = scenario->manager();
      scenario->run();
      if (HasFailure()) return;
      scenario->finish(true);
      if (HasFailure()) return;
      if (device->injected() == 0) scenario->expect_that_it_did_much();
      scenario.reset();
    }
    ASSERT_TRUE(manager.expired()) << "the manager leaked";
    ASSERT_EQ(device->live_events(), 0);
    ASSERT_EQ(device->live_streams(), 0);
    if (device->injected() == 0) break;  // the scenario has fewer calls of that kind
  }
  EXPECT_GT(k, fault.kind == CallKind::create_stream ? 10U : 30U) << "the scenario is too small";
}

// Many calls fail, each with some probability in its place.
TEST(ManyCallsFail, OfAllKinds) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
    auto scenario = std::make_unique<Scenario>(device, seed % 2 == 0);
    for (const CallKind kind : {CallKind::copy, CallKind::record, CallKind::wait,
                                CallKind::create_event, CallKind::create_stream, CallKind::query}) {
      for (int i = 0; i < 10; ++i) {
        device->fail(kind, 1 + random() % 150,
                     random() % 2 == 0 ? Failure::refused : Failure::in_flight);
      }
    }
    scenario->run();
    if (HasFailure()) return;
    EXPECT_GT(device->injected(), 5U);
    scenario->finish(true);
    if (HasFailure()) return;
    const std::weak_ptr<Manager> manager = scenario->manager();
    scenario.reset();
    ASSERT_TRUE(manager.expired());
    ASSERT_EQ(device->live_events(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, KthCallFails,
    ::testing::Values(Fault{CallKind::copy, Failure::refused, false, "CopyRefused"},
                      Fault{CallKind::copy, Failure::in_flight, false, "CopyInFlight"},
                      Fault{CallKind::copy, Failure::lost, false, "CopyLost"},
                      Fault{CallKind::record, Failure::refused, true, "RecordRefused"},
                      Fault{CallKind::record, Failure::in_flight, true, "RecordInFlight"},
                      Fault{CallKind::record, Failure::lost, false, "RecordLost"},
                      Fault{CallKind::wait, Failure::refused, false, "WaitRefused"},
                      Fault{CallKind::wait, Failure::in_flight, false, "WaitInFlight"},
                      Fault{CallKind::wait, Failure::lost, false, "WaitLost"},
                      Fault{CallKind::create_event, Failure::refused, true, "CreateEventRefused"},
                      Fault{CallKind::create_event, Failure::lost, false, "CreateEventLost"},
                      Fault{CallKind::create_stream, Failure::refused, false,
                            "CreateStreamRefused"},
                      Fault{CallKind::create_stream, Failure::lost, false, "CreateStreamLost"},
                      Fault{CallKind::query, Failure::refused, true, "QueryFailed"},
                      Fault{CallKind::query, Failure::lost, false, "QueryLost"}),
    [](const auto& fault) { return fault.param.name; });

}  // namespace
}  // namespace kvmem::test
