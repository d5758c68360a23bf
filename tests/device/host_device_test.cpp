// What only the host device has; what it shares with every device is in tests/contract.
#include "device/host_device.hpp"

#include <algorithm>
#include <atomic>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/host_copy.hpp"
#include "device/one_copy.hpp"

namespace kvmem {
namespace {

using test::Bytes;
using test::filled;
using test::OneCopy;
using test::piece;
using test::record_now;
using test::second;
using test::settle;

TEST(HostDevice, SaysWhatItIs) {
  const auto device = make_host_device({.workers = 3});
  EXPECT_EQ(device->info().kind, "host");
  EXPECT_EQ(device->info().name, "host");
  EXPECT_EQ(device->info().copy_engines, 3U);
  EXPECT_EQ(device->info().copy_kernel, copy_kernel_name());
  EXPECT_FALSE(device->info().needs_pinned_host);
  const unsigned automatic = make_host_device()->info().copy_engines;
  EXPECT_GE(automatic, 1U);
  EXPECT_LE(automatic, 4U);
}

TEST(HostDevice, WorkersNeedNoHelp) {
  const auto device = make_host_device({.workers = 2});
  const StreamHandle stream = device->create_stream();
  const Bytes source = filled(10 * piece + 123, 1);
  Bytes target(source.size());
  const OneCopy copy(target, source);
  for (int i = 0; i < 20; ++i) {
    copy.queue(*device, stream);
    settle(*device, record_now(*device, stream), false);
    ASSERT_EQ(target, source);
    std::ranges::fill(target, std::byte{0});
  }
}

TEST(HostDevice, AHelperCopiesOnePieceEachTime) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  const Bytes source = filled(3 * piece + 100, 1);
  Bytes target(source.size());
  const OneCopy copy(target, source);
  copy.queue(*device, stream);
  const EventHandle end = record_now(*device, stream);
  // The rest is less than two pieces when two were taken, and is not cut any more.
  for (const std::size_t moved : {piece, 2 * piece, source.size()}) {
    EXPECT_EQ(device->query(end), EventState::pending);
    device->sleep(device->progress().value(), second, true);
    EXPECT_EQ(std::ranges::count(target, std::byte{1}), static_cast<std::ptrdiff_t>(moved));
  }
  EXPECT_EQ(device->query(end), EventState::done);
}

TEST(HostDevice, APieceIsManySmallSegments) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  constexpr std::size_t bytes = 4096, count = 3 * piece / bytes;
  const Bytes source = filled(count * bytes, 1);
  Bytes target(source.size());
  std::vector<std::byte*> targets;
  std::vector<const std::byte*> sources;
  for (std::size_t i = 0; i < count; ++i) {
    targets.push_back(target.data() + i * bytes);
    sources.push_back(source.data() + i * bytes);
  }
  const std::vector<std::size_t> sizes(count, bytes);
  device->copy({targets.data(), sources.data(), sizes.data(), count}, Direction::to_device,
               SourceAccess::any, stream);
  const EventHandle end = record_now(*device, stream);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(device->query(end), EventState::pending);
    device->sleep(device->progress().value(), second, true);
  }
  EXPECT_EQ(device->query(end), EventState::done);
  EXPECT_EQ(target, source);
}

TEST(HostDevice, OneWhoSleepsWithoutHelpingOrWithoutTimeCopiesNothing) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  const Bytes source = filled(100, 1);
  Bytes target(100);
  const OneCopy copy(target, source);
  copy.queue(*device, stream);
  device->sleep(device->progress().value(), 1000, false);
  device->sleep(device->progress().value(), 0, true);
  device->sleep(device->progress().value() - 1, second, true);  // progress has moved already
  EXPECT_EQ(target, filled(100, 0));
}

TEST(HostDevice, AHelperThatSleepsIsWokenByNewWorkWhenThereIsNoWorker) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  const Bytes source = filled(100, 1);
  Bytes target(100);
  const OneCopy copy(target, source);
  const EventHandle end = device->create_event(false);
  device->record_unsignalled(end);
  std::thread helper([&] { settle(*device, end, true); });
  const std::uint64_t seen = device->progress().value();
  copy.queue(*device, stream);
  EXPECT_GT(device->progress().value(), seen);
  settle(*device, record_now(*device, stream), true);
  device->signal(end);
  helper.join();
  EXPECT_EQ(target, source);
}

TEST(HostDevice, AnUnsignalledEventIsPendingUntilItsSignalWhichMovesProgress) {
  const auto device = make_host_device();
  const StreamHandle stream = device->create_stream();
  const EventHandle compute = device->create_event(true);
  device->record_unsignalled(compute);
  EXPECT_TRUE(device->recorded(compute));
  EXPECT_EQ(device->query(compute), EventState::pending);
  EXPECT_THROW(device->record_unsignalled(compute), InvalidArgument);
  EXPECT_THROW(device->record(compute, stream), InvalidArgument);
  const std::uint64_t seen = device->progress().value();
  const Nanoseconds before = device->now();
  device->signal(compute);
  EXPECT_GT(device->progress().value(), seen);
  EXPECT_EQ(device->query(compute), EventState::done);
  EXPECT_GE(device->event_time(compute), before);
  EXPECT_THROW(device->signal(compute), InvalidArgument);
}

TEST(HostDevice, ProgressMovesWhenAnEventIsReached) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  const Bytes source = filled(1000, 1);
  Bytes target(source.size());
  const OneCopy copy(target, source);
  copy.queue(*device, stream);
  const EventHandle end = record_now(*device, stream);
  const std::uint64_t before_copy = device->progress().value();
  device->sleep(before_copy, second, true);
  EXPECT_EQ(device->query(end), EventState::done);
  EXPECT_NE(device->progress().value(), before_copy);

  const std::uint64_t before_record = device->progress().value();
  device->record(end, stream);  // reached at once; somebody may sleep for its earlier record
  EXPECT_NE(device->progress().value(), before_record);
}

TEST(HostDevice, AHelperThatLeavesCallsForHelpWithWhatItSetFree) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  const Bytes source = filled(1000, 1);
  Bytes target(source.size());
  const OneCopy copy(target, source);
  copy.queue(*device, stream);
  copy.queue(*device, stream);
  for (const bool more : {true, false}) {
    const std::uint64_t before = device->progress().value();
    device->sleep(before, second, true);
    EXPECT_EQ(device->progress().value() != before, more);
  }
}

TEST(HostDevice, ASignalWakesTheWorkersForWhatItSetsFree) {
  const auto device = make_host_device({.workers = 1});
  const StreamHandle stream = device->create_stream();
  const EventHandle stall = device->create_event(false);
  const Bytes source = filled(1000, 1);
  Bytes target(source.size());
  const OneCopy copy(target, source);
  for (int i = 0; i < 20; ++i) {
    device->record_unsignalled(stall);
    device->wait(stream, stall);
    copy.queue(*device, stream);
    const EventHandle end = record_now(*device, stream);
    device->sleep(device->progress().value(), 1'000'000, false);  // lets the worker fall asleep
    device->signal(stall);
    settle(*device, end, false);
  }
  EXPECT_EQ(target, source);
}

TEST(HostDevice, ABatchOverTheCapIsRefused) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  const Bytes source(1);
  Bytes target(1);
  std::byte* const to = target.data();
  const std::byte* const from = source.data();
  const std::size_t bytes = 1;
  const std::size_t count = device->info().max_descriptors + 1;
  EXPECT_THROW(device->copy({&to, &from, &bytes, count}, Direction::to_host,
                            SourceAccess::stream_order, stream),
               InvalidArgument);
}

// Chains of small copies over several streams, by several threads, some of them helping: if a
// wake-up is lost anywhere, somebody sleeps for ever.
TEST(HostDevice, NobodySleepsForEver) {
  const auto device = make_host_device({.workers = 3});
  std::vector<StreamHandle> streams;
  for (int i = 0; i < 6; ++i) streams.push_back(device->create_stream());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::minstd_rand random(seed + 1);
      const Bytes source = filled(piece + 5000, static_cast<int>(seed) + 1);
      Bytes target(source.size());
      const OneCopy copy(target, source);
      const EventHandle between = device->create_event(false), end = device->create_event(false);
      for (int round = 0; round < 100; ++round) {
        std::ranges::fill(std::span(target).last(5000), std::byte{0});
        const StreamHandle first = streams[random() % 6], then = streams[random() % 6];
        device->record(between, first);
        device->wait(then, between);
        copy.queue(*device, then);
        device->record(end, then);
        settle(*device, end, random() % 2 == 0);
        if (target != source) ++wrong;
      }
      device->destroy_event(between);
      device->destroy_event(end);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(HostDevice, MemoryGivenBackUnderACopyIsLeakedNotUnmapped) {
  const auto device = make_host_device({.no_workers = true});
  const StreamHandle stream = device->create_stream();
  constexpr std::size_t bytes = 8192;
  void* const memory = device->allocate(bytes);
  const Bytes source = filled(bytes, 1);
  auto* target = static_cast<std::byte*>(memory);
  const std::byte* from = source.data();
  device->copy({&target, &from, &bytes, 1}, Direction::to_device, SourceAccess::stream_order,
               stream);
  device->deallocate(memory, bytes);
  settle(*device, record_now(*device, stream), true);  // would crash
  EXPECT_TRUE(std::equal(source.begin(), source.end(), target));
  device->deallocate(memory, bytes);
}

}  // namespace
}  // namespace kvmem
