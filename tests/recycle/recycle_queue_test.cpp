#include "recycle/recycle_queue.hpp"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "device/host_device.hpp"
#include "support/child_process.hpp"
#include "support/scripted_device.hpp"
#include "support/stall.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

struct Ends {
  std::mutex mutex;
  std::vector<std::string> names;  // a lost one has a "!"

  void add(const std::string& name) {
    const std::lock_guard lock(mutex);
    names.push_back(name);
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex);
    return std::exchange(names, {});
  }
};

class Named final : public Parked {
 public:
  Named(Ends& ends, std::string name) : ends_(&ends), name_(std::move(name)) {}
  ~Named() override {
    if (!ended_) ends_->add(name_ + " destroyed without an end");
  }
  void ended(bool lost) noexcept override {
    ended_ = true;
    ends_->add(lost ? name_ + "!" : name_);
  }

 private:
  Ends* ends_;
  std::string name_;
  bool ended_ = false;
};

using Names = std::vector<std::string>;

class RecycleQueueTest : public ::testing::Test {
 protected:
  struct Row {  // a stream of ours with its line
    StreamHandle stream;
    std::shared_ptr<RecycleQueue::Line> line;
  };
  Row open(bool ours = true) {
    const StreamHandle stream = device_->create_stream();
    return {stream, queue_->line(device_->stream_id(stream), stream, ours)};
  }

  std::unique_ptr<Named> named(const std::string& name) {
    return std::make_unique<Named>(ends_, name);
  }
  EventHandle park(const Row& row, const std::string& name) {
    auto parked = named(name);
    parked->event = std::make_shared<Event>(events_->acquire());
    parked->event->record(row.stream);
    const EventHandle event = parked->event->handle();
    queue_->park(row.line, std::move(parked));
    return event;
  }
  void park_without_event(const Row& row, const std::string& name) {
    queue_->park(row.line, named(name));
  }
  Names reap() {
    queue_->reap();
    return ends_.take();
  }

  Ends ends_;
  std::shared_ptr<ScriptedDevice> device_ =
      std::make_shared<ScriptedDevice>(ScriptedOptions{.moves_bytes = false});
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(device_, false);
  std::unique_ptr<RecycleQueue> queue_ = std::make_unique<RecycleQueue>(events_);
};

TEST_F(RecycleQueueTest, NothingEndsBeforeItsEventIsObserved) {
  const Row row = open();
  Stall stall(device_, row.stream);
  park(row, "a");
  EXPECT_EQ(queue_->reap(), 0U);
  EXPECT_EQ(queue_->in_flight(), 1U);
  stall.open();
  EXPECT_TRUE(ends_.take().empty()) << "the device being done is not enough";
  EXPECT_EQ(queue_->reap(), 1U);
  EXPECT_EQ(ends_.take(), Names{"a"});
  EXPECT_EQ(queue_->in_flight(), 0U);
  EXPECT_EQ(queue_->reap(), 0U);
}

TEST_F(RecycleQueueTest, WhatIsBehindOneStreamEndsInOrder) {
  const Row row = open();
  Stall first(device_, row.stream);
  park(row, "a");
  Stall second(device_, row.stream);
  park(row, "b");
  park(row, "c");
  first.open();
  EXPECT_EQ(reap(), Names{"a"});
  second.open();
  EXPECT_EQ(reap(), (Names{"b", "c"}));
}

// Public failure 33: the scan for finished copies stopped at the first unfinished one.
TEST_F(RecycleQueueTest, ASlowStreamKeepsNobodyElseWaiting) {
  const Row slow = open();
  const Row fast = open();
  Stall stall(device_, slow.stream);
  park(slow, "slow 1");
  park(fast, "fast 1");
  park(slow, "slow 2");
  park(fast, "fast 2");
  EXPECT_EQ(reap(), (Names{"fast 1", "fast 2"}));
  park(fast, "fast 3");
  EXPECT_EQ(reap(), Names{"fast 3"});
  stall.open();
  EXPECT_EQ(reap(), (Names{"slow 1", "slow 2"}));
}

TEST_F(RecycleQueueTest, OnlyTheHeadOfEachLineIsAsked) {
  const Row a = open();
  const Row b = open();
  Stall stall_a(device_, a.stream);
  Stall stall_b(device_, b.stream);
  for (int i = 0; i < 100; ++i) {
    park(a, "a");
    park(b, "b");
  }
  device_->forget_calls();
  EXPECT_TRUE(reap().empty());
  EXPECT_EQ(device_->calls(CallKind::query).size(), 2U);
  stall_a.open();
  stall_b.open();
  device_->forget_calls();
  EXPECT_EQ(reap().size(), 200U);
  EXPECT_EQ(device_->calls(CallKind::query).size(), 200U) << "each event is asked once";
}

TEST_F(RecycleQueueTest, WhatEndsWhileOthersAreAskedIsFoundInTheSameReap) {
  const Row rows[] = {open(), open()};
  Stall stalls[] = {{device_, rows[0].stream}, {device_, rows[1].stream}};
  park(rows[0], "0");
  park(rows[1], "1");
  device_->before_next(CallKind::query, [&] {
    device_->before_next(CallKind::query, [&] {  // the first one was asked, and was pending
      for (Stall& stall : stalls) stall.open();
    });
  });
  EXPECT_EQ(reap().size(), 2U);
}

// ---- where no event could be had ----

TEST_F(RecycleQueueTest, AnEntryWithoutAnEventGetsOneBehindItsWork) {
  const Row row = open();
  Stall stall(device_, row.stream);
  park_without_event(row, "a");
  EXPECT_TRUE(reap().empty());
  ASSERT_EQ(device_->calls(CallKind::record).size(), 1U);
  EXPECT_EQ(device_->calls(CallKind::record)[0].stream, row.stream);
  EXPECT_TRUE(reap().empty());
  EXPECT_EQ(device_->calls(CallKind::record).size(), 1U) << "one is enough";
  stall.open();
  EXPECT_EQ(reap(), Names{"a"});
}

TEST_F(RecycleQueueTest, AnEntryWhoseEventWasNotRecordedGetsANewOne) {
  const Row row = open();
  auto parked = named("a");
  parked->event = std::make_shared<Event>(events_->acquire());
  queue_->park(row.line, std::move(parked));
  EXPECT_TRUE(reap().empty())
      << "an event that was never recorded counts as complete: not to be asked";
  EXPECT_EQ(reap(), Names{"a"});
}

TEST_F(RecycleQueueTest, EachReapTriesAgainToRecord) {
  for (const CallKind kind : {CallKind::record, CallKind::create_event}) {
    const Row row = open();
    Stall stall(device_, row.stream);  // its event is not the one that fails
    device_->fail_always(kind);
    park_without_event(row, "a");
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(reap().empty());
    EXPECT_EQ(device_->injected() % 5, 0U);
    device_->heal();
    EXPECT_TRUE(reap().empty());
    stall.open();
    EXPECT_EQ(reap(), Names{"a"});
  }
}

TEST_F(RecycleQueueTest, AFailedQueryOnAStreamOfOursIsRecordedAgainBehindTheWork) {
  const Row row = open();
  Stall stall(device_, row.stream);
  park(row, "a");
  device_->fail(CallKind::query, 1);
  device_->forget_calls();
  EXPECT_TRUE(reap().empty());
  EXPECT_EQ(device_->calls(CallKind::record).size(), 1U);
  EXPECT_TRUE(reap().empty());
  stall.open();
  EXPECT_EQ(reap(), Names{"a"});
}

TEST_F(RecycleQueueTest, AFailedQueryOnAForeignStreamIsAskedAgainAndNothingIsRecordedThere) {
  const Row row = open(false);
  Stall stall(device_, row.stream);
  park(row, "a");
  stall.open();
  device_->destroy_stream(row.stream);  // the caller's right
  device_->fail(CallKind::query, 1);
  device_->forget_calls();
  EXPECT_TRUE(reap().empty());
  EXPECT_TRUE(device_->calls(CallKind::record).empty());
  EXPECT_EQ(reap(), Names{"a"});
}

// ---- a lost device ----

TEST_F(RecycleQueueTest, OnALostDeviceAllThatIsParkedEndsLost) {
  const Row a = open();
  const Row b = open();
  Stall stall(device_, a.stream);
  park(a, "a1");
  park(a, "a2");
  park_without_event(b, "b");
  device_->lose();
  Names names = reap();
  std::ranges::sort(names);
  EXPECT_EQ(names, (Names{"a1!", "a2!", "b!"}));
  EXPECT_EQ(queue_->in_flight(), 0U);
}

// ---- the queue's own end ----

// Keeps what a queue leaked within reach, so that no leak checker takes it for a mistake.
std::vector<const void*>& leaked() {
  static auto* const pointers = new std::vector<const void*>;
  return *pointers;
}

TEST_F(RecycleQueueTest, WhatIsStillParkedWhenTheQueueDiesIsLeakedWithItsBlocks) {
  const Row row = open();
  Stall stall(device_, row.stream);
  for (const char* const name : {"a", "b"}) {
    auto parked = named(name);
    parked->event = std::make_shared<Event>(events_->acquire());
    parked->event->record(row.stream);
    leaked().push_back(parked.get());
    queue_->park(row.line, std::move(parked));
  }
  queue_.reset();
  EXPECT_TRUE(ends_.take().empty()) << "neither ended nor destroyed";
  stall.open();
}

TEST_F(RecycleQueueTest, AForkedChildReapsNothing) {
  const Row row = open();
  park(row, "a");
  EXPECT_TRUE(true_in_child([&] { return queue_->reap() == 0 && ends_.take().empty(); }));
  EXPECT_EQ(reap(), Names{"a"});
}

// ---- lines ----

TEST_F(RecycleQueueTest, AStreamHasOneLineHoweverOftenItIsAskedFor) {
  const Row row = open();
  EXPECT_EQ(queue_->line(device_->stream_id(row.stream), row.stream, true), row.line);
}

TEST_F(RecycleQueueTest, AReusedHandleIsAnotherStreamWithALineOfItsOwn) {
  Row old = open(false);
  Stall stall(device_, old.stream);
  park(old, "old");
  device_->destroy_stream(old.stream);
  const Row young = open(false);
  ASSERT_EQ(young.stream, old.stream) << "the model gives handles out again";
  EXPECT_NE(young.line, old.line);
  park(young, "young");
  EXPECT_EQ(reap(), Names{"young"});
  stall.open();
  EXPECT_EQ(reap(), Names{"old"});
}

TEST_F(RecycleQueueTest, ALineThatNobodyHoldsStaysWhileItGuardsSomething) {
  Row row = open();
  Stall stall(device_, row.stream);
  park(row, "a");
  row.line.reset();
  for (int i = 0; i < 10; ++i) static_cast<void>(open());  // each makes room
  stall.open();
  EXPECT_EQ(reap(), Names{"a"});
}

// ---- several threads ----

TEST_F(RecycleQueueTest, AReaperThatIsTurnedAwayIsServedByTheOneAtWork) {
  // The event that the first reaper has asked already is reached, which wakes a second reaper; that
  // one is turned away. If the first did not look again, nobody would learn of the event until
  // something else moves.
  for (const bool in_turn : {false, true}) {
    const Row rows[] = {open(), open()};
    Stall stalls[] = {{device_, rows[0].stream}, {device_, rows[1].stream}};
    const EventHandle events[] = {park(rows[0], "0"), park(rows[1], "1")};
    std::string asked_first;
    device_->forget_calls();
    device_->before_next(CallKind::query, [&] {
      device_->before_next(CallKind::query, [&] {
        const std::size_t first = device_->calls(CallKind::query)[0].event == events[0] ? 0 : 1;
        asked_first = std::to_string(first);
        stalls[first].open();
        std::thread([&] { EXPECT_EQ(queue_->reap(), 0U); }).join();
      });
    });
    if (in_turn)
      queue_->reap_in_turn();
    else
      static_cast<void>(queue_->reap());
    const Names names = ends_.take();
    EXPECT_EQ(names, Names{asked_first});
    for (Stall& stall : stalls) stall.open();
    EXPECT_EQ(reap().size(), 1U);
  }
}

TEST_F(RecycleQueueTest, ParkingWhatHasEndedAlreadyWakesAReaper) {
  // It was woken by that end, and found nothing parked yet.
  const Row stalled = open();
  const Row row = open();
  Stall stall(device_, stalled.stream);
  park(stalled, "stalled");
  auto parked = named("a");
  parked->event = std::make_shared<Event>(events_->acquire());
  parked->event->record(row.stream);
  const std::uint64_t seen = device_->progress().value();
  queue_->park(row.line, std::move(parked));
  EXPECT_NE(device_->progress().value(), seen);
  EXPECT_EQ(reap(), Names{"a"});
  stall.open();
  EXPECT_EQ(reap(), Names{"stalled"});
}

TEST_F(RecycleQueueTest, ReapInTurnWaitsForItsTurn) {
  const Row row = open();
  Stall stall(device_, row.stream);  // or park() would have seen the end already
  park(row, "a");
  stall.open();
  std::thread second;
  std::atomic<bool> behind{false};
  device_->before_next(CallKind::query, [&] {
    second = std::thread([&] {
      queue_->reap_in_turn();
      behind = true;
    });
    EXPECT_FALSE(behind);
  });
  EXPECT_EQ(reap(), Names{"a"});
  second.join();
  EXPECT_TRUE(behind);
}

TEST_F(RecycleQueueTest, NoLineIsMissedWhenAnotherIsTakenOutMeanwhile) {
  Row unused = open();
  const Row rows[] = {open(), open()};
  park(rows[0], "0");
  park(rows[1], "1");
  unused.line.reset();
  device_->before_next(CallKind::query,
                       [&] { static_cast<void>(open()); });  // takes out the unused
  device_->fail(CallKind::query,
                1);  // so that the line asked first ends nothing, and no pass follows
  Names names = reap();
  EXPECT_FALSE(names.empty()) << "the other line was done and was not asked";
  for (const std::string& name : reap()) names.push_back(name);
  std::ranges::sort(names);
  EXPECT_EQ(names, (Names{"0", "1"}));
}

TEST(RecycleQueue, EverythingEndsExactlyOnceUnderConcurrentReapers) {
  const auto device = make_host_device({.workers = 1});
  const auto events = std::make_shared<EventPool>(device, false);
  RecycleQueue queue(events);
  struct Counted final : Parked {
    explicit Counted(std::atomic<int>& count) : ends(&count) {}
    void ended(bool) noexcept override { ends->fetch_add(1); }
    std::atomic<int>* ends;
  };
  constexpr int each = 300;
  constexpr int parkers = 3;
  std::vector<std::atomic<int>> counts(each * parkers);
  std::atomic<bool> parked_all{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < parkers; ++t) {
    threads.emplace_back([&, t] {
      const Stream stream(device);
      const auto line = queue.line(stream.id(), stream.handle(), true);
      for (int i = 0; i < each; ++i) {
        auto parked = std::make_unique<Counted>(counts[static_cast<std::size_t>(t * each + i)]);
        parked->event = std::make_shared<Event>(events->acquire());
        parked->event->record(stream.handle());
        queue.park(line, std::move(parked));
      }
    });
  }
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!parked_all || queue.in_flight() > 0) {
        if (queue.reap() == 0) std::this_thread::yield();
      }
    });
  }
  for (int t = 0; t < parkers; ++t) threads[static_cast<std::size_t>(t)].join();
  parked_all = true;
  for (std::size_t t = parkers; t < threads.size(); ++t) threads[t].join();
  for (const auto& count : counts) EXPECT_EQ(count.load(), 1);
}

}  // namespace
}  // namespace kvmem::test
