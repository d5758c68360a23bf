// What the devices that run the stream/event model themselves (host, virtual) have in common: the
// model behind one lock, and events that the CPU signals.
#pragma once

#include <mutex>

#include "base/process.hpp"
#include "device/device.hpp"
#include "device/model.hpp"

namespace kvmem {

// Calls that a device may refuse, for those that are told to.
enum class DeviceCall : std::uint8_t {
  allocate,
  pin,
  create_stream,
  stream_id,
  create_event,
  record,
  wait,
  query,
  recorded,  // only by a test's own device
  event_time,
  copy,
  any,  // whichever comes
};

class ModelDevice : public Device {
 public:
  [[nodiscard]] StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) noexcept override;
  [[nodiscard]] std::uint64_t stream_id(StreamHandle stream) override;

  [[nodiscard]] EventHandle create_event(bool timing) override;
  void destroy_event(EventHandle event) noexcept override;
  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  [[nodiscard]] EventState query(EventHandle event) noexcept override;
  [[nodiscard]] bool recorded(EventHandle event) const override;
  [[nodiscard]] Nanoseconds event_time(EventHandle event) override;

  // For CPU engines whose compute is no stream of ours, and for stalling a stream in tests: an
  // event that is pending until signal(). It cannot be recorded again before, and what waits for it
  // waits for ever if it is destroyed before. Both throw InvalidArgument for an event in the wrong
  // state.
  virtual void record_unsignalled(EventHandle event);
  virtual void signal(EventHandle event);

  // What is true: may a copy that is queued and has not ended still read or write there, or write?
  [[nodiscard]] virtual bool may_touch(const void* base, std::size_t bytes) const;
  [[nodiscard]] virtual bool may_write(const void* base, std::size_t bytes) const;
  // recorded(), which a test may count as a call.
  [[nodiscard]] virtual bool was_recorded(EventHandle event) const;

 protected:
  using Lock = std::unique_lock<std::mutex>;
  // A call that was let in, with the lock. It may be told to fail, before or after its effect.
  struct Entered {
    Lock lock;
    bool happens = true;
    bool fails = false;
    void end(const char* call) const;  // throws CopyFailed if it is to fail
  };

  struct Asked {
    DeviceCall call;
    StreamHandle stream = 0;  // where the call names one
    EventHandle event = 0;
  };

  explicit ModelDevice(const char* name) : name_(name) {}  // in messages

  // In a forked child the lock may be locked for ever: throws Forked there.
  [[nodiscard]] Lock lock() const;
  [[nodiscard]] virtual Entered enter(const Asked& asked);
  [[nodiscard]] virtual Nanoseconds now_with_lock() const { return now(); }
  // Streams may have been set free, with the lock or without.
  virtual void freed_with_lock() {}
  virtual void freed() {}

  const ProcessMark mark_;
  mutable std::mutex mutex_;
  StreamModel model_;

 private:
  const char* name_;
};

}  // namespace kvmem
