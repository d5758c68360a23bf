#include <string>

#include "base/error.hpp"
#include "contract/device_contract.hpp"

namespace kvmem::contract {
namespace {

constexpr auto done = EventState::done;
constexpr auto pending = EventState::pending;

TEST_P(DeviceContract, AnEventNeverRecordedCountsAsDone) { EXPECT_EQ(query(new_event()), done); }

TEST_P(DeviceContract, AnEventKnowsWhetherItWasEverRecorded) {
  const EventHandle event = new_event();
  EXPECT_EQ(device().recorded(event), !GetParam().knows_records);
  device().record(event, new_stream());
  EXPECT_TRUE(device().recorded(event));
}

TEST_P(DeviceContract, WaitingForAnEventNeverRecordedHoldsNothingBack) {
  const StreamHandle stream = new_stream();
  device().wait(stream, new_event());
  settle_stream(stream);
}

TEST_P(DeviceContract, AWaitBeforeTheFirstRecordIgnoresThatRecord) {
  const StreamHandle stalled = new_stream(), waiting = new_stream();
  const EventHandle event = new_event();
  stall(stalled);
  device().wait(waiting, event);
  device().record(event, stalled);
  settle_stream(waiting);
  EXPECT_EQ(query(event), pending);
}

TEST_P(DeviceContract, AnEventIsPendingWhileWhatWasRecordedBeforeItIs) {
  const StreamHandle stream = new_stream();
  stall(stream);
  const EventHandle event = record_now(stream);
  EXPECT_EQ(query(event), pending);
  let_others_work();
  EXPECT_EQ(query(event), pending);
  unstall(stream);
  settle(event);
}

TEST_P(DeviceContract, AnEventDoesNotCoverWhatIsQueuedAfterIt) {
  const StreamHandle stream = new_stream();
  const EventHandle before = record_now(stream);
  stall(stream);
  const EventHandle after = record_now(stream);
  settle(before);
  EXPECT_EQ(query(after), pending);
}

TEST_P(DeviceContract, AStalledStreamHoldsBackNoOther) {
  const StreamHandle stalled = new_stream(), other = new_stream();
  stall(stalled);
  const EventHandle held = record_now(stalled);
  settle_stream(other);
  EXPECT_EQ(query(held), pending);
}

TEST_P(DeviceContract, AWaitHoldsItsStreamUntilTheEventIsReached) {
  const StreamHandle first = new_stream(), second = new_stream();
  stall(first);
  device().wait(second, record_now(first));
  const EventHandle behind = record_now(second);
  let_others_work();
  EXPECT_EQ(query(behind), pending);
  unstall(first);
  settle(behind);
}

TEST_P(DeviceContract, AWaitLetsWhatWasQueuedBeforeItEnd) {
  const StreamHandle first = new_stream(), second = new_stream();
  stall(first);
  const EventHandle before = record_now(second);
  device().wait(second, record_now(first));
  settle(before);
}

TEST_P(DeviceContract, AWaitForAnEventOfItsOwnStreamIsPassed) {
  const StreamHandle stream = new_stream();
  stall(stream);
  device().wait(stream, record_now(stream));
  const EventHandle behind = record_now(stream);
  unstall(stream);
  settle(behind);
}

TEST_P(DeviceContract, AWaitKeepsTheRecordThatItSaw) {
  const StreamHandle first = new_stream(), second = new_stream(), waiting = new_stream();
  const EventHandle event = new_event();
  stall(first);
  stall(second);
  device().record(event, first);
  device().wait(waiting, event);
  device().record(event, second);
  const EventHandle behind = record_now(waiting);
  EXPECT_EQ(query(behind), pending);
  unstall(first);
  settle(behind);
  EXPECT_EQ(query(event), pending) << "a query looks at the latest record";
}

TEST_P(DeviceContract, AWaitIsNotShortenedByRecordingAgain) {
  const StreamHandle stalled = new_stream(), idle = new_stream(), waiting = new_stream();
  const EventHandle event = new_event();
  stall(stalled);
  device().record(event, stalled);
  device().wait(waiting, event);
  device().record(event, idle);
  const EventHandle behind = record_now(waiting);
  settle(event);
  EXPECT_EQ(query(behind), pending);
}

TEST_P(DeviceContract, RecordingADoneEventAgainMakesItPending) {
  const StreamHandle stream = new_stream();
  const EventHandle event = record_now(stream);
  settle(event);
  stall(stream);
  device().record(event, stream);
  EXPECT_EQ(query(event), pending);
  unstall(stream);
  settle(event);
}

TEST_P(DeviceContract, AChainOfWaitsIsPassedFromEndToEnd) {
  const StreamHandle first = new_stream();
  stall(first);
  EventHandle last = record_now(first);
  for (int i = 0; i < 200; ++i) {
    const StreamHandle next = new_stream();
    device().wait(next, last);
    last = record_now(next);
  }
  EXPECT_EQ(query(last), pending);
  unstall(first);
  settle(last);
}

TEST_P(DeviceContract, OneEventSetsFreeAllWhoWaitForIt) {
  const StreamHandle first = new_stream();
  stall(first);
  const EventHandle event = record_now(first);
  std::vector<EventHandle> behind;
  for (int i = 0; i < 20; ++i) {
    const StreamHandle waiting = new_stream();
    device().wait(waiting, event);
    behind.push_back(record_now(waiting));
    EXPECT_EQ(query(behind.back()), pending);
  }
  unstall(first);
  for (const EventHandle one : behind) settle(one);
}

TEST_P(DeviceContract, AStreamMayWaitForManyEvents) {
  const StreamHandle first = new_stream(), second = new_stream(), waiting = new_stream();
  stall(first);
  stall(second);
  device().wait(waiting, record_now(first));
  device().wait(waiting, record_now(second));
  const EventHandle behind = record_now(waiting);
  unstall(second);
  let_others_work();
  EXPECT_EQ(query(behind), pending);
  unstall(first);
  settle(behind);
}

TEST_P(DeviceContract, APendingEventCanBeDestroyedAndItsWaitersStillWait) {
  const StreamHandle first = new_stream(), waiting = new_stream();
  stall(first);
  const EventHandle event = record_now(first);
  device().wait(waiting, event);
  const EventHandle behind = record_now(waiting);
  destroy_event(event);
  let_others_work();
  EXPECT_EQ(query(behind), pending);
  unstall(first);
  settle(behind);
}

TEST_P(DeviceContract, ANewEventKnowsNothingOfADestroyedOne) {
  const StreamHandle stream = new_stream();
  stall(stream);
  destroy_event(record_now(stream));
  const EventHandle event = new_event();  // perhaps with the same handle
  EXPECT_EQ(device().recorded(event), !GetParam().knows_records);
  EXPECT_EQ(query(event), done);
}

TEST_P(DeviceContract, EventTimesNeverGoBackAlongAStream) {
  const StreamHandle stream = new_stream();
  stall(stream);
  std::vector<EventHandle> events;
  for (int i = 0; i < 20; ++i) events.push_back(record_now(stream, true));
  unstall(stream);
  settle(events.back());
  for (std::size_t i = 1; i < events.size(); ++i) {
    EXPECT_LE(device().event_time(events[i - 1]), device().event_time(events[i]));
  }
}

TEST_P(DeviceContract, AnEventTimeSaysWhenItWasReachedNotRecorded) {
  const StreamHandle stream = new_stream();
  stall(stream);
  const EventHandle event = record_now(stream, true);
  let_others_work();
  const Nanoseconds before = device().now();
  unstall(stream);
  settle(event);
  EXPECT_GE(device().event_time(event), before - GetParam().clock_slack);
  EXPECT_LE(device().event_time(event), device().now() + GetParam().clock_slack);
}

TEST_P(DeviceContract, AnEventHasNoTimeWithoutTimingARecordAndItsEnd) {
  const StreamHandle stream = new_stream();
  const EventHandle untimed = record_now(stream);
  settle(untimed);
  EXPECT_THROW(static_cast<void>(device().event_time(untimed)), InvalidArgument);
  const EventHandle timed = new_event(true);
  EXPECT_THROW(static_cast<void>(device().event_time(timed)), InvalidArgument);
  stall(stream);
  device().record(timed, stream);
  EXPECT_THROW(static_cast<void>(device().event_time(timed)), InvalidArgument);
}

TEST_P(DeviceContract, TheTimeOfAnEventIsThatOfItsLatestRecord) {
  const StreamHandle stream = new_stream();
  const EventHandle event = record_now(stream, true);
  settle(event);
  stall(stream);
  device().record(event, stream);
  EXPECT_THROW(static_cast<void>(device().event_time(event)), InvalidArgument);
  let_others_work();
  const Nanoseconds unstalled = device().now();
  unstall(stream);
  settle(event);
  EXPECT_GE(device().event_time(event) + GetParam().clock_slack, unstalled);
}

TEST_P(DeviceContract, AHandleThatComesAgainDoesNotFreeThoseWhoWaitedForTheOldEvent) {
  const StreamHandle stalled = new_stream(), waiting = new_stream(), idle = new_stream();
  stall(stalled);
  const EventHandle old = record_now(stalled);
  device().wait(waiting, old);
  destroy_event(old);
  const EventHandle behind = record_now(waiting);
  // Perhaps with the handle of the old one.
  for (int i = 0; i < 3; ++i) settle(record_now(idle));
  let_others_work();
  EXPECT_EQ(query(behind), pending);
  unstall(stalled);
  settle(behind);
}

}  // namespace
}  // namespace kvmem::contract
