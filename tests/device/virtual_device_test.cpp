// What is special of the virtual device: its time, its order, its hostility, its faults. What it
// has in common with the other kinds is in the contract suite.
#include "device/virtual_device.hpp"

#include <algorithm>
#include <chrono>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/sanitizers.hpp"

namespace kvmem {
namespace {

constexpr Nanoseconds microsecond = 1000;
using Bytes = std::vector<std::byte>;

// A copy with the arrays that it needs.
struct OneCopy {
  OneCopy(std::byte* to, const std::byte* from, std::size_t bytes)
      : target(to), source(from), size(bytes) {}
  [[nodiscard]] CopyDescriptors batch() const { return {&target, &source, &size, 1}; }
  std::byte* target;
  const std::byte* source;
  std::size_t size;
};

class VirtualDeviceTest : public ::testing::Test {
 protected:
  void open(const VirtualOptions& options) {
    device_ = make_virtual_device(options);
    stream_ = device_->create_stream();
  }
  void copy(OneCopy& one, Direction direction = Direction::to_device,
            SourceAccess access = SourceAccess::stream_order) {
    device_->copy(one.batch(), direction, access, stream_);
  }
  // 1000 bytes take one microsecond on the link.
  static VirtualOptions simple() { return {.bytes_per_second = 1e9, .latency = 10 * microsecond}; }

  std::shared_ptr<VirtualDevice> device_;
  StreamHandle stream_ = 0;
  Bytes source_ = Bytes(5000, std::byte{1}), target_ = Bytes(5000);
};

TEST_F(VirtualDeviceTest, ACopyTakesItsBytesOnTheLinkAndTheLatency) {
  open(simple());
  OneCopy one(target_.data(), source_.data(), 5000);
  copy(one);
  const EventHandle event = device_->create_event(true);
  device_->record(event, stream_);
  device_->advance(15 * microsecond - 1);
  EXPECT_EQ(device_->query(event), EventState::pending);
  device_->advance(1);
  EXPECT_EQ(device_->query(event), EventState::done);
  EXPECT_EQ(device_->event_time(event), 15 * microsecond);
  EXPECT_EQ(target_, source_);
}

TEST_F(VirtualDeviceTest, OneDirectionIsServedOneCopyAfterTheOtherAndLatenciesOverlap) {
  open(simple());
  const StreamHandle other = device_->create_stream();
  OneCopy one(target_.data(), source_.data(), 2000),
      two(target_.data() + 2000, source_.data(), 3000);
  device_->copy(one.batch(), Direction::to_device, SourceAccess::stream_order, stream_);
  device_->copy(two.batch(), Direction::to_device, SourceAccess::stream_order, other);
  EXPECT_TRUE(device_->step());
  EXPECT_TRUE(device_->step());
  EXPECT_EQ(device_->now(), 15 * microsecond);
  EXPECT_FALSE(device_->step());
}

TEST_F(VirtualDeviceTest, DirectionsAreIndependentUnlessTheyShareOneLink) {
  for (const bool shared : {false, true}) {
    VirtualOptions options = simple();
    options.shared_link = shared;
    open(options);
    const StreamHandle other = device_->create_stream();
    OneCopy one(target_.data(), source_.data(), 2000),
        two(target_.data() + 2000, source_.data(), 2000);
    device_->copy(one.batch(), Direction::to_device, SourceAccess::stream_order, stream_);
    device_->copy(two.batch(), Direction::to_host, SourceAccess::stream_order, other);
    while (device_->step()) {
    }
    EXPECT_EQ(device_->now(), (shared ? 14 : 12) * microsecond);
  }
}

TEST_F(VirtualDeviceTest, TheSeedChoosesAmongLegalOrdersAndNothingElseDoes) {
  const auto order_of = [&](std::uint64_t seed) {
    open({.seed = seed});
    std::vector<OneCopy> copies;
    std::vector<EventHandle> events;
    for (std::size_t i = 0; i < 6; ++i) copies.emplace_back(&target_[i], &source_[i], 1);
    for (OneCopy& one : copies) {
      const StreamHandle stream = device_->create_stream();
      device_->copy(one.batch(), Direction::to_device, SourceAccess::stream_order, stream);
      events.push_back(device_->create_event(false));
      device_->record(events.back(), stream);
    }
    std::vector<std::size_t> order;
    while (device_->step()) {
      for (std::size_t i = 0; i < events.size(); ++i) {
        if (device_->query(events[i]) == EventState::done &&
            std::ranges::find(order, i) == order.end())
          order.push_back(i);
      }
    }
    return order;
  };
  std::set<std::vector<std::size_t>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(order_of(seed), order_of(seed));
    orders.insert(order_of(seed));
  }
  EXPECT_GT(orders.size(), 10U);
}

// ---- hostility ----

TEST_F(VirtualDeviceTest, SomeBytesMoveAtOnceAndTheRestAtTheEnd) {
  bool some_early = false, some_late = false;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    open({.seed = seed});
    std::ranges::fill(target_, std::byte{0});
    OneCopy one(target_.data(), source_.data(), 5000);
    copy(one);
    const auto moved = std::ranges::count(target_, std::byte{1});
    some_early |= moved > 0;
    some_late |= moved < 5000;
    device_->step();
    EXPECT_EQ(target_, source_);
  }
  EXPECT_TRUE(some_early && some_late);
}

TEST_F(VirtualDeviceTest, ASourceThatIsWrittenTooEarlyGivesTornBytes) {
  bool torn = false;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    open({.seed = seed});
    Bytes source = source_;
    OneCopy one(target_.data(), source.data(), 5000);
    copy(one);
    std::ranges::fill(source, std::byte{2});
    device_->step();
    torn |= std::ranges::count(target_, std::byte{1}) > 0 &&
            std::ranges::count(target_, std::byte{2}) > 0;
  }
  EXPECT_TRUE(torn);
}

TEST_F(VirtualDeviceTest, ATargetThatIsReusedTooEarlyIsWrittenAgain) {
  open({});
  OneCopy one(target_.data(), source_.data(), 5000);
  copy(one);
  std::ranges::fill(target_, std::byte{9});
  device_->step();
  EXPECT_GT(std::ranges::count(target_, std::byte{1}), 0);
}

TEST_F(VirtualDeviceTest, OnlyASourceForAnyTimeIsReadBeforeTheStreamGetsThere) {
  for (const SourceAccess access : {SourceAccess::any, SourceAccess::stream_order}) {
    bool early = false;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      open({.seed = seed});
      const EventHandle stall = device_->create_event(false);
      device_->record_unsignalled(stall);
      device_->wait(stream_, stall);
      Bytes source(5000, std::byte{3});
      std::ranges::fill(target_, std::byte{0});
      OneCopy one(target_.data(), source.data(), 5000);
      copy(one, Direction::to_device, access);
      EXPECT_EQ(std::ranges::count(target_, std::byte{0}), 5000) << "the stream is not there yet";
      std::ranges::fill(source, std::byte{1});
      device_->signal(stall);
      device_->step();
      early |= std::ranges::count(target_, std::byte{3}) > 0;
    }
    EXPECT_EQ(early, access == SourceAccess::any);
  }
}

TEST_F(VirtualDeviceTest, AHeldCopyNeverEndsUntilItIsLetGoAndOthersDo) {
  open({});
  const StreamHandle other = device_->create_stream();
  device_->hold_copies(1);
  OneCopy held(target_.data(), source_.data(), 100),
      free(target_.data() + 100, source_.data(), 100);
  copy(held);
  device_->copy(free.batch(), Direction::to_device, SourceAccess::stream_order, other);
  EXPECT_EQ(device_->held_copies(), 1U);
  EXPECT_TRUE(device_->step());
  EXPECT_FALSE(device_->step());
  device_->advance(3'600'000'000'000);
  EXPECT_EQ(device_->pending_copies(), 1U);
  EXPECT_TRUE(device_->may_touch(target_.data() + 99, 1));
  EXPECT_TRUE(device_->may_touch(source_.data(), 1));
  EXPECT_FALSE(device_->may_touch(target_.data() + 100, 100));
  device_->release_copies();
  EXPECT_TRUE(device_->step());
  EXPECT_EQ(device_->pending_copies(), 0U);
}

// ---- faults ----

TEST_F(VirtualDeviceTest, TheNthCallFailsAndTheOthersDoNot) {
  open({});
  device_->fail_nth(DeviceCall::record, 2, Fault::refused, 2);
  const EventHandle event = device_->create_event(false);
  device_->record(event, stream_);
  EXPECT_THROW(device_->record(event, stream_), CopyFailed);
  EXPECT_THROW(device_->record(event, stream_), CopyFailed);
  device_->record(event, stream_);
  EXPECT_EQ(device_->faults(), 2U);
}

TEST_F(VirtualDeviceTest, ARefusedCopyMovesNothingAndOneInFlightMovesAll) {
  for (const Fault how : {Fault::refused, Fault::in_flight}) {
    open({});
    std::ranges::fill(target_, std::byte{0});
    device_->fail_nth(DeviceCall::copy, 1, how);
    OneCopy one(target_.data(), source_.data(), 5000);
    EXPECT_THROW(copy(one), CopyFailed);
    EXPECT_EQ(device_->step(), how == Fault::in_flight);
    EXPECT_EQ(target_ == source_, how == Fault::in_flight);
  }
}

TEST_F(VirtualDeviceTest, AFailedQueryLearnsNothing) {
  open({});
  const EventHandle event = device_->create_event(false);
  device_->record(event, stream_);
  device_->fail_nth(DeviceCall::query, 1, Fault::refused);
  EXPECT_EQ(device_->query(event), EventState::failed);
  EXPECT_EQ(device_->query(event), EventState::done);
}

TEST_F(VirtualDeviceTest, PausedFaultsDoNotCountAndForgottenOnesDoNotCome) {
  open({});
  device_->fail_nth(DeviceCall::any, 1, Fault::refused);
  device_->pause_faults(true);
  const EventHandle event = device_->create_event(false);
  device_->pause_faults(false);
  EXPECT_THROW(device_->record(event, stream_), CopyFailed);
  device_->fail_nth(DeviceCall::any, 1, Fault::refused);
  device_->forget_faults();
  device_->record(event, stream_);
}

TEST_F(VirtualDeviceTest, ALostDeviceRefusesAllAndMayGoOnWriting) {
  open({});
  OneCopy one(target_.data(), source_.data(), 5000);
  copy(one);
  const EventHandle event = device_->create_event(true);
  device_->record(event, stream_);
  device_->lose();
  EXPECT_TRUE(device_->lost());
  EXPECT_EQ(device_->query(event), EventState::lost);
  EXPECT_THROW(device_->record(event, stream_), DeviceLost);
  EXPECT_THROW(static_cast<void>(device_->create_stream()), DeviceLost);
  EXPECT_THROW(copy(one), DeviceLost);
  device_->step();
  EXPECT_EQ(target_, source_);
}

TEST_F(VirtualDeviceTest, PageableMemoryIsRefusedWherePinnedIsNeeded) {
  open({.needs_pinned_host = true});
  const std::unique_ptr<void, decltype(&std::free)> page(std::aligned_alloc(4096, 4096),
                                                         &std::free);
  auto* const pinned = static_cast<std::byte*>(page.get());
  device_->pin(pinned, 4096);
  OneCopy good(target_.data(), pinned, 4096), beyond(target_.data(), pinned + 1, 4096),
      pageable(target_.data(), source_.data(), 10);
  copy(good);
  EXPECT_THROW(copy(beyond), InvalidArgument);
  EXPECT_THROW(copy(pageable), InvalidArgument);
  device_->step();
  device_->unpin(pinned, 4096);
  EXPECT_THROW(copy(good), InvalidArgument);
}

// ---- memory and time without bytes and threads ----

TEST_F(VirtualDeviceTest, TerabytesOfAddressesCostNoMemoryAndNoBytesMove) {
  if (test::thread_sanitized) GTEST_SKIP() << "TSan leaves no terabytes of addresses";
  VirtualOptions options = simple();
  options.moves_bytes = false;
  open(options);
  constexpr std::size_t terabyte = std::size_t{1} << 40;
  auto* const base = static_cast<std::byte*>(device_->allocate(4 * terabyte));
  OneCopy one(base, base + 2 * terabyte, terabyte);  // would crash if it moved
  copy(one);
  EXPECT_TRUE(device_->step());
  EXPECT_EQ(device_->now(), static_cast<Nanoseconds>(terabyte) + 10 * microsecond);
  EXPECT_THROW(static_cast<void>(device_->allocate(std::size_t{1} << 46)), CapacityError);
  device_->deallocate(base, 4 * terabyte);
  device_->deallocate(device_->allocate(std::size_t{1} << 46), std::size_t{1} << 46);
}

TEST_F(VirtualDeviceTest, ASleeperWithHelpMovesTheClockToTheNextEndOrItsTime) {
  open(simple());
  OneCopy one(target_.data(), source_.data(), 5000);
  copy(one);
  device_->sleep(device_->progress().value(), 5 * microsecond, true);
  EXPECT_EQ(device_->now(), 5 * microsecond);
  device_->sleep(device_->progress().value(), 1'000'000 * microsecond, true);
  EXPECT_EQ(device_->now(), 15 * microsecond);
  EXPECT_EQ(device_->pending_copies(), 0U);
}

TEST_F(VirtualDeviceTest, AnHourOfVirtualTimeTakesNone) {
  open({});
  const auto begun = std::chrono::steady_clock::now();
  for (int i = 0; i < 200; ++i) device_->sleep(device_->progress().value(), 60'000'000'000, true);
  EXPECT_EQ(device_->now(), 200 * Nanoseconds{60'000'000'000});
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
}

TEST_F(VirtualDeviceTest, WhoWaitsForEverMovesTheClockOnlyToWhatEnds) {
  open(simple());
  constexpr Nanoseconds for_ever = std::numeric_limits<Nanoseconds>::max();
  for (int i = 0; i < 3; ++i) device_->sleep(device_->progress().value(), for_ever, true);
  EXPECT_EQ(device_->now(), 0) << "nothing can end";
  OneCopy one(target_.data(), source_.data(), 5000);
  copy(one);
  device_->sleep(device_->progress().value(), for_ever, true);
  EXPECT_EQ(device_->now(), 15 * microsecond);
}

TEST_F(VirtualDeviceTest, ACopyOfYearsTakesNoRealTime) {
  open({.bytes_per_second = 1, .moves_bytes = false});
  auto* const base = static_cast<std::byte*>(device_->allocate(std::size_t{2} << 30));
  OneCopy one(base, base + (std::size_t{1} << 30), std::size_t{1} << 30);
  copy(one);
  device_->sleep(device_->progress().value(), std::numeric_limits<Nanoseconds>::max(), true);
  EXPECT_EQ(device_->pending_copies(), 0U);
  EXPECT_GT(device_->now(), (Nanoseconds{1} << 30) * 1'000'000'000 - 1);
  device_->deallocate(base, std::size_t{2} << 30);
}

TEST_F(VirtualDeviceTest, TheClockHasAnEndAndSaysSo) {
  open({.latency = VirtualDevice::latest / 3 * 2});
  OneCopy one(target_.data(), source_.data(), 5000);
  copy(one);
  copy(one);  // begins when the first has ended
  while (device_->step()) {
  }
  EXPECT_EQ(device_->now(), VirtualDevice::latest);
  EXPECT_EQ(device_->pending_copies(), 0U);
  EXPECT_THROW(device_->advance(1), InvalidArgument);
  device_->advance(0);
  device_->sleep(device_->progress().value(), 1000, true);
  EXPECT_EQ(device_->now(), VirtualDevice::latest);
}

TEST_F(VirtualDeviceTest, MemoryGivenBackUnderACopyIsLeakedNotUnmapped) {
  open({});
  auto* const base = static_cast<std::byte*>(device_->allocate(8192));
  OneCopy one(base, source_.data(), 5000);
  copy(one);
  device_->deallocate(base, 8192);
  EXPECT_TRUE(device_->step());  // would crash
  EXPECT_TRUE(std::equal(source_.begin(), source_.end(), base));
  device_->deallocate(base, 8192);
}

TEST_F(VirtualDeviceTest, WholePagesArePinnedOnceAtATime) {
  open({});
  const std::unique_ptr<void, decltype(&std::free)> pages(std::aligned_alloc(4096, 12288),
                                                          &std::free);
  auto* const base = static_cast<std::byte*>(pages.get());
  device_->pin(base, 8192);
  EXPECT_THROW(device_->pin(base, 8192), InvalidArgument);
  EXPECT_THROW(device_->pin(base + 4096, 8192), InvalidArgument);
  EXPECT_THROW(device_->pin(base + 8192, 100), InvalidArgument);
  EXPECT_THROW(device_->pin(base + 8193, 4096), InvalidArgument);
  EXPECT_THROW(device_->pin(base + 8192, 0), InvalidArgument);
  device_->pin(base + 8192, 4096);
  device_->unpin(base, 8192);
  device_->pin(base, 4096);
}

TEST_F(VirtualDeviceTest, OptionsThatMeanNothingAreRefusedByName) {
  EXPECT_THROW(open({.moves_bytes = false, .needs_pinned_host = true}), InvalidArgument);
  EXPECT_THROW(open({.bytes_per_second = 0}), InvalidArgument);
  EXPECT_THROW(open({.bytes_per_second = -1}), InvalidArgument);
  EXPECT_THROW(open({.bytes_per_second = std::numeric_limits<double>::quiet_NaN()}),
               InvalidArgument);
  EXPECT_THROW(open({.latency = -1}), InvalidArgument);
  EXPECT_THROW(open({.max_descriptors = 0}), InvalidArgument);
  open({});
  EXPECT_THROW(device_->advance(-1), InvalidArgument);
  EXPECT_THROW(device_->fail_nth(DeviceCall::copy, 0, Fault::refused), InvalidArgument);
  EXPECT_THROW(device_->fail_nth(DeviceCall::copy, 1, Fault::refused, 0), InvalidArgument);
  EXPECT_THROW(device_->fail_nth(DeviceCall::recorded, 1, Fault::refused), InvalidArgument);
}

}  // namespace
}  // namespace kvmem
