// The ordering hazards, each as a pair: without the mechanism the bytes are wrong, with it they are
// right. Gates decide what runs when; nothing is left to chance. An engine's kernel is a copy on a
// stream of its own.
#include <list>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/offload_world.hpp"

namespace kvmem::test {
namespace {

class Ordering : public ::testing::Test {
 protected:
  static constexpr BlockId block = 3;
  static constexpr std::uint64_t old_key = 3;  // World fills each block with its number
  static constexpr std::uint64_t new_key = 1000;

  World world_{still_device(), {.config = without_reaper()}};
  Device& device_ = world_.device();
  Stream engine_{world_.device_ptr()};

  // Bytes of one block outside the cache, payload behind payload.
  using Image = std::vector<std::byte>;
  static Image image(std::uint64_t key) {
    const CacheMemory::Block bytes = CacheMemory::pattern(key);
    return {bytes.begin(), bytes.end()};
  }

  // The engine computes or reads a block: queued on its stream.
  void write_block(StreamHandle stream, const Image& source, BlockId to = block) {
    kernel(stream, [&](std::size_t region, std::size_t offset, Arrays& arrays) {
      arrays.targets.push_back(world_.cache().segment(to, region));
      arrays.sources.push_back(source.data() + offset);
    });
  }
  void read_block(StreamHandle stream, Image& target, BlockId from = block) {
    kernel(stream, [&](std::size_t region, std::size_t offset, Arrays& arrays) {
      arrays.targets.push_back(target.data() + offset);
      arrays.sources.push_back(world_.cache().segment(from, region));
    });
  }

  // Moves everything that may run.
  void settle(StreamHandle stream) {
    const EventHandle event = device_.create_event(false);
    device_.record(event, stream);
    const auto done = [&] { return device_.query(event) == EventState::done; };
    ASSERT_TRUE(world_.runtime().wait_until(done, world_.runtime().deadline_after(10), {}));
    device_.destroy_event(event);
  }

  // A naive copy of the block on a stream, for when the manager's own ordering is not wanted.
  void raw_offload(StreamHandle stream, Image& target) { read_block(stream, target); }

 private:
  struct Arrays {
    std::vector<std::byte*> targets;
    std::vector<const std::byte*> sources;
    std::vector<std::size_t> sizes;
  };
  template <class Describe>
  void kernel(StreamHandle stream, Describe&& describe) {
    Arrays& arrays = arrays_.emplace_back();
    std::size_t offset = 0;
    for (std::size_t region = 0; region < 3; ++region) {
      describe(region, offset, arrays);
      arrays.sizes.push_back(CacheMemory::payloads[region]);
      offset += CacheMemory::payloads[region];
    }
    device_.copy({arrays.targets.data(), arrays.sources.data(), arrays.sizes.data(), 3},
                 Direction::to_device, SourceAccess::stream_order, stream);
  }
  std::list<Arrays> arrays_;
};

// ---- 1 offload: read after write ----

// Public failure 1: a store began before the kernel had written the block.
TEST_F(Ordering, AnOffloadWithoutAfterReadsTheBlockBeforeItWasComputed) {
  const Image computed = image(new_key);
  Stall stall(world_.device_ptr(), engine_.handle());
  write_block(engine_.handle(), computed);
  const auto transfer = world_.offload({.blocks = {block}});
  transfer->wait(10);
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, old_key))
      << "wrong, as it must be";
  stall.open();
  settle(engine_.handle());
}

// Public failure 1: a store began before the kernel had written the block.
TEST_F(Ordering, AnOffloadAfterTheStreamReadsWhatItComputed) {
  const Image computed = image(new_key);
  Stall stall(world_.device_ptr(), engine_.handle());
  write_block(engine_.handle(), computed);
  const auto transfer =
      world_.offload({.blocks = {block}, .after = world_.after_stream(engine_.handle())});
  EXPECT_THROW(transfer->wait(0.001), TimedOut);
  stall.open();
  transfer->wait(10);
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, new_key));
}

// ---- 2 restore: write after read ----

// Public failure 2: a load wrote into a block that an earlier kernel still read.
TEST_F(Ordering, ARestoreWithoutAfterOverwritesABlockThatIsStillToBeRead) {
  const auto copy = world_.stored(9, new_key);
  Image seen(CacheMemory::block_bytes());
  Stall stall(world_.device_ptr(), engine_.handle());
  read_block(engine_.handle(), seen);
  world_.restore({.blocks = {block}}, *copy)->wait(10);
  stall.open();
  settle(engine_.handle());
  EXPECT_EQ(seen, image(new_key)) << "wrong, as it must be";
}

// Public failure 2: a load wrote into a block that an earlier kernel still read.
TEST_F(Ordering, ARestoreAfterTheStreamLetsItsReadsGoFirst) {
  const auto copy = world_.stored(9, new_key);
  Image seen(CacheMemory::block_bytes());
  Stall stall(world_.device_ptr(), engine_.handle());
  read_block(engine_.handle(), seen);
  const auto transfer =
      world_.restore({.blocks = {block}, .after = world_.after_stream(engine_.handle())}, *copy);
  EXPECT_THROW(transfer->wait(0.001), TimedOut);
  stall.open();
  transfer->wait(10);
  settle(engine_.handle());
  EXPECT_EQ(seen, image(old_key));
  EXPECT_TRUE(world_.cache().holds(block, new_key));
}

// ---- 3 wait_on ----

TEST_F(Ordering, AConsumerThatDoesNotWaitReadsTheBlockBeforeItArrives) {
  const auto copy = world_.stored(9, new_key);
  Image seen(CacheMemory::block_bytes());
  const Stream upstream(world_.device_ptr());
  Stall stall(world_.device_ptr(), upstream.handle());
  const auto transfer =
      world_.restore({.blocks = {block}, .after = world_.after_stream(upstream.handle())}, *copy);
  read_block(engine_.handle(), seen);
  settle(engine_.handle());
  stall.open();
  transfer->wait(10);
  EXPECT_EQ(seen, image(old_key)) << "wrong, as it must be";
}

TEST_F(Ordering, AConsumerThatWaitsReadsTheRestoredBlock) {
  const auto copy = world_.stored(9, new_key);
  Image seen(CacheMemory::block_bytes());
  const Stream upstream(world_.device_ptr());
  Stall stall(world_.device_ptr(), upstream.handle());
  const auto transfer =
      world_.restore({.blocks = {block}, .after = world_.after_stream(upstream.handle())}, *copy);
  transfer->wait_on(engine_.handle(), std::nullopt);
  read_block(engine_.handle(), seen);
  EXPECT_THROW(transfer->wait(0.001), TimedOut);
  stall.open();
  settle(engine_.handle());
  EXPECT_EQ(seen, image(new_key));
}

TEST_F(Ordering, AConsumerThatWaitsForAnOffloadMayOverwriteItsSource) {
  for (const bool waits : {false, true}) {
    world_.cache().fill(block, old_key);
    const Image computed = image(new_key);
    const Stream upstream(world_.device_ptr());
    Stall stall(world_.device_ptr(), upstream.handle());
    const auto transfer =
        world_.offload({.blocks = {block}, .after = world_.after_stream(upstream.handle())});
    if (waits) transfer->wait_on(engine_.handle(), std::nullopt);
    write_block(engine_.handle(), computed);
    if (!waits) settle(engine_.handle());
    stall.open();
    transfer->wait(10);
    settle(engine_.handle());
    EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, waits ? old_key : new_key));
  }
}

// ---- 4 a wait for what is not recorded yet ----

class NotYetSubmitted : public Ordering {
 protected:
  NotYetSubmitted()
      : stall_(world_.device_ptr(), upstream_.handle()), copy_(world_.stored(9, new_key)) {
    const auto sources = world_.offload({.blocks = {20, 21, 22, 23}});
    sources->wait(10);
    for (BlockId i = 0; i < 4; ++i) {  // every lane of that direction
      fillers_.push_back(
          world_.restore({.blocks = {24 + i}, .after = world_.after_stream(upstream_.handle())},
                         sources->result()->slice(static_cast<std::size_t>(i), 1)));
    }
    waiting_ = world_.restore({.blocks = {block}, .after = world_.after_stream(upstream_.handle())},
                              *copy_);
  }
  Stream upstream_{world_.device_ptr()};
  Stall stall_;
  std::shared_ptr<HostCopy> copy_;
  std::vector<std::shared_ptr<Transfer>> fillers_;
  std::shared_ptr<Transfer> waiting_;
  Image seen_ = Image(CacheMemory::block_bytes());
};

TEST_F(NotYetSubmitted, OnePollSubmitsItAndWhatIsBehindItInTheOtherDirection) {
  const auto behind =
      world_.offload({.blocks = {block}, .after = world_.after_transfer(*waiting_)});
  ASSERT_EQ(behind->state(), TransferState::queued);
  stall_.open();
  static_cast<void>(world_.manager().poll());
  EXPECT_TRUE(waiting_->job()->begun());
  EXPECT_TRUE(behind->job()->begun());
  behind->wait(10);
}

TEST_F(NotYetSubmitted, AWaitForAnEventThatIsNotRecordedWaitsForNothing) {
  ASSERT_EQ(waiting_->state(), TransferState::queued);
  const EventHandle promised = device_.create_event(false);  // to be recorded behind the copy
  device_.wait(engine_.handle(), promised);
  read_block(engine_.handle(), seen_);
  settle(engine_.handle());
  stall_.open();
  waiting_->wait(10);
  device_.destroy_event(promised);
  EXPECT_EQ(seen_, image(old_key)) << "wrong, as it must be";
}

TEST_F(NotYetSubmitted, WaitOnSubmitsFirstAndThenWaits) {
  ASSERT_EQ(waiting_->state(), TransferState::queued);
  waiting_->wait_on(engine_.handle(), std::nullopt);
  EXPECT_EQ(waiting_->state(), TransferState::in_flight);
  read_block(engine_.handle(), seen_);
  EXPECT_THROW(waiting_->wait(0.001), TimedOut);
  stall_.open();
  settle(engine_.handle());
  EXPECT_EQ(seen_, image(new_key));
}

// ---- 5 the caller's event is recorded again ----

TEST_F(Ordering, AnEventThatIsLookedAtLaterStandsForItsNextRecord) {
  const Image computed = image(new_key);
  const Stream idle(world_.device_ptr());
  const Stream copies(world_.device_ptr());
  const EventHandle event = device_.create_event(false);
  Stall stall(world_.device_ptr(), engine_.handle());
  write_block(engine_.handle(), computed);
  device_.record(event, engine_.handle());
  device_.record(event, idle.handle());  // before anybody has looked at it
  Image stored(CacheMemory::block_bytes());
  device_.wait(copies.handle(), event);
  raw_offload(copies.handle(), stored);
  settle(copies.handle());
  EXPECT_EQ(stored, image(old_key)) << "wrong, as it must be";
  stall.open();
  settle(engine_.handle());
  device_.destroy_event(event);
}

TEST_F(Ordering, AnEventIsTakenAsItIsWhenTheCallIsMade) {
  const Image computed = image(new_key);
  const Stream idle(world_.device_ptr());
  const EventHandle event = device_.create_event(false);
  Stall stall(world_.device_ptr(), engine_.handle());
  write_block(engine_.handle(), computed);
  device_.record(event, engine_.handle());
  const auto transfer = world_.offload({.blocks = {block}, .after = world_.after_event(event)});
  device_.record(event, idle.handle());
  device_.destroy_event(event);
  EXPECT_THROW(transfer->wait(0.001), TimedOut);
  stall.open();
  transfer->wait(10);
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, new_key));
}

// ---- 6 a stream's handle is used again ----

TEST_F(Ordering, AHandleThatIsLookedAtLaterIsAnotherStream) {
  const Image computed = image(new_key);
  const StreamHandle handle = device_.create_stream();
  Stall stall(world_.device_ptr(), handle);
  write_block(handle, computed);
  device_.destroy_stream(handle);
  ASSERT_EQ(device_.create_stream(), handle);
  const Stream copies(world_.device_ptr());
  const EventHandle event = device_.create_event(false);
  device_.record(event, handle);  // deferred: the old stream is out of reach
  device_.wait(copies.handle(), event);
  Image stored(CacheMemory::block_bytes());
  raw_offload(copies.handle(), stored);
  settle(copies.handle());
  EXPECT_EQ(stored, image(old_key)) << "wrong, as it must be";
  stall.open();
  settle(copies.handle());
  device_.destroy_event(event);
  device_.destroy_stream(handle);
  while (!world_.cache().holds(block, new_key)) {
    device_.sleep(device_.progress().value(), 1'000'000, true);
  }
}

TEST_F(Ordering, AStreamIsTakenAsItIsWhenTheCallIsMade) {
  const Image computed = image(new_key);
  const StreamHandle handle = device_.create_stream();
  Stall stall(world_.device_ptr(), handle);
  write_block(handle, computed);
  const auto transfer = world_.offload({.blocks = {block}, .after = world_.after_stream(handle)});
  device_.destroy_stream(handle);
  ASSERT_EQ(device_.create_stream(), handle);
  // The young stream has nothing pending: a transfer behind it does not wait for the old one.
  const auto other = world_.offload({.blocks = {7}, .after = world_.after_stream(handle)});
  other->wait(10);
  EXPECT_FALSE(transfer->done());
  stall.open();
  transfer->wait(10);
  EXPECT_TRUE(CacheMemory::holds(transfer->result()->blocks(), 0, new_key));
  device_.destroy_stream(handle);
}

// ---- transfers behind transfers, stages ----

TEST_F(Ordering, ATransferBehindAnotherRunsAfterItsLastSlice) {
  const auto copy = world_.stored(9, new_key);
  Stall stall(world_.device_ptr(), engine_.handle());
  const auto offload =
      world_.offload({.blocks = {block}, .after = world_.after_stream(engine_.handle())});
  const auto restore =
      world_.restore({.blocks = {block}, .after = world_.after_transfer(*offload)}, *copy);
  EXPECT_THROW(restore->wait(0.001), TimedOut);
  stall.open();
  restore->wait(10);
  offload->wait(10);
  EXPECT_TRUE(CacheMemory::holds(offload->result()->blocks(), 0, old_key));
  EXPECT_TRUE(world_.cache().holds(block, new_key));
}

TEST_F(Ordering, AStalledTransferDelaysNoReadyOneOfEitherClassOrDirection) {
  const auto copy = world_.stored(9, new_key);
  Stall stall(world_.device_ptr(), engine_.handle());
  std::vector<std::shared_ptr<Transfer>> stalled;
  for (BlockId i = 10; i < 16; ++i) {
    stalled.push_back(
        world_.offload({.blocks = {i}, .after = world_.after_stream(engine_.handle())}));
  }
  stalled.push_back(
      world_.restore({.blocks = {16}, .after = world_.after_stream(engine_.handle())}, *copy));
  world_.offload({.blocks = {1}})->wait(10);
  world_.offload({.blocks = {2}, .priority = Priority::demand})->wait(10);
  world_.restore({.blocks = {4}}, *copy)->wait(10);
  world_.restore({.blocks = {5}, .priority = Priority::background}, *copy)->wait(10);
  for (const auto& transfer : stalled) EXPECT_FALSE(transfer->done());
  stall.open();
  for (const auto& transfer : stalled) transfer->wait(10);
}

TEST(Urgency, ADemandTransferHurriesTheBackgroundOneThatItRunsBehind) {
  ManagerConfig config;
  config.window_bytes = smallest_window_bytes;
  World world(still_device(), {.device_blocks = 128, .slots = 128, .config = config});
  const auto copy = world.stored(127, 1);
  std::vector<BlockId> many(100);
  std::iota(many.begin(), many.end(), BlockId{0});
  const auto background = world.offload({.blocks = many});
  EXPECT_FALSE(background->job()->all_submitted()) << "it is larger than the window";
  const auto demand =
      world.restore({.blocks = {5}, .after = world.after_transfer(*background)}, *copy);
  EXPECT_TRUE(background->job()->all_submitted());
  demand->wait(10);
  EXPECT_TRUE(CacheMemory::holds(background->result()->blocks(), 5, 5));
  EXPECT_TRUE(world.cache().holds(5, 1));
}

// Public failure 15: a prefetched layer was used before it had come.
TEST(WaitOn, AStageIsWaitedForWithThoseBeforeItAndNotThoseBehind) {
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = false});
  World world(device, {.config = without_reaper()});
  const auto offload = world.offload({.blocks = {1}});
  device->run_all();
  static_cast<void>(world.manager().poll());
  const auto restore = world.restore({.blocks = {5}}, *offload->result());
  const Stream first(device), last(device);
  restore->wait_on(first.handle(), 4);  // of stages 4 and 9
  restore->wait_on(last.handle(), 9);
  Event behind_first = world.runtime().events()->acquire();
  behind_first.record(first.handle());
  Event behind_last = world.runtime().events()->acquire();
  behind_last.record(last.handle());
  EXPECT_EQ(behind_first.query(), EventState::pending);
  ASSERT_TRUE(device->run_one());
  EXPECT_EQ(behind_first.query(), EventState::done);
  EXPECT_EQ(behind_last.query(), EventState::pending);
  ASSERT_TRUE(device->run_one());
  EXPECT_EQ(behind_last.query(), EventState::done);
  EXPECT_THROW(restore->wait_on(first.handle(), 5), InvalidArgument);
  EXPECT_THROW(restore->wait_on(12345, std::nullopt), InvalidArgument);
  static_cast<void>(world.manager().poll());
  EXPECT_TRUE(restore->done());
}

TEST(WaitOn, RaisesTheErrorOfATransferThatHasFailedByThen) {
  const auto device = std::make_shared<ScriptedDevice>(ScriptedOptions{.runs_in_sleep = true});
  World world(device, {.config = without_reaper()});
  const Stream consumer(device);
  device->fail(CallKind::copy, 1, Failure::in_flight);
  const auto failed = world.offload({.blocks = {1}});
  EXPECT_THROW(failed->wait_on(consumer.handle(), std::nullopt), CopyFailed) << "before its end";
  EXPECT_THROW(failed->wait(10), CopyFailed);
  EXPECT_THROW(failed->wait_on(consumer.handle(), std::nullopt), CopyFailed) << "and behind it";

  const auto cancelled = world.offload({.blocks = {1}});
  static_cast<void>(cancelled->cancel());
  EXPECT_THROW(cancelled->wait_on(consumer.handle(), std::nullopt), Cancelled);
  EXPECT_THROW(cancelled->wait(10), Cancelled);
  EXPECT_THROW(cancelled->wait_on(consumer.handle(), std::nullopt), Cancelled);

  const auto good = world.offload({.blocks = {1}});
  good->wait(10);
  device->forget_calls();
  good->wait_on(consumer.handle(), std::nullopt);
  EXPECT_TRUE(device->calls(CallKind::wait).empty()) << "its end was observed: nothing to wait for";
}

TEST(WaitOn, HurriesABackgroundTransferThroughTheWindow) {
  ManagerConfig config;
  config.window_bytes = smallest_window_bytes;
  const auto device = still_device();
  World world(device, {.device_blocks = 128, .slots = 128, .config = config});
  std::vector<BlockId> many(100);
  std::iota(many.begin(), many.end(), BlockId{0});
  const auto large = world.offload({.blocks = many});
  const auto small = world.offload({.blocks = {101}});
  EXPECT_EQ(small->state(), TransferState::queued);
  const Stream consumer(world.device_ptr());
  small->wait_on(consumer.handle(), std::nullopt);
  EXPECT_EQ(small->state(), TransferState::in_flight);
  EXPECT_FALSE(large->done());
  large->wait(10);
  small->wait(10);
}

}  // namespace
}  // namespace kvmem::test
