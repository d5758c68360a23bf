// A device that only pins: it remembers what is pinned, can refuse the k-th pin, and lets pins and
// unpins wait until its test lets them go. Its clock moves only with a pin. Everything else throws.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "device/device.hpp"

namespace kvmem::test {

class FakeDevice : public Device {
 public:
  struct Range {
    std::byte* base;
    std::size_t bytes;
    friend bool operator==(const Range&, const Range&) = default;
  };

  explicit FakeDevice(bool needs_pinned_host = false) {
    info_.kind = "fake";
    info_.name = "fake:0";
    info_.needs_pinned_host = needs_pinned_host;
  }

  [[nodiscard]] DeviceInfo& change_info() { return info_; }  // before anybody looks
  void pins_take(Nanoseconds time) { pin_time_ = time; }

  // From now on they wait, after they were counted.
  void fail_unpins() { unpins_fail_ = true; }
  void hold_pins() { pins_.hold(*this); }
  void hold_unpins() { unpins_.hold(*this); }
  void let_pins(std::size_t count) { pins_.let(*this, count); }  // so many more go
  void let_unpins(std::size_t count) { unpins_.let(*this, count); }

  void refuse_pin(std::size_t kth) { refused_pin_ = kth; }  // counted from 1
  [[nodiscard]] std::vector<Range> pinned() const {
    const std::lock_guard lock(mutex_);
    return pinned_;
  }
  [[nodiscard]] std::size_t pin_calls() const { return pin_calls_; }
  [[nodiscard]] std::size_t wrong_unpins() const { return wrong_unpins_; }
  [[nodiscard]] std::vector<std::thread::id> unpinned_by() const {
    const std::lock_guard lock(mutex_);
    return unpinned_by_;
  }

  const DeviceInfo& info() const noexcept override { return info_; }
  Nanoseconds now() const noexcept override { return clock_; }

  void pin(void* base, std::size_t bytes) override {
    std::unique_lock lock(mutex_);
    const bool refused = ++pin_calls_ == refused_pin_;
    pins_.wait(lock);
    clock_ += pin_time_;
    if (refused) throw CapacityError("pinning failed", {.bound = "fake pins"});
    pinned_.push_back({static_cast<std::byte*>(base), bytes});
  }
  bool unpin(void* base, std::size_t bytes) noexcept override {
    std::unique_lock lock(mutex_);
    unpins_.wait(lock);
    unpinned_by_.push_back(std::this_thread::get_id());
    const auto found = std::ranges::find(pinned_, Range{static_cast<std::byte*>(base), bytes});
    if (found == pinned_.end())
      ++wrong_unpins_;
    else if (!unpins_fail_)
      pinned_.erase(found);
    return !unpins_fail_;
  }

  void sleep(std::uint64_t seen, Nanoseconds at_most, bool) override {
    progress().sleep(seen, std::chrono::nanoseconds(at_most));
  }

  void* allocate(std::size_t) override { return refuse<void*>(); }
  void deallocate(void*, std::size_t) noexcept override {}
  StreamHandle create_stream() override { return refuse<StreamHandle>(); }
  void destroy_stream(StreamHandle) noexcept override {}
  std::uint64_t stream_id(StreamHandle) override { return refuse<std::uint64_t>(); }
  EventHandle create_event(bool) override { return refuse<EventHandle>(); }
  void destroy_event(EventHandle) noexcept override {}
  void record(EventHandle, StreamHandle) override { refuse<int>(); }
  void wait(StreamHandle, EventHandle) override { refuse<int>(); }
  EventState query(EventHandle) noexcept override { return EventState::lost; }
  bool recorded(EventHandle) const override { return refuse<bool>(); }
  Nanoseconds event_time(EventHandle) override { return refuse<Nanoseconds>(); }
  void copy(const CopyDescriptors&, Direction, SourceAccess, StreamHandle) override {
    refuse<int>();
  }

 private:
  struct Turnstile {
    std::size_t left = std::numeric_limits<std::size_t>::max();
    std::condition_variable moved = {};
    void hold(FakeDevice& device) {
      const std::lock_guard lock(device.mutex_);
      left = 0;
    }
    void let(FakeDevice& device, std::size_t count) {
      const std::lock_guard lock(device.mutex_);
      left += count;
      moved.notify_all();
    }
    void wait(std::unique_lock<std::mutex>& lock) {
      moved.wait(lock, [this] { return left > 0; });
      --left;
    }
  };

  template <class Result>
  static Result refuse() {
    throw Error("the fake device only pins");
  }

  DeviceInfo info_;
  mutable std::mutex mutex_;
  std::vector<Range> pinned_;
  std::vector<std::thread::id> unpinned_by_;
  std::atomic<bool> unpins_fail_{false};
  Turnstile pins_, unpins_;
  std::atomic<Nanoseconds> clock_ = 0, pin_time_ = 0;
  std::atomic<std::size_t> refused_pin_ = 0, pin_calls_ = 0, wrong_unpins_ = 0;
};

}  // namespace kvmem::test
