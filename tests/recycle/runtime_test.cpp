#include "recycle/runtime.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <list>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/host_device.hpp"
#include "device/virtual_device.hpp"
#include "support/polled_device.hpp"
#include "support/scripted_device.hpp"
#include "support/stall.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t block_bytes = 4096;

std::unique_ptr<BlockPool> make_pool(const std::shared_ptr<Device>& device, std::size_t slots) {
  PoolOptions options;
  options.block_bytes = block_bytes;
  options.capacity_bytes = slots * block_bytes;
  return std::make_unique<BlockPool>(device, options);
}

class RuntimeTest : public ::testing::Test {
 protected:
  StreamHandle stream() { return device_->create_stream(); }

  std::shared_ptr<ScriptedDevice> device_ = std::make_shared<ScriptedDevice>();
  std::shared_ptr<Runtime> runtime_ = Runtime::make(device_);
  std::unique_ptr<BlockPool> pool_ = make_pool(device_, 8);

  // One copy, with arrays that live as long as the test.
  void copy(StreamHandle on, std::byte* target, const std::byte* source) {
    arrays_.push_back({target, source, block_bytes});
    const auto& [to, from, bytes] = arrays_.back();
    device_->copy({&to, &from, &bytes, 1}, Direction::to_host, SourceAccess::stream_order, on);
  }
  struct Arrays {
    std::byte* target;
    const std::byte* source;
    std::size_t bytes;
  };
  std::list<Arrays> arrays_;
};

// ---- marks ----

TEST_F(RuntimeTest, AMarkStandsForWhatTheStreamHeldWhenItWasTaken) {
  const StreamHandle engine = stream();
  Stall before(device_, engine);
  const auto mark = runtime_->mark_stream(engine);
  Stall after(device_, engine);  // the caller's later work
  EXPECT_EQ(mark.event->query(), EventState::pending);
  before.open();
  EXPECT_EQ(mark.event->query(), EventState::done);
}

// Public failure 44: the stream behind which blocks were freed was gone.
TEST_F(RuntimeTest, AMarkOutlivesItsStream) {
  const StreamHandle engine = stream();
  Stall stall(device_, engine);
  const auto mark = runtime_->mark_stream(engine);
  device_->destroy_stream(engine);
  EXPECT_EQ(mark.event->query(), EventState::pending);
  stall.open();
  EXPECT_EQ(mark.event->query(), EventState::done);
}

TEST_F(RuntimeTest, AStreamThatIsNotOfTheDeviceIsRefused) {
  EXPECT_THROW(static_cast<void>(runtime_->mark_stream(12345)), InvalidArgument);
  ScriptedDevice other;
  EXPECT_THROW(static_cast<void>(runtime_->mark_stream(other.create_stream())), InvalidArgument);
}

TEST_F(RuntimeTest, AMarkOfAnEventDoesNotFollowItsNextRecord) {
  const StreamHandle engine = stream();
  const StreamHandle idle = stream();
  Stall stall(device_, engine);
  const EventHandle event = device_->create_event(false);
  device_->record(event, engine);
  const auto mark = runtime_->mark_event(event);
  device_->record(event, idle);
  ASSERT_EQ(device_->query(event), EventState::done);
  EXPECT_EQ(mark.event->query(), EventState::pending);
  device_->destroy_event(event);
  EXPECT_EQ(mark.event->query(), EventState::pending);
  stall.open();
  EXPECT_EQ(mark.event->query(), EventState::done);
}

TEST_F(RuntimeTest, AnEventThatIsDoneNeedsNoMarkAndOneNeverRecordedIsRefused) {
  const StreamHandle engine = stream();
  const EventHandle event = device_->create_event(false);
  try {
    static_cast<void>(runtime_->mark_event(event));
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("never recorded"), std::string::npos) << error.what();
  }
  EXPECT_THROW(static_cast<void>(runtime_->mark_event(12345)), InvalidArgument);
  device_->record(event, engine);
  EXPECT_EQ(runtime_->mark_event(event).event, nullptr);
}

TEST_F(RuntimeTest, SpareStreamsAreReusedWhenTheirMarkIsDone) {
  const StreamHandle engine = stream();
  const EventHandle event = device_->create_event(false);
  const std::ptrdiff_t streams = device_->live_streams();
  for (int i = 0; i < 100; ++i) {
    Stall stall(device_, engine);
    device_->record(event, engine);
    const auto mark = runtime_->mark_event(event);
    EXPECT_EQ(mark.event->query(), EventState::pending);
    stall.open();
    EXPECT_EQ(mark.event->query(), EventState::done);
  }
  EXPECT_EQ(device_->live_streams(), streams + 1);
}

TEST_F(RuntimeTest, SpareStreamsAreBoundedAndTheOrderThenOnlyGetsStricter) {
  constexpr std::size_t many = 200;
  const std::ptrdiff_t streams = device_->live_streams();
  std::vector<std::unique_ptr<Stall>> stalls;
  std::vector<Runtime::Mark> marks;
  for (std::size_t i = 0; i < many; ++i) {
    stalls.push_back(std::make_unique<Stall>(device_));
    marks.push_back(runtime_->mark_event(stalls.back()->event()));
  }
  EXPECT_EQ(device_->live_streams(), streams + 64);
  for (std::size_t i = many; i-- > 0;) {
    EXPECT_EQ(marks[i].event->query(), EventState::pending) << i;
    stalls[i]->open();
  }
  for (const auto& mark : marks) EXPECT_EQ(mark.event->query(), EventState::done);
}

TEST_F(RuntimeTest, AMarkThatCannotBeMadeThrowsAndTheNextOneIsGood) {
  const StreamHandle engine = stream();
  const EventHandle event = device_->create_event(false);
  for (const CallKind kind : {CallKind::create_event, CallKind::wait, CallKind::record}) {
    Stall stall(device_, engine);
    device_->record(event, engine);
    device_->fail(kind, 1);
    EXPECT_THROW(static_cast<void>(runtime_->mark_event(event)), CopyFailed);
    device_->heal();
    const auto mark = runtime_->mark_event(event);
    EXPECT_EQ(mark.event->query(), EventState::pending);
    stall.open();
    EXPECT_EQ(mark.event->query(), EventState::done);
  }
}

// ---- release(after=) ----

TEST_F(RuntimeTest, BlocksGoHomeWhenTheirStreamHasReachedTheRelease) {
  const StreamHandle engine = stream();
  Stall stall(device_, engine);
  auto blocks = pool_->try_acquire(3);
  runtime_->release_after(*blocks, {runtime_->mark_stream(engine)});
  EXPECT_TRUE(blocks->empty());
  runtime_->advance();
  EXPECT_EQ(pool_->stats().slots.quarantined, 3U);
  EXPECT_EQ(pool_->stats().slots.free, 5U);
  stall.open();
  runtime_->advance();
  EXPECT_EQ(pool_->stats().slots.free, 8U);
}

TEST_F(RuntimeTest, BlocksGoHomeWhenTheLastOfSeveralStreamsHasReachedTheRelease) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  Stall stall_a(device_, a);
  Stall stall_b(device_, b);
  auto blocks = pool_->try_acquire(2);
  runtime_->release_after(*blocks, {runtime_->mark_stream(a), runtime_->mark_stream(b)});
  stall_b.open();
  runtime_->advance();
  EXPECT_EQ(pool_->stats().slots.quarantined, 2U);
  stall_a.open();
  runtime_->advance();
  EXPECT_EQ(pool_->stats().slots.free, 8U);
}

TEST_F(RuntimeTest, WithNothingPendingBlocksGoHomeAtOnce) {
  auto blocks = pool_->try_acquire(2);
  runtime_->release_after(*blocks, {Runtime::Mark{}});
  EXPECT_EQ(pool_->stats().slots.free, 8U);
}

TEST_F(RuntimeTest, BlocksThatWereReleasedCannotBeReleasedAgainBehindAStream) {
  const StreamHandle engine = stream();
  auto blocks = pool_->try_acquire(2);
  blocks->release();
  const std::vector<Runtime::Mark> marks{runtime_->mark_stream(engine)};
  EXPECT_THROW(runtime_->release_after(*blocks, marks), AlreadyReleased);
  EXPECT_EQ(runtime_->recycle().in_flight(), 0U);
}

// Public failure 44: the stream behind which blocks were freed was gone.
TEST_F(RuntimeTest, AReusedStreamHandleInheritsNothing) {
  const StreamHandle old = stream();
  Stall stall(device_, old);
  auto slow = pool_->try_acquire(2);
  runtime_->release_after(*slow, {runtime_->mark_stream(old)});
  device_->destroy_stream(old);
  const StreamHandle young = stream();
  ASSERT_EQ(young, old);
  auto fast = pool_->try_acquire(3);
  runtime_->release_after(*fast, {runtime_->mark_stream(young)});
  runtime_->advance();
  EXPECT_EQ(pool_->stats().slots.quarantined, 2U);
  EXPECT_EQ(pool_->stats().slots.free, 6U);
  stall.open();
  runtime_->advance();
  EXPECT_EQ(pool_->stats().slots.free, 8U);
}

TEST_F(RuntimeTest, OnALostDeviceBlocksReleasedBehindAStreamArePoisoned) {
  const StreamHandle engine = stream();
  Stall stall(device_, engine);
  auto blocks = pool_->try_acquire(2);
  runtime_->release_after(*blocks, {runtime_->mark_stream(engine)});
  device_->lose();
  runtime_->advance();
  EXPECT_EQ(pool_->stats().slots.poisoned, 2U);
  EXPECT_EQ(pool_->stats().slots.free, 6U);
}

// A caller's own copy loop, on a stream that is held up: from the cache into a block and, later,
// from the block back. The caller lets go of the block before the second copy has run, and somebody
// else takes it.
class CopyLoop : public RuntimeTest {
 public:
  std::byte read_back(bool with_after) {
    std::vector<std::byte> cache(block_bytes, std::byte{1});
    std::vector<std::byte> back(block_bytes);
    const StreamHandle engine = stream();
    auto block = pool_->try_acquire(8);
    copy(engine, block->data(0), cache.data());
    device_->run_all();
    Stall stall(device_, engine);
    copy(engine, back.data(), block->data(0));
    if (with_after)
      runtime_->release_after(*block, {runtime_->mark_stream(engine)});
    else
      block->release();
    runtime_->advance();
    if (auto other = pool_->try_acquire(8)) std::memset(other->data(0), 2, block_bytes);
    stall.open();
    device_->run_all();
    runtime_->advance();
    EXPECT_EQ(pool_->stats().slots.free, 8U);
    return back.front();
  }
};

TEST_F(CopyLoop, APlainReleaseLetsAnotherOwnerWriteUnderTheCopy) {
  EXPECT_EQ(read_back(false), std::byte{2});
}

// Public failure 12: a deallocation took a stream and ignored it.
TEST_F(CopyLoop, AReleaseBehindTheStreamKeepsTheBytes) { EXPECT_EQ(read_back(true), std::byte{1}); }

// ---- waiting ----

TEST_F(RuntimeTest, AWaitEndsAtItsDeadlineOnTheDevicesClock) {
  const Nanoseconds before = device_->now();
  EXPECT_FALSE(runtime_->wait_until([] { return false; }, runtime_->deadline_after(5), {}));
  EXPECT_GE(device_->now(), before + 5'000'000'000);
  EXPECT_LT(device_->now(), before + 6'000'000'000);
}

TEST_F(RuntimeTest, AWaitForWhatIsSoLooksAtNoClock) {
  EXPECT_TRUE(runtime_->wait_until([] { return true; }, Nanoseconds{0}, {}));
}

TEST_F(RuntimeTest, AWaitWithADeadlineInThePastStillAdvancesOnce) {
  const StreamHandle engine = stream();
  auto blocks = pool_->try_acquire(2);
  runtime_->release_after(*blocks, {runtime_->mark_stream(engine)});
  const auto free = [&] { return pool_->stats().slots.free == 8; };
  EXPECT_TRUE(runtime_->wait_until(free, Nanoseconds{0}, {}));
}

TEST_F(RuntimeTest, DeadlinesSaturate) {
  constexpr Nanoseconds never = std::numeric_limits<Nanoseconds>::max();
  EXPECT_EQ(runtime_->deadline_after(1e300), never);
  EXPECT_EQ(runtime_->deadline_after(std::numeric_limits<double>::infinity()), never);
  const Nanoseconds now = device_->now();
  EXPECT_GE(runtime_->deadline_after(-5), now);
  EXPECT_LT(runtime_->deadline_after(-5), now + 1'000'000);
}

TEST(Runtime, DeadlinesSaturateWhereverTheClockIs) {
  const auto device = make_virtual_device({});
  const auto runtime = Runtime::make(device);
  device->advance(VirtualDevice::latest - 1000);
  EXPECT_EQ(runtime->deadline_after(3e9), std::numeric_limits<Nanoseconds>::max());
  EXPECT_EQ(runtime->deadline_after(5e-7), VirtualDevice::latest - 500);
}

TEST(Runtime, AnInterruptThatThrowsEndsTheWaitWithinAMoment) {
  const auto device = make_host_device({.workers = 1});
  const auto runtime = Runtime::make(device);
  const auto pool = make_pool(device, 2);
  const auto all = pool->try_acquire(2);
  struct Signal : std::runtime_error {
    using runtime_error::runtime_error;
  };
  const auto interrupt = [] { throw Signal("interrupted"); };
  const auto before = std::chrono::steady_clock::now();
  EXPECT_THROW(static_cast<void>(runtime->acquire(*pool, 1, std::nullopt, interrupt)), Signal);
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(10));
  EXPECT_EQ(pool->stats().waiters, 0U) << "the place in the queue was given up";
}

TEST_F(RuntimeTest, AnAcquireThatIsNotServedInTimeNamesTheNumbers) {
  const auto held = pool_->try_acquire(6);
  try {
    static_cast<void>(runtime_->acquire(*pool_, 3, runtime_->deadline_after(1), {}));
    FAIL();
  } catch (const PoolExhausted& error) {
    EXPECT_EQ(error.shortage.wanted, 3U);
    EXPECT_EQ(error.shortage.free, 2U);
    EXPECT_EQ(error.shortage.held, 6U);
    EXPECT_EQ(error.shortage.largest, 8U);
  }
  EXPECT_EQ(pool_->stats().waiters, 0U);
  EXPECT_THROW(static_cast<void>(runtime_->acquire(*pool_, 9, std::nullopt, {})), CapacityError);
}

TEST_F(RuntimeTest, AnAcquireIsServedByWhatItsOwnWaitReaps) {
  const StreamHandle engine = stream();
  auto held = pool_->try_acquire(8);
  runtime_->release_after(*held, {runtime_->mark_stream(engine)});
  EXPECT_EQ(runtime_->acquire(*pool_, 8, runtime_->deadline_after(1), {}).size(), 8U);
}

// ---- submitters ----

class CountingSubmitter final : public Submitter {
 public:
  void submit_ready() noexcept override { ++calls; }
  bool has_waiting() const noexcept override { return waiting; }
  int calls = 0;
  bool waiting = false;
};

TEST_F(RuntimeTest, WhoeverAdvancesSubmitsForAllAndForgetsTheDead) {
  auto a = std::make_shared<CountingSubmitter>();
  auto b = std::make_shared<CountingSubmitter>();
  runtime_->add(a);
  runtime_->add(b);
  EXPECT_FALSE(runtime_->advance());
  EXPECT_EQ(a->calls, 1);
  EXPECT_EQ(b->calls, 1);
  b->waiting = true;
  EXPECT_TRUE(runtime_->advance());
  a.reset();
  EXPECT_TRUE(runtime_->advance());
  EXPECT_EQ(b->calls, 3);
}

TEST_F(RuntimeTest, WhatEndedMakesRoomSoSubmittersAreAskedAgain) {
  auto submitter = std::make_shared<CountingSubmitter>();
  runtime_->add(submitter);
  const StreamHandle engine = stream();
  auto blocks = pool_->try_acquire(1);
  runtime_->release_after(*blocks, {runtime_->mark_stream(engine)});
  runtime_->advance();
  EXPECT_EQ(submitter->calls, 2);
}

// ---- the reaper ----

TEST(Reaper, ReapsWithoutAnybodysHelpAndEndsWithTheLastLease) {
  const auto device = make_host_device({.workers = 1});
  auto runtime = Runtime::make(device);
  const auto pool = make_pool(device, 8);
  const Stream engine(device);
  for (int round = 0; round < 3; ++round) {  // it can be started again
    auto lease = runtime->lease_reaper();
    auto second = runtime->lease_reaper();
    lease.reset();
    Stall stall(device, engine.handle());
    auto blocks = pool->try_acquire(2);
    runtime->release_after(*blocks, {runtime->mark_stream(engine.handle())});
    EXPECT_EQ(pool->stats().slots.quarantined, 2U);
    stall.open();
    EXPECT_TRUE(comes_true([&] { return pool->stats().slots.free == 8; }));
  }
  const std::weak_ptr<Runtime> alive = runtime;
  runtime.reset();
  EXPECT_TRUE(comes_true([&] { return alive.expired(); })) << "the thread kept its runtime";
}

// A thread that waits is woken instead of the reaper. Nothing but polling learns of this end.
TEST(Reaper, TakesOverFromAWaiterThatLeaves) {
  const auto host = make_host_device({.workers = 1});
  const auto device = std::make_shared<PolledDevice>(host);
  const auto runtime = Runtime::make(device);
  const auto pool = make_pool(device, 8);
  const Stream engine(device);
  const auto lease = runtime->lease_reaper();
  std::atomic<bool> leaves{false};
  std::thread waiter(
      [&] { EXPECT_TRUE(runtime->wait_until([&] { return leaves.load(); }, std::nullopt, {})); });
  // Both sleep by then; the waiter wakes now and then, for a moment, to poll.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  Stall stall(host, engine.handle());
  auto blocks = pool->try_acquire(2);
  runtime->release_after(*blocks, {runtime->mark_stream(engine.handle())});
  leaves = true;
  waiter.join();
  stall.open();
  EXPECT_TRUE(comes_true([&] { return pool->stats().slots.free == 8; })) << "nobody polls";
}

TEST(Reaper, ALeaseKeepsTheRuntimeAlive) {
  auto runtime = Runtime::make(make_host_device({.workers = 1}));
  const std::weak_ptr<Runtime> alive = runtime;
  auto lease = runtime->lease_reaper();
  runtime.reset();
  EXPECT_FALSE(alive.expired());
  lease.reset();
  EXPECT_TRUE(comes_true([&] { return alive.expired(); }));
}

}  // namespace
}  // namespace kvmem::test
