#include "device/stream.hpp"

namespace kvmem {

Event& Event::operator=(Event&& other) noexcept {
  if (this == &other) return *this;
  if (pool_) pool_->give_back(handle_, reusable());
  pool_ = std::move(other.pool_);
  handle_ = other.handle_;
  recorded_ = other.recorded_.load();
  records_ = other.records_.load();
  done_as_of_ = other.done_as_of_.load();
  return *this;
}

Event::~Event() {
  if (pool_) pool_->give_back(handle_, reusable());
}

void Event::record(StreamHandle stream) {
  ++records_;
  struct Ends {  // also where it throws: it may have been made
    std::atomic<std::uint32_t>& records;
    ~Ends() { ++records; }
  } const ends{records_};
  pool_->device().record(handle_, stream);
  recorded_ = true;
}

EventState Event::query() noexcept {
  const std::uint32_t records = records_;  // before the device is asked: it may answer for those
  if (done_as_of_ == records) return EventState::done;
  const EventState state = pool_->device().query(handle_);
  if (state == EventState::done) done_as_of_ = records;
  return state;
}

Nanoseconds Event::reached_at() const { return pool_->device().event_time(handle_); }

EventPool::~EventPool() {
  if (mark_.must_leak()) return;
  for (const EventHandle event : free_) device_->destroy_event(event);
}

Event EventPool::acquire() {
  mark_.expect_same_process("the device");  // the lock may be held for ever
  Event event;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      event.handle_ = free_.back();
      free_.pop_back();
    }
  }
  if (event.handle_ == 0) {
    {
      // Its way back, before there is anything to give back.
      const std::lock_guard lock(mutex_);
      if (alive_ + 1 > free_.capacity()) free_.reserve(2 * (alive_ + 1));
      ++alive_;
    }
    try {
      event.handle_ = device_->create_event(timing_);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      --alive_;
      throw;
    }
  }
  event.pool_ = shared_from_this();
  return event;
}

void EventPool::give_back(EventHandle event, bool reusable) noexcept {
  if (mark_.must_leak()) return;
  if (reusable) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  } else {
    device_->destroy_event(event);
    const std::lock_guard lock(mutex_);
    --alive_;
  }
}

}  // namespace kvmem
