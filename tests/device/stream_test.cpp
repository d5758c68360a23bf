#include "device/stream.hpp"

#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/host_device.hpp"

namespace kvmem {
namespace {

class EventPoolTest : public ::testing::Test {
 protected:
  // An event that the pool hands out again still has its last record; a new one has none.
  bool is_reused(const Event& event) { return device_->recorded(event.handle()); }

  void stall(const Stream& stream) {
    stall_ = device_->create_event(false);
    device_->record_unsignalled(stall_);
    device_->wait(stream.handle(), stall_);
  }

  std::shared_ptr<ModelDevice> device_ = make_host_device({.no_workers = true});
  std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>(device_, false);
  Stream stream_{device_};
  EventHandle stall_ = 0;
};

TEST_F(EventPoolTest, AnEventThatWasObservedDoneIsReused) {
  {
    Event event = pool_->acquire();
    event.record(stream_.handle());
    EXPECT_EQ(event.query(), EventState::done);
  }
  EXPECT_TRUE(is_reused(pool_->acquire()));
}

TEST_F(EventPoolTest, AReusedEventStartsAsNotRecorded) {
  {
    Event event = pool_->acquire();
    event.record(stream_.handle());
    static_cast<void>(event.query());
  }
  Event again = pool_->acquire();
  EXPECT_FALSE(again.recorded());
  stall(stream_);
  again.record(stream_.handle());
  EXPECT_TRUE(again.recorded());
  EXPECT_EQ(again.query(), EventState::pending);
}

TEST_F(EventPoolTest, AnEventThatIsDoneButWasNotObservedIsDestroyed) {
  pool_->acquire().record(stream_.handle());
  EXPECT_FALSE(is_reused(pool_->acquire()));
}

TEST_F(EventPoolTest, APendingEventIsDestroyedAndItsWaitersStillWait) {
  Stream waiting(device_);
  stall(stream_);
  {
    Event event = pool_->acquire();
    event.record(stream_.handle());
    device_->wait(waiting.handle(), event.handle());
    EXPECT_EQ(event.query(), EventState::pending);
  }
  Event behind = pool_->acquire();
  EXPECT_FALSE(is_reused(behind));
  behind.record(waiting.handle());
  EXPECT_EQ(behind.query(), EventState::pending);
  device_->signal(stall_);
  EXPECT_EQ(behind.query(), EventState::done);
}

TEST_F(EventPoolTest, AnEventThatWasNeverRecordedIsReused) {
  EventHandle first = 0;
  {
    const Event event = pool_->acquire();
    first = event.handle();
  }
  const Event event = pool_->acquire();
  EXPECT_EQ(event.handle(), first);
  EXPECT_NE(pool_->acquire().handle(), first);
}

TEST_F(EventPoolTest, AnEventWhoseRecordWasRefusedCountsAsNotRecorded) {
  Event event = pool_->acquire();
  EXPECT_THROW(event.record(12345), InvalidArgument);
  EXPECT_FALSE(event.recorded());
}

TEST_F(EventPoolTest, AMovedEventTakesItsStateAlong) {
  stall(stream_);
  Event event = pool_->acquire();
  event.record(stream_.handle());
  const EventHandle handle = event.handle();
  Event moved = std::move(event);
  EXPECT_FALSE(event);  // NOLINT: the state after a move is part of the promise
  EXPECT_TRUE(moved.recorded());
  EXPECT_EQ(moved.handle(), handle);
  EXPECT_EQ(moved.query(), EventState::pending);
  moved = pool_->acquire();
  EXPECT_FALSE(moved.recorded());
  device_->signal(stall_);
}

TEST_F(EventPoolTest, AnEventKeepsItsPoolAlive) {
  Event event = pool_->acquire();
  pool_.reset();
  event.record(stream_.handle());
  EXPECT_EQ(event.query(), EventState::done);
}

TEST_F(EventPoolTest, ThreadsMayAcquireAndGiveBackAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const Stream own(device_);
      for (int round = 0; round < 200; ++round) {
        Event first = pool_->acquire(), second = pool_->acquire();
        ASSERT_NE(first.handle(), second.handle());
        first.record(own.handle());
        ASSERT_EQ(first.query(), EventState::done);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(EventPoolTest, AStreamDestroysItselfButNotWhatItHolds) {
  Event event = pool_->acquire();
  StreamHandle handle = 0;
  {
    const Stream brief(device_);
    handle = brief.handle();
    EXPECT_EQ(device_->stream_id(handle), brief.id());
    stall(brief);
    event.record(handle);
  }
  EXPECT_THROW(static_cast<void>(device_->stream_id(handle)), InvalidArgument);
  EXPECT_EQ(event.query(), EventState::pending);
  device_->signal(stall_);
  EXPECT_EQ(event.query(), EventState::done);
}

TEST_F(EventPoolTest, AMovedStreamIsDestroyedOnce) {
  Stream first(device_);
  const Stream second = std::move(first);
  EXPECT_EQ(device_->stream_id(second.handle()), second.id());
}

}  // namespace
}  // namespace kvmem
