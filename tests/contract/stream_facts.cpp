#include <atomic>
#include <set>
#include <thread>

#include "base/error.hpp"
#include "contract/device_contract.hpp"

namespace kvmem::contract {
namespace {

constexpr auto done = EventState::done;
constexpr auto pending = EventState::pending;

template <class Call>
void expect_refused_by_name(std::uintptr_t handle, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "handle " << handle << " was taken";
  } catch (const InvalidArgument& refusal) {
    EXPECT_NE(std::string(refusal.what()).find(std::to_string(handle)), std::string::npos)
        << refusal.what();
  }
}

TEST_P(DeviceContract, AStreamKeepsItsId) {
  const StreamHandle first = new_stream(), second = new_stream();
  const std::uint64_t id = device().stream_id(first);
  EXPECT_NE(device().stream_id(second), id);
  EXPECT_EQ(device().stream_id(first), id);
}

TEST_P(DeviceContract, StreamIdsNeverComeAgainThoughHandlesDo) {
  std::set<std::uint64_t> ids;
  for (int i = 0; i < 50; ++i) {
    const StreamHandle stream = new_stream();
    EXPECT_TRUE(ids.insert(device().stream_id(stream)).second);
    destroy_stream(stream);
  }
}

TEST_P(DeviceContract, ADestroyedStreamEndsWhatItHolds) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(100'000, 1);
  std::byte* const target = device_memory(source.size());
  stall(stream);
  to_device(target, source, stream);
  const EventHandle event = record_now(stream);
  destroy_stream(stream);
  EXPECT_EQ(query(event), pending);
  unstall(stream);
  settle(event);
  EXPECT_EQ(read_device(target, source.size()), bytes_of(source));
}

TEST_P(DeviceContract, ANewStreamIsNotHeldBackByADestroyedOne) {
  const StreamHandle old = new_stream();
  stall(old);
  const EventHandle held = record_now(old);
  destroy_stream(old);
  settle_stream(new_stream());  // perhaps with the same handle
  EXPECT_EQ(query(held), pending);
  unstall(old);
  settle(held);
}

TEST_P(DeviceContract, AStreamWaitsForAnEventOfADestroyedStream) {
  const StreamHandle old = new_stream(), waiting = new_stream();
  stall(old);
  device().wait(waiting, record_now(old));
  const EventHandle behind = record_now(waiting);
  destroy_stream(old);
  EXPECT_EQ(query(behind), pending);
  unstall(old);
  settle(behind);
}

// Public failure 158: a stream that takes no copies was not refused by name.
TEST_P(DeviceContract, AnUnknownStreamIsRefusedByName) {
  if (!GetParam().refuses_unknown_handles) GTEST_SKIP() << "this kind trusts its callers";
  const EventHandle event = new_event();
  const auto memory = host_memory(16);
  const StreamHandle gone = new_stream();
  destroy_stream(gone);
  for (const StreamHandle stream : {gone, StreamHandle{0xdead0}}) {
    expect_refused_by_name(stream, [&] { static_cast<void>(device().stream_id(stream)); });
    expect_refused_by_name(stream, [&] { device().record(event, stream); });
    expect_refused_by_name(stream, [&] { device().wait(stream, event); });
    expect_refused_by_name(stream, [&] { to_device(memory.data(), memory.last(8), stream); });
    expect_refused_by_name(stream, [&] { copy(Batch{}, Direction::to_host, stream); });
  }
  EXPECT_FALSE(device().recorded(event));
}

TEST_P(DeviceContract, AnUnknownEventIsRefusedByNameAndItsQueryLearnsNothing) {
  if (!GetParam().refuses_unknown_handles) GTEST_SKIP() << "this kind trusts its callers";
  const StreamHandle stream = new_stream();
  const EventHandle gone = new_event();
  destroy_event(gone);
  for (const EventHandle event : {gone, EventHandle{0xdead0}}) {
    expect_refused_by_name(event, [&] { device().record(event, stream); });
    expect_refused_by_name(event, [&] { device().wait(stream, event); });
    expect_refused_by_name(event, [&] { static_cast<void>(device().recorded(event)); });
    expect_refused_by_name(event, [&] { static_cast<void>(device().event_time(event)); });
    EXPECT_EQ(query(event), EventState::failed);
  }
}

TEST_P(DeviceContract, HandlesOfAnotherDeviceAreRefused) {
  if (!GetParam().refuses_unknown_handles) GTEST_SKIP() << "this kind trusts its callers";
  const auto other = GetParam().open();
  const StreamHandle stream = other->device().create_stream();
  const EventHandle event = other->device().create_event(false);
  EXPECT_THROW(static_cast<void>(device().stream_id(stream)), InvalidArgument);
  EXPECT_THROW(device().record(event, new_stream()), InvalidArgument);
  other->device().destroy_event(event);
  other->device().destroy_stream(stream);
}

TEST_P(DeviceContract, ThreadsMaySubmitToStreamsOfTheirOwnAtOnce) {
  constexpr std::size_t threads = 4, rounds = 40, bytes = 20'000;
  struct Lane {
    StreamHandle stream;
    EventHandle event;
    std::span<std::byte> source, target;
    std::byte* memory;
    Batch there, back;
  };
  std::vector<Lane> lanes;
  for (unsigned i = 0; i < threads; ++i) {
    Lane& lane = lanes.emplace_back(Lane{new_stream(),
                                         new_event(),
                                         host_memory(bytes, 10 + i),
                                         host_memory(bytes),
                                         device_memory(bytes),
                                         {},
                                         {}});
    lane.there.add(lane.memory, lane.source.data(), bytes);
    lane.back.add(lane.target.data(), lane.memory, bytes);
  }
  std::vector<std::thread> running;
  for (Lane& lane : lanes) {
    running.emplace_back([&] {
      for (std::size_t round = 0; round < rounds; ++round) {
        device().copy(lane.there.descriptors(), Direction::to_device, SourceAccess::stream_order,
                      lane.stream);
        device().copy(lane.back.descriptors(), Direction::to_host, SourceAccess::stream_order,
                      lane.stream);
        device().record(lane.event, lane.stream);
        settle(lane.event);
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  for (const Lane& lane : lanes) EXPECT_EQ(bytes_of(lane.target), bytes_of(lane.source));
}

TEST_P(DeviceContract, ThreadsMayMakeAndDestroyStreamsAndEventsAtOnce) {
  std::vector<std::thread> running;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 4; ++i) {
    running.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        const StreamHandle stream = device().create_stream();
        const EventHandle event = device().create_event(false);
        device().record(event, stream);
        device().wait(stream, event);
        device().destroy_stream(stream);
        const EventState state = device().query(event);
        if (state != done && state != pending) ++wrong;
        device().destroy_event(event);
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(DeviceContract, StreamIdsOfTwoDevicesNeverCoincide) {
  const auto other = GetParam().open();
  std::set<std::uint64_t> ids;
  for (int i = 0; i < 5; ++i) {
    ids.insert(device().stream_id(new_stream()));
    const StreamHandle stream = other->device().create_stream();
    ids.insert(other->device().stream_id(stream));
    other->device().destroy_stream(stream);
  }
  EXPECT_EQ(ids.size(), 10U);
}

TEST_P(DeviceContract, AStreamIsDestroyedAtOnceThoughItWaits) {
  const StreamHandle stalled = new_stream(), waiting = new_stream();
  const auto source = host_memory(1000, 1);
  std::byte* const memory = device_memory(source.size());
  stall(stalled);
  device().wait(waiting, record_now(stalled));
  to_device(memory, source, waiting);
  const EventHandle event = record_now(waiting);
  destroy_stream(waiting);
  EXPECT_EQ(query(event), EventState::pending);
  unstall(stalled);
  settle(event);
  EXPECT_EQ(read_device(memory, source.size()), bytes_of(source));
}

}  // namespace
}  // namespace kvmem::contract
