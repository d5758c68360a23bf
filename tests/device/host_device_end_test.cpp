// How a host device ends: dropped idle or busy, in a forked child, while the process exits.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <span>
#include <thread>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "base/process.hpp"
#include "device/host_device.hpp"
#include "device/one_copy.hpp"
#include "support/child_process.hpp"

namespace kvmem {
namespace {

using test::Bytes;
using test::filled;
using test::OneCopy;
using test::piece;
using test::record_now;
using test::second;
using test::settle;

TEST(HostDeviceEnd, AnIdleDeviceEnds) {
  for (int i = 0; i < 50; ++i) static_cast<void>(make_host_device({.workers = 4}));
}

TEST(HostDeviceEnd, WorkThatIsPendingIsDropped) {
  const Bytes source = filled(1000, 1);
  Bytes target(1000);
  const OneCopy copy(target, source);
  {
    const auto device = make_host_device({.workers = 2});
    const StreamHandle stream = device->create_stream();
    const EventHandle never = device->create_event(false);
    device->record_unsignalled(never);
    device->wait(stream, never);
    copy.queue(*device, stream);
    static_cast<void>(record_now(*device, stream));
  }
  EXPECT_EQ(target, filled(1000, 0));
}

TEST(HostDeviceEnd, NobodyTouchesMemoryOnceTheDeviceIsGoneInTheMiddleOfACopy) {
  const Bytes source = filled(40 * piece, 1);
  for (int i = 0; i < 10; ++i) {
    Bytes target(source.size());
    const OneCopy copy(target, source);
    auto device = make_host_device({.workers = 2});
    copy.queue(*device, device->create_stream());
    device->sleep(device->progress().value(), 1'000'000, true);
    device.reset();
    const auto moved = std::ranges::count(target, std::byte{1});
    EXPECT_EQ(static_cast<std::size_t>(moved) % piece, 0U) << "a piece was left half done";
    std::ranges::fill(target, std::byte{0});  // a sanitizer would see a worker here
  }
}

// ---- forks and exits ----

template <class Call>
bool is_forked_error(const Call& call) {
  try {
    call();
  } catch (const Forked&) {
    return true;
  }
  return false;
}

TEST(HostDeviceFork, EveryCallInAForkedChildSaysForked) {
  auto device = make_host_device();
  const StreamHandle stream = device->create_stream();
  const EventHandle event = record_now(*device, stream);
  void* const memory = device->allocate(4096);
  const auto refused_everywhere = [&] {
    return is_forked_error([&] { static_cast<void>(device->allocate(4096)); }) &&
           is_forked_error([&] { device->pin(memory, 4096); }) &&
           is_forked_error([&] { static_cast<void>(device->create_stream()); }) &&
           is_forked_error([&] { static_cast<void>(device->stream_id(stream)); }) &&
           is_forked_error([&] { static_cast<void>(device->create_event(true)); }) &&
           is_forked_error([&] { device->record(event, stream); }) &&
           is_forked_error([&] { device->wait(stream, event); }) &&
           is_forked_error([&] { static_cast<void>(device->recorded(event)); }) &&
           is_forked_error([&] { static_cast<void>(device->event_time(event)); }) &&
           is_forked_error(
               [&] { device->copy({}, Direction::to_host, SourceAccess::stream_order, stream); }) &&
           is_forked_error([&] { device->sleep(0, 0, true); }) &&
           is_forked_error([&] { device->record_unsignalled(event); }) &&
           is_forked_error([&] { device->signal(event); });
  };
  EXPECT_FALSE(is_forked_error([&] { static_cast<void>(device->stream_id(stream)); }));
  EXPECT_TRUE(test::true_in_child([&] {
    const bool good = refused_everywhere() && device->query(event) == EventState::lost;
    device->destroy_event(event);
    device->destroy_stream(stream);
    device->unpin(memory, 4096);
    device->deallocate(memory, 4096);
    *static_cast<std::byte*>(memory) = std::byte{1};  // still mapped
    device.reset();
    return good;
  }));
  EXPECT_EQ(device->query(event), EventState::done);
  device->deallocate(memory, 4096);
}

TEST(HostDeviceFork, AForkWhileTheDeviceIsBusyNeverHangsTheChild) {
  auto device = make_host_device({.workers = 2});
  std::atomic<bool> stop{false};
  std::thread busy([&] {  // holds the device's locks most of the time
    const StreamHandle stream = device->create_stream();
    const EventHandle event = device->create_event(false);
    while (!stop) {
      device->record(event, stream);
      static_cast<void>(device->query(event));
      device->sleep(device->progress().value(), 1, true);
    }
  });
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(test::true_in_child([&] {
      const bool refused = is_forked_error([&] { static_cast<void>(device->create_stream()); });
      const bool lost = device->query(1) == EventState::lost;
      device.reset();  // the last owner, as far as the child knows
      return refused && lost;
    }));
  }
  stop = true;
  busy.join();
}

// The program's memory may be freed next: what is under way is waited for, and no more is moved.
TEST(HostDeviceDeathTest, ADeviceDroppedWhileTheProcessExitsIsLeakedWholeAndCopiesNoMore) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the child starts threads of its own
  EXPECT_EXIT(
      {
        constexpr std::size_t bytes = 40 * piece;
        void* const mapped =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) std::_Exit(2);
        const std::span source(static_cast<std::byte*>(mapped), bytes);
        std::ranges::fill(source, std::byte{1});
        Bytes target(bytes);
        const OneCopy copy(target, source);
        constexpr double pieces_a_second = 1000;
        auto device = make_host_device(
            {.workers = 2, .most_bytes_per_second = pieces_a_second * double{piece}});
        const StreamHandle stream = device->create_stream();
        copy.queue(*device, stream);
        const EventHandle end = record_now(*device, stream);
        Device* const leaked = device.get();
        set_process_exiting();
        device.reset();
        munmap(mapped, bytes);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // 20 would do for the rest
        std::_Exit(leaked->query(end) == EventState::pending ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// Public failure 156: late destructors made noise at exit.
TEST(HostDeviceDeathTest, ADeviceInAStaticSurvivesTheExit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        static const auto device = make_host_device({.workers = 2});
        settle(*device, record_now(*device, device->create_stream()), true);
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace kvmem
