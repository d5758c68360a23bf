// The face of the runtime: events.
#include "fakes/state.hpp"

using namespace kvmem::fake;
namespace cuda = kvmem::cuda;

namespace kvmem::fake {

Error wait_for(State& state, ModelDevice& model, int device, EventHandle event, bool waits) {
  constexpr Nanoseconds nap = 1'000'000;
  for (;;) {
    state.look_at_bridges();
    const std::uint64_t seen = model.progress().value();
    switch (model.query(event)) {
      case EventState::done:
        return cuda::success;
      case EventState::failed:
        return cuda::invalid_value;
      case EventState::lost:
        return cuda::illegal_address;
      case EventState::pending:
        break;
    }
    if (!waits) return cuda::not_ready;
    bool own = false;
    {
      const State::Lock held = state.lock();
      own = state.devices[device].own != nullptr;
    }
    model.sleep(seen, nap, !own);  // one that runs freely keeps real time
    const State::Lock held = state.lock();
    static_cast<void>(state.model(device));
  }
}

}  // namespace kvmem::fake

namespace {

EventHandle handle(Event event) { return reinterpret_cast<EventHandle>(event); }

// Of an event that is to be looked at.
Error check_look(State& state, Call call, Event event, bool unsafe) {
  const EventEntry* const entry = state.find_event(call, handle(event));
  if (entry == nullptr) return cuda::invalid_resource_handle;
  if (entry->captured) {
    if (unsafe) state.note_look_at_captured(call, *entry->captured);
    return cuda::captured_event;
  }
  return unsafe ? state.refuse_unsafe(call) : cuda::success;
}

Error look_at(Call call, Event event, bool waits) {
  State& state = State::get();
  const int device = state.device_of(event);
  return run(call, device, [&] {
    kvmem::ModelDevice* model = nullptr;
    Before before;
    {
      const State::Lock held = state.lock();
      if (const Error error = check_look(state, call, event, true); error != cuda::success)
        return error;
      const EventEntry& entry = state.events.at(handle(event));
      before = entry.before;
      model = &state.model(entry.device);
    }
    const Error error = wait_for(state, *model, device, handle(event), waits);
    if (error != cuda::success && error != cuda::not_ready) return error;
    const State::Lock held = state.lock();
    const auto found = state.events.find(handle(event));
    if (found != state.events.end())
      (error == cuda::success ? found->second.seen_done : found->second.polled) = true;
    if (error == cuda::success) state.flights.observe(before);
    return error;
  });
}

// Of a record or a wait, with the lock. `drops`: it becomes part of a graph.
Error check_record(State& state, EventEntry& event, const StreamEntry& stream, bool& drops) {
  if (event.device != stream.device) {
    state.checker.report(Rule::foreign_record, "an event of device ", event.device,
                         " on a stream of device ", stream.device);
    return cuda::invalid_resource_handle;
  }
  if (event.polled && !event.seen_done)
    state.checker.report(Rule::re_record, "an event that was polled and not seen done");
  if (const Error error = state.refuse_captured(stream, drops); error != cuda::success)
    return error;
  if (drops) {
    event.captured = stream.capture;
    event.recorded = true;
    event.polled = event.seen_done = false;
  }
  return cuda::success;
}

Error check_wait(State& state, EventHandle handle, EventEntry& event, StreamEntry& stream,
                 bool& drops) {
  if (const Error error = state.refuse_captured(stream, drops); error != cuda::success)
    return error;
  if (event.captured != nullptr) {
    if (drops && event.captured != stream.capture) {
      stream.capture->invalidated = true;
      return cuda::stream_capture_isolation;
    }
    stream.capture = event.captured;  // joins
    stream.last_capture = event.captured;
    drops = true;
    return cuda::success;
  }
  if (drops) {
    stream.capture->invalidated = true;
    return cuda::stream_capture_isolation;
  }
  // A test may have recorded it at the model.
  if (!event.recorded && !state.model(event.device).was_recorded(handle))
    state.checker.report(Rule::wait_unrecorded, "a wait for an event never recorded");
  return cuda::success;
}

}  // namespace

KVMEM_FAKE_EXPORT Error cudaEventCreateWithFlags(Event* event, unsigned flags) {
  const int device = this_thread().device;
  return run(Call::cudaEventCreateWithFlags, device, [&] {
    if (event == nullptr || flags > 7) return cuda::invalid_value;
    State& state = State::get();
    const bool timing = (flags & cuda::event_disable_timing) == 0;
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      model = &state.model(device);
    }
    const EventHandle made = model->create_event(timing);
    try {
      const State::Lock held = state.lock();
      EventEntry& entry = state.events[made];
      entry = {};
      entry.device = device;
      entry.timing = timing;
    } catch (...) {
      model->destroy_event(made);
      throw;
    }
    *event = reinterpret_cast<Event>(made);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaEventDestroy(Event event) {
  return run(Call::cudaEventDestroy, State::get().device_of(event), [&] {
    State& state = State::get();
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      const EventEntry* const entry = state.find_event(Call::cudaEventDestroy, handle(event));
      if (entry == nullptr) return cuda::invalid_resource_handle;
      model = &state.model(entry->device);
      state.events.erase(handle(event));
    }
    model->destroy_event(handle(event));
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaEventRecord(Event event, Stream stream) {
  return run(Call::cudaEventRecord, State::get().device_of(event), [&] {
    State& state = State::get();
    const StreamHandle which = state.resolve(stream);
    kvmem::ModelDevice* model = nullptr;
    Before before;
    {
      const State::Lock held = state.lock();
      EventEntry* const to = state.find_event(Call::cudaEventRecord, handle(event));
      const StreamEntry* const on = state.find_stream(Call::cudaEventRecord, which);
      if (to == nullptr || on == nullptr) return cuda::invalid_resource_handle;
      bool drops = false;
      const Error error = check_record(state, *to, *on, drops);
      if (error != cuda::success || drops) return error;
      model = &state.model(to->device);
      before = state.before(*on);
    }
    model->record(handle(event), which);
    const State::Lock held = state.lock();
    const auto found = state.events.find(handle(event));
    if (found == state.events.end()) return cuda::success;
    EventEntry& entry = found->second;
    entry.captured.reset();
    entry.recorded = true;
    entry.polled = entry.seen_done = false;
    entry.before = std::move(before);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  return run(Call::cudaStreamWaitEvent, State::get().device_of(stream), [&] {
    if (flags > 1) return cuda::invalid_value;
    State& state = State::get();
    const StreamHandle which = state.resolve(stream);
    kvmem::ModelDevice *model = nullptr, *of_event = nullptr;
    {
      const State::Lock held = state.lock();
      EventEntry* const of = state.find_event(Call::cudaStreamWaitEvent, handle(event));
      StreamEntry* const on = state.find_stream(Call::cudaStreamWaitEvent, which);
      if (of == nullptr || on == nullptr) return cuda::invalid_resource_handle;
      bool drops = false;
      const Error error = check_wait(state, handle(event), *of, *on, drops);
      if (error != cuda::success || drops) return error;
      model = &state.model(on->device);
      of_event = &state.model(of->device);
      for (const auto& [other, batches] : of->before) {
        std::uint64_t& known = on->before[other];
        known = std::max(known, batches);
      }
      state.flights.prune(on->before);
    }
    if (of_event == model)
      model->wait(which, handle(event));
    else
      state.bridge(*of_event, handle(event), *model, which);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaEventQuery(Event event) {
  return look_at(Call::cudaEventQuery, event, false);
}

KVMEM_FAKE_EXPORT Error cudaEventSynchronize(Event event) {
  return look_at(Call::cudaEventSynchronize, event, true);
}

KVMEM_FAKE_EXPORT Error cudaEventElapsedTime(float* milliseconds, Event from, Event to) {
  return run(Call::cudaEventElapsedTime, State::get().device_of(from), [&] {
    State& state = State::get();
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      for (const Event event : {from, to}) {
        const Error error = check_look(state, Call::cudaEventElapsedTime, event, false);
        if (error != cuda::success) return error;
        const EventEntry& entry = state.events.at(handle(event));
        model = &state.model(entry.device);
        const bool recorded = entry.recorded || model->was_recorded(handle(event));
        if (!entry.timing.value_or(true) || !recorded) return cuda::invalid_resource_handle;
      }
      if (state.events.at(handle(from)).device != state.events.at(handle(to)).device)
        return cuda::invalid_resource_handle;
    }
    try {
      const kvmem::Nanoseconds first = model->event_time(handle(from));
      const kvmem::Nanoseconds last = model->event_time(handle(to));
      *milliseconds = static_cast<float>(static_cast<double>(last - first) * 1e-6);
    } catch (const kvmem::InvalidArgument&) {  // the rest was looked at
      return cuda::not_ready;
    }
    return cuda::success;
  });
}
