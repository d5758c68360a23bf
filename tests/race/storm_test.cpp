// Eight threads use one manager in every way at once, on the host device and on the CUDA device
// over a fake runtime, with real bytes; the close comes while they are at it. Every restored block
// is verified, every tagged transfer is reported once, and at the end every slot is free.
//
// KVMEM_STORM_SECONDS sets the length (default 3). Each thread has device blocks of its own, so it
// knows what they hold; transfers are shared, and anybody may cancel, await or drop anybody's.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/host_device.hpp"
#include "support/cuda_over_fake.hpp"
#include "support/offload_world.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t threads = 8;
constexpr std::size_t blocks_each = 6;

double storm_seconds() {
  const char* const text = std::getenv("KVMEM_STORM_SECONDS");
  const double seconds = text != nullptr ? std::atof(text) : 0;
  return seconds > 0 ? seconds : 3;
}

enum Operation : std::size_t {
  acquire,
  offload,
  verified_offload,
  restore,
  verified_restore,
  cancel,
  drop,
  poll,
  drain,
  stats,
  wait_on,
  release_after,
  cancel_in_flight,
  refused,
  busy,
  operation_count
};
constexpr std::array<const char*, operation_count> names{"acquire",
                                                         "offload",
                                                         "verified offload",
                                                         "restore",
                                                         "verified restore",
                                                         "cancel",
                                                         "drop",
                                                         "poll",
                                                         "drain",
                                                         "stats",
                                                         "wait_on",
                                                         "release_after",
                                                         "cancel in flight",
                                                         "refused",
                                                         "busy"};

// What the threads share.
class Storm {
 public:
  Storm(std::shared_ptr<ModelDevice> device, bool reaper)
      : world_(std::move(device),
               {.device_blocks = threads * blocks_each, .slots = 24, .config = config(reaper)}) {}

  void run() {
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t)
      running.emplace_back([this, t] { Sailor(*this, t).sail(); });
    // The length of the storm is what is asked for: nothing else to wait for.
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                               std::chrono::duration<double>(storm_seconds()));
    while (std::chrono::steady_clock::now() < end && !broken_) {
      const auto seen = world_.device().progress().value();
      world_.device().sleep(seen, 1'000'000, false);
    }
    const CloseReport report = world_.manager().close(60, {});
    EXPECT_TRUE(report.quiet);
    EXPECT_EQ(report.in_flight, 0U);
    for (auto& thread : running) thread.join();
  }

  void expect_conserved() {
    collect_reports();
    EXPECT_EQ(reported_, accepted_tagged_) << "each tagged transfer is reported once";
    shared_.clear();
    const auto quiet = [&] { return world_.runtime().recycle().in_flight() == 0; };
    EXPECT_TRUE(world_.runtime().wait_until(quiet, world_.runtime().deadline_after(60), {}));
    EXPECT_EQ(world_.slots(), (SlotCounts{.capacity = 24, .free = 24}));
    world_.pool().check();
    const ManagerStats stats = world_.manager().stats();
    for (const DirectionStats& direction : stats.directions) {
      EXPECT_EQ(direction.accepted, direction.done + direction.cancelled + direction.failed);
      EXPECT_EQ(direction.failed, 0U);
      EXPECT_EQ(direction.active, 0U);
      EXPECT_EQ(direction.queued_bytes, 0U);
      EXPECT_EQ(direction.window_bytes, 0U);
      EXPECT_EQ(direction.lanes_owned, 0U);
    }
    EXPECT_EQ(stats.restoration_slots, 0U);
    EXPECT_EQ(stats.waiters, 0U);
    EXPECT_TRUE(world_.cache().padding_is_untouched());
    for (std::size_t i = 0; i < operation_count; ++i) {
      // Where few transfers are in flight at once, a block is seldom found in use.
      EXPECT_TRUE(counts_[i].load() > 0 || (i == busy && !world_.device().info().wakes_sleepers))
          << names[i] << " was never reached";
      std::cout << names[i] << ' ' << counts_[i].load() << (i + 1 < operation_count ? ", " : "\n");
    }
  }

 private:
  static ManagerConfig config(bool reaper) {
    ManagerConfig made;
    made.reaper = reaper;
    made.window_bytes = smallest_window_bytes;
    made.max_queued_bytes = 8 * CacheMemory::block_bytes();
    made.max_reports = 64;
    made.timeline = true;
    made.timeline_records = 256;
    return made;
  }

  void count(Operation operation) { counts_[operation].fetch_add(1); }

  void collect_reports() {
    for (const Report& report : world_.manager().poll()) {
      const std::lock_guard lock(mutex_);
      ++reported_;
      EXPECT_TRUE(ids_.insert(report.id).second) << "reported twice";
    }
  }
  void share(std::shared_ptr<Transfer> transfer) {
    std::shared_ptr<Transfer> dropped;  // outside the lock
    const std::lock_guard lock(mutex_);
    if (shared_.size() < 16)
      shared_.push_back(std::move(transfer));
    else
      dropped = std::exchange(shared_[transfer->job()->id % 16], transfer);
  }
  std::shared_ptr<Transfer> somebodys(std::size_t which) {
    const std::lock_guard lock(mutex_);
    return shared_.empty() ? nullptr : shared_[which % shared_.size()];
  }
  void fail(const std::string& what) {
    ADD_FAILURE() << what;
    broken_ = true;
  }

  class Sailor {
   public:
    Sailor(Storm& storm, unsigned number)
        : storm_(storm),
          number_(number),
          random_(number),
          stream_(storm.world_.device_ptr()),
          consumer_(storm.world_.device_ptr()) {}

    void sail() {
      try {
        while (!storm_.broken_) step();
      } catch (const Closed&) {  // the end
      } catch (const std::exception& error) {
        storm_.fail(error.what());
      }
      kept_.clear();
    }

   private:
    struct Kept {
      std::shared_ptr<HostCopy> copy;
      std::uint64_t key;
    };

    World& world() { return storm_.world_; }
    std::size_t pick(std::size_t below) { return random_() % below; }
    BlockId own_block() { return static_cast<BlockId>(number_ * blocks_each + pick(blocks_each)); }
    bool idle(BlockId block) { return world().manager().busy(std::vector<BlockId>{block}).empty(); }

    void step() {
      switch (pick(17)) {
        case 0:
        case 1:
        case 2:
        case 3:
          return go_offload();
        case 4:
        case 5:
        case 6:
          return go_restore();
        case 7: {
          if (const auto transfer = storm_.somebodys(pick(16))) {
            static_cast<void>(transfer->cancel());
            storm_.count(cancel);
          }
          return;
        }
        case 8: {
          storm_.collect_reports();
          return storm_.count(poll);
        }
        case 9: {
          static_cast<void>(world().manager().drain(0.0005, {}));
          return storm_.count(drain);
        }
        case 10: {
          static_cast<void>(world().manager().stats());
          static_cast<void>(world().manager().timeline());
          static_cast<void>(world().pool().stats());
          return storm_.count(stats);
        }
        case 11:
          return await_somebodys();
        case 12:
          return copy_with_a_stream_of_ones_own();
        case 13:
          return acquire_and_write([] {});
        case 14:
          return wait_in_line();
        case 15:
          return cancel_while_it_cannot_move();
        default:
          if (!kept_.empty()) kept_.erase(kept_.begin());
      }
    }

    // Holds what comes after it back until it goes out of scope.
    std::unique_ptr<Stall> some_stall() {
      if (pick(3) != 0) return nullptr;
      return std::make_unique<Stall>(world().device_ptr(), stream_.handle());
    }
    World::Ask ask(BlockId block) {
      World::Ask made{.blocks = {block}};
      if (pick(2) == 0) made.after = world().after_stream(stream_.handle());
      made.priority = pick(2) == 0 ? Priority::demand : Priority::background;
      if (pick(2) == 0) made.tag = static_cast<std::int64_t>(number_);
      return made;
    }
    void note_accepted(const World::Ask& made) {
      if (!made.tag) return;
      const std::lock_guard lock(storm_.mutex_);
      ++storm_.accepted_tagged_;
    }

    void go_offload() {
      const BlockId block = own_block();
      if (!idle(block)) return;
      const std::uint64_t key = next_key();
      world().cache().fill(block, key);
      auto stall = some_stall();
      const World::Ask made = ask(block);
      auto transfer = world().try_offload(made);
      if (!transfer) return storm_.count(refused);
      note_accepted(made);
      storm_.count(offload);
      if (pick(4) == 0) storm_.share(transfer);
      if (pick(4) == 0) return storm_.count(drop);
      stall.reset();
      if (!ends_done(*transfer)) return;
      const auto copy = transfer->result();
      if (!CacheMemory::holds(copy->blocks(), 0, key))
        return storm_.fail("an offloaded block differs");
      storm_.count(verified_offload);
      if (kept_.size() < 2) kept_.push_back({copy, key});
    }

    void go_restore() {
      if (kept_.empty()) return;
      const Kept& stored = kept_[pick(kept_.size())];
      const BlockId block = own_block();
      auto stall = some_stall();
      const World::Ask made = ask(block);
      std::shared_ptr<Transfer> transfer;
      try {
        transfer = world().try_restore(made, *stored.copy);
      } catch (const Busy&) {
        return storm_.count(busy);
      }
      if (!transfer) return storm_.count(refused);
      note_accepted(made);
      storm_.count(restore);
      if (pick(4) == 0) storm_.share(transfer);
      if (pick(4) == 0) return storm_.count(drop);
      if (pick(2) == 0) await(*transfer);
      stall.reset();
      if (!ends_done(*transfer)) return;
      if (!world().cache().holds(block, stored.key)) return storm_.fail("a restored block differs");
      storm_.count(verified_restore);
    }

    bool ends_done(Transfer& transfer) {
      try {
        transfer.wait(60);
        return true;
      } catch (const Cancelled&) {
        return false;
      } catch (const TimedOut&) {
        storm_.fail("a transfer does not end");
        return false;
      }
    }

    void await(Transfer& transfer) {
      try {
        transfer.wait_on(consumer_.handle(), std::nullopt);
        storm_.count(wait_on);
      } catch (const Cancelled&) {
      }
    }
    // Its stages may wait for a stall that another thread opens soon, never for this one.
    void await_somebodys() {
      if (const auto transfer = storm_.somebodys(pick(16))) await(*transfer);
    }

    // As an engine with a copy kernel of its own would.
    void copy_with_a_stream_of_ones_own() {
      auto blocks = world().pool().try_acquire(1);
      if (!blocks) return storm_.count(refused);
      const BlockId block = own_block();
      if (!idle(block)) return;
      std::byte* const target = blocks->data(0);
      const std::byte* const from = world().cache().segment(block, 2);
      const std::size_t bytes = 512;
      Event done = world().runtime().events()->acquire();
      {
        const auto stall = some_stall();
        world().device().copy({&target, &from, &bytes, 1}, Direction::to_host,
                              SourceAccess::stream_order, stream_.handle());
        done.record(stream_.handle());
        world().runtime().release_after(*blocks, {world().runtime().mark_stream(stream_.handle())});
      }
      storm_.count(release_after);
      // The arrays on this stack must outlive the copy.
      const auto ended = [&] { return done.query() == EventState::done; };
      if (!world().runtime().wait_until(ended, world().runtime().deadline_after(60), {})) {
        storm_.fail("a copy of one's own does not end");
      }
    }

    // The copy runs when everybody has had a chance to get its blocks.
    void cancel_while_it_cannot_move() {
      const BlockId block = own_block();
      if (!idle(block)) return;
      Stall stall(world().device_ptr(), stream_.handle());
      World::Ask made{.blocks = {block}};
      made.after = world().after_stream(stream_.handle());
      auto transfer = world().try_offload(made);
      if (!transfer) return storm_.count(refused);
      static_cast<void>(transfer->cancel());
      storm_.count(cancel_in_flight);
      const std::weak_ptr<TransferJob> job = transfer->job();
      transfer.reset();
      acquire_and_write([&] {
        stall.open();
        const auto ended = [&] {
          const auto alive = job.lock();
          return !alive || is_terminal(alive->ended.load());
        };
        if (!world().runtime().wait_until(ended, world().runtime().deadline_after(60), {})) {
          storm_.fail("a cancelled transfer does not end");
        }
      });
    }

    template <class Meanwhile>
    void acquire_and_write(Meanwhile&& meanwhile) {
      auto blocks = world().pool().try_acquire(1 + pick(2));
      if (!blocks) return storm_.count(refused);
      storm_.count(acquire);
      for (std::size_t i = 0; i < blocks->size(); ++i) {
        std::memset(blocks->data(i), static_cast<int>(number_ + 1), CacheMemory::block_bytes());
      }
      meanwhile();
      for (std::size_t i = 0; i < blocks->size(); ++i) {
        const std::byte* const data = blocks->data(i);
        const auto mine = static_cast<std::byte>(number_ + 1);
        const bool alone = std::all_of(data, data + CacheMemory::block_bytes(),
                                       [&](std::byte byte) { return byte == mine; });
        if (!alone) storm_.fail("somebody writes into blocks that are ours");
      }
    }

    void wait_in_line() {
      const BlockId block = own_block();
      if (!idle(block)) return;
      const std::uint64_t key = next_key();
      world().cache().fill(block, key);
      TransferRequest request;
      request.blocks = {block};
      Admission admission = world().manager().admit(TransferKind::offload, request, true);
      if (!world().manager().wait_for(admission, 0.002, {})) return storm_.count(refused);
      const auto transfer = world().manager().offload(request, std::move(admission));
      storm_.count(offload);
      if (ends_done(*transfer) && !CacheMemory::holds(transfer->result()->blocks(), 0, key)) {
        storm_.fail("an offloaded block differs");
      }
    }

    std::uint64_t next_key() { return (std::uint64_t{number_ + 1} << 32) + ++keys_; }

    Storm& storm_;
    const unsigned number_;
    std::mt19937 random_;
    Stream stream_;
    Stream consumer_;
    std::vector<Kept> kept_;
    std::uint64_t keys_ = 0;
  };

  World world_;
  std::atomic<bool> broken_{false};
  std::array<std::atomic<std::uint64_t>, operation_count> counts_{};

  std::mutex mutex_;  // over what follows
  std::vector<std::shared_ptr<Transfer>> shared_;
  std::set<std::uint64_t> ids_;
  std::size_t accepted_tagged_ = 0, reported_ = 0;
};

struct Weather {
  std::string name;
  bool reaper;
  std::optional<OverFake> over_fake{};
};
void PrintTo(const Weather& weather, std::ostream* out) { *out << weather.name; }

class Race : public ::testing::TestWithParam<Weather> {};

TEST_P(Race, EightThreadsAndACloseLeaveNothingBehindAndNoByteWrong) {
  const auto& over = GetParam().over_fake;
  std::shared_ptr<ModelDevice> device;
  if (over)
    device = std::make_shared<CudaOver<ModelDevice>>(*over);
  else
    device = make_host_device({.workers = 2});
  Storm storm(std::move(device), GetParam().reaper);
  storm.run();
  storm.expect_conserved();
}

INSTANTIATE_TEST_SUITE_P(
    Storm, Race,
    ::testing::Values(Weather{"WithAReaper", true}, Weather{"WithoutAReaper", false},
                      Weather{"OnCuda12WithAReaper", true, OverFake{.major = 12}},
                      Weather{"OnCuda13WithoutAReaper", false, OverFake{.major = 13}},
                      Weather{"OnCuda13OneByOneWithAReaper", true,
                              OverFake{.major = 13, .batch = false}}),
    [](const auto& weather) { return weather.param.name; });

}  // namespace
}  // namespace kvmem::test
