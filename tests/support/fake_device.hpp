// A device that only pins: it remembers what is pinned, and can refuse the k-th pin. Everything
// else throws.
#pragma once

#include <algorithm>
#include <cstddef>
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

  void refuse_pin(std::size_t kth) { refused_pin_ = kth; }  // counted from 1
  [[nodiscard]] std::vector<Range> pinned() const {
    const std::lock_guard lock(mutex_);
    return pinned_;
  }
  [[nodiscard]] std::size_t pin_calls() const { return pin_calls_; }
  [[nodiscard]] std::size_t wrong_unpins() const { return wrong_unpins_; }

  const DeviceInfo& info() const noexcept override { return info_; }
  Nanoseconds now() const noexcept override { return 0; }

  void pin(void* base, std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (++pin_calls_ == refused_pin_) throw CapacityError("pinning failed", {.bound = "fake pins"});
    pinned_.push_back({static_cast<std::byte*>(base), bytes});
  }
  void unpin(void* base, std::size_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(pinned_, Range{static_cast<std::byte*>(base), bytes});
    if (found == pinned_.end())
      ++wrong_unpins_;
    else
      pinned_.erase(found);
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
  template <class Result>
  static Result refuse() {
    throw Error("the fake device only pins");
  }

  DeviceInfo info_;
  mutable std::mutex mutex_;
  std::vector<Range> pinned_;
  std::size_t refused_pin_ = 0;
  std::size_t pin_calls_ = 0;
  std::size_t wrong_unpins_ = 0;
};

}  // namespace kvmem::test
