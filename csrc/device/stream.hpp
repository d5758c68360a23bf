// Owning streams and events. Both know their device; neither blocks when destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/process.hpp"
#include "device/device.hpp"

namespace kvmem {

class Stream {  // move-only
 public:
  explicit Stream(std::shared_ptr<Device> device) : Stream(device, device->create_stream()) {
    id_ = device_->stream_id(handle_);  // where that throws, the destructor gives the stream back
  }
  Stream(Stream&& other) noexcept
      : device_(std::move(other.device_)),
        handle_(other.handle_),
        id_(other.id_),
        mark_(other.mark_) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() {
    if (device_ && !mark_.must_leak()) device_->destroy_stream(handle_);
  }

  [[nodiscard]] StreamHandle handle() const noexcept { return handle_; }
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }

 private:
  Stream(std::shared_ptr<Device> device, StreamHandle handle) noexcept
      : device_(std::move(device)), handle_(handle) {}

  std::shared_ptr<Device> device_;
  StreamHandle handle_;
  std::uint64_t id_ = 0;
  ProcessMark mark_;
};

class EventPool;

// One owner from acquire to observed completion. It goes back to its pool only if it was observed
// done or never recorded: re-recording an event that somebody may still wait on would move the
// wait. Moving and destroying are for one thread alone; record() and query() for any. A query that
// meets a record answers for that or for the one before.
class Event {  // move-only
 public:
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept;
  ~Event();

  explicit operator bool() const noexcept { return pool_ != nullptr; }
  [[nodiscard]] EventHandle handle() const noexcept { return handle_; }

  void record(StreamHandle stream);  // throws what Device::record throws; then the event still
                                     // counts as not recorded
  [[nodiscard]] bool recorded() const noexcept { return recorded_; }
  void mark_recorded() noexcept { recorded_ = true; }  // its record was made at the device itself
  [[nodiscard]] EventState query() noexcept;  // never asks the device again once it has said done
  [[nodiscard]] Nanoseconds reached_at() const;  // of a timing event that is done

 private:
  friend class EventPool;
  [[nodiscard]] bool reusable() const noexcept { return done_as_of_ == records_ || !recorded_; }

  std::shared_ptr<EventPool> pool_;
  EventHandle handle_ = 0;
  std::atomic<bool> recorded_{
      false};  // atomic: a guard, a later transfer and a wait_on may share one event
  // Goes on when a record begins, and when it ends: what a query learns is good while it stands.
  std::atomic<std::uint32_t> records_{1};
  std::atomic<std::uint32_t> done_as_of_{0};  // what it was when the last record was seen done
};

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(std::shared_ptr<Device> device, bool timing)
      : device_(std::move(device)), timing_(timing) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  [[nodiscard]] Event acquire();
  [[nodiscard]] Device& device() const noexcept { return *device_; }
  [[nodiscard]] const std::shared_ptr<Device>& device_ptr() const noexcept { return device_; }
  [[nodiscard]] bool timing() const noexcept { return timing_; }

 private:
  friend class Event;
  void give_back(EventHandle event, bool reusable) noexcept;

  std::shared_ptr<Device> device_;
  const bool timing_;
  ProcessMark mark_;
  std::mutex mutex_;
  // Has room for every event alive, so that give_back never allocates.
  std::vector<EventHandle> free_;
  std::size_t alive_ = 0;
};

}  // namespace kvmem
