#include "device/model_device.hpp"

#include "base/check.hpp"

namespace kvmem {

ModelDevice::Lock ModelDevice::lock() const {
  mark_.expect_same_process(name_);
  return Lock(mutex_);
}

ModelDevice::Entered ModelDevice::enter(const Asked&) { return {lock()}; }

void ModelDevice::Entered::end(const char* call) const {
  if (fails) throw CopyFailed(text(call, ": the device was told to fail"));
}

StreamHandle ModelDevice::create_stream() {
  const Entered entered = enter({DeviceCall::create_stream});
  entered.end("create_stream");
  return model_.create_stream();
}

void ModelDevice::destroy_stream(StreamHandle stream) noexcept {
  if (mark_.forked()) return;
  const Lock held(mutex_);
  try {
    model_.destroy_stream(stream);
  } catch (const InvalidArgument&) {
    KVMEM_INVARIANT(!"a stream is destroyed once");
  }
}

std::uint64_t ModelDevice::stream_id(StreamHandle stream) {
  const Entered entered = enter({DeviceCall::stream_id, stream});
  entered.end("stream_id");
  return model_.stream_id(stream);
}

EventHandle ModelDevice::create_event(bool timing) {
  const Entered entered = enter({DeviceCall::create_event});
  entered.end("create_event");
  return model_.create_event(timing);
}

void ModelDevice::destroy_event(EventHandle event) noexcept {
  if (mark_.forked()) return;
  const Lock held(mutex_);
  try {
    model_.destroy_event(event);
  } catch (const InvalidArgument&) {
    KVMEM_INVARIANT(!"an event is destroyed once");
  }
}

void ModelDevice::record(EventHandle event, StreamHandle stream) {
  bool reached = false;
  {
    const Entered entered = enter({DeviceCall::record, stream, event});
    if (entered.happens) reached = model_.record(event, stream, now_with_lock());
    entered.end("record");
  }
  if (reached) progress().bump_for_waiters();  // whoever parks behind it asks by itself
}

void ModelDevice::wait(StreamHandle stream, EventHandle event) {
  const Entered entered = enter({DeviceCall::wait, stream, event});
  if (entered.happens) model_.wait(stream, event);
  entered.end("wait");
}

EventState ModelDevice::query(EventHandle event) noexcept {
  if (mark_.forked()) return EventState::lost;
  try {
    const Entered entered = enter({DeviceCall::query, 0, event});
    if (entered.fails) return EventState::failed;
    return model_.done(event) ? EventState::done : EventState::pending;
  } catch (const DeviceLost&) {
    return EventState::lost;
  } catch (...) {
    return EventState::failed;
  }
}

bool ModelDevice::recorded(EventHandle event) const { return was_recorded(event); }

bool ModelDevice::was_recorded(EventHandle event) const {
  const Lock held = lock();
  return model_.recorded(event);
}

Nanoseconds ModelDevice::event_time(EventHandle event) {
  const Entered entered = enter({DeviceCall::event_time, 0, event});
  entered.end("event_time");
  return model_.reached_at(event);
}

void ModelDevice::record_unsignalled(EventHandle event) {
  const Lock held = lock();
  model_.record_unsignalled(event);
}

void ModelDevice::signal(EventHandle event) {
  {
    const Lock held = lock();
    model_.signal(event, now_with_lock());
    freed_with_lock();
  }
  progress().bump();
  freed();
}

bool ModelDevice::may_touch(const void* base, std::size_t bytes) const {
  const Lock held = lock();
  return model_.touches(base, bytes);
}

bool ModelDevice::may_write(const void* base, std::size_t bytes) const {
  const Lock held = lock();
  return model_.writes(base, bytes);
}

}  // namespace kvmem
