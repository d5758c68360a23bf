// The face of the runtime: streams and their captures.
#include <chrono>
#include <thread>

#include "fakes/state.hpp"

using namespace kvmem::fake;
namespace cuda = kvmem::cuda;

namespace {

constexpr Error capture_invalidated = 901;
constexpr Error illegal_state = 401;

StreamHandle handle(Stream stream) { return reinterpret_cast<StreamHandle>(stream); }

// Has all that the stream holds ended? By an event of its own, for the model has no such call.
// Returns what cudaStreamQuery would.
Error look_at(State& state, StreamHandle stream, int device, bool waits) {
  kvmem::ModelDevice* model = nullptr;
  Before before;
  {
    const State::Lock held = state.lock();
    model = &state.model(device);
    before = state.before(state.streams.at(stream));
  }
  const EventHandle event = model->create_event(false);
  Error error = cuda::success;
  try {
    model->record(event, stream);
    error = wait_for(state, *model, device, event, waits);
  } catch (...) {
    model->destroy_event(event);
    throw;
  }
  model->destroy_event(event);
  if (error != cuda::success) return error;
  const State::Lock held = state.lock();
  state.flights.observe(before);
  return error;
}

Error look_at(Call call, Stream stream, bool waits) {
  return run(call, State::get().device_of(stream), [&] {
    State& state = State::get();
    const StreamHandle which = state.resolve(stream);
    int device = 0;
    {
      const State::Lock held = state.lock();
      const StreamEntry* const entry = state.find_stream(call, which);
      if (entry == nullptr) return cuda::invalid_resource_handle;
      if (const Error error = state.refuse_unsafe(call); error != cuda::success) return error;
      if (entry->capture) {
        entry->capture->invalidated = true;
        return cuda::stream_capture_unsupported;
      }
      device = entry->device;
    }
    return look_at(state, which, device, waits);
  });
}

}  // namespace

KVMEM_FAKE_EXPORT Error cudaStreamCreateWithFlags(Stream* stream, unsigned flags) {
  const int device = this_thread().device;
  return run(Call::cudaStreamCreateWithFlags, device, [&] {
    if (stream == nullptr || flags > 1) return cuda::invalid_value;
    State& state = State::get();
    kvmem::ModelDevice* model = nullptr;
    const bool blocking = (flags & cuda::stream_non_blocking) == 0;
    {
      const State::Lock held = state.lock();
      model = &state.model(device);
      if (blocking)
        state.checker.report(Rule::blocking_stream, "a stream that the legacy one waits for");
    }
    const StreamHandle made = model->create_stream();
    try {
      const State::Lock held = state.lock();
      StreamEntry& entry = state.streams[made];
      entry = {};
      entry.number = ++state.last_stream;
      entry.device = device;
      entry.blocking = blocking;
    } catch (...) {
      model->destroy_stream(made);
      throw;
    }
    *stream = reinterpret_cast<Stream>(made);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaStreamDestroy(Stream stream) {
  return run(Call::cudaStreamDestroy, State::get().device_of(stream), [&] {
    if (is_default(stream)) return cuda::invalid_resource_handle;
    State& state = State::get();
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      const StreamEntry* const entry = state.find_stream(Call::cudaStreamDestroy, handle(stream));
      if (entry == nullptr) return cuda::invalid_resource_handle;
      if (entry->capture) entry->capture->invalidated = true;
      model = &state.model(entry->device);
      state.streams.erase(handle(stream));
    }
    model->destroy_stream(handle(stream));
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaStreamGetId(Stream stream, unsigned long long* id) {
  return run(Call::cudaStreamGetId, State::get().device_of(stream), [&] {
    // So that ids of our own devices differ from those of attached ones.
    constexpr unsigned long long own = 1ULL << 40;
    State& state = State::get();
    const StreamHandle which = state.resolve(stream);
    kvmem::ModelDevice* model = nullptr;
    unsigned long long first = 0;
    {
      const State::Lock held = state.lock();
      const StreamEntry* const entry = state.find_stream(Call::cudaStreamGetId, which);
      if (entry == nullptr) return cuda::invalid_resource_handle;
      model = &state.model(entry->device);
      first = state.devices[entry->device].own ? own : 0;
    }
    *id = first + model->stream_id(which);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaStreamGetDevice(Stream stream, int* device) {
  return run(Call::cudaStreamGetDevice, State::get().device_of(stream), [&] {
    State& state = State::get();
    if (is_default(stream)) {
      *device = this_thread().device;
      return cuda::success;
    }
    const State::Lock held = state.lock();
    if (state.settings.driver < first_driver_of_12_8) return cuda::call_requires_newer_driver;
    const StreamEntry* const entry = state.find_stream(Call::cudaStreamGetDevice, handle(stream));
    if (entry == nullptr) return cuda::invalid_resource_handle;
    *device = entry->device;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaStreamQuery(Stream stream) {
  return look_at(Call::cudaStreamQuery, stream, false);
}

KVMEM_FAKE_EXPORT Error cudaStreamSynchronize(Stream stream) {
  return look_at(Call::cudaStreamSynchronize, stream, true);
}

// ---- captures ----

KVMEM_FAKE_EXPORT Error cudaStreamIsCapturing(Stream stream, cuda::CaptureStatus* status) {
  return run(Call::cudaStreamIsCapturing, State::get().device_of(stream), [&] {
    State& state = State::get();
    const State::Lock held = state.lock();
    *status = cuda::capture_none;
    if (is_default(stream)) {
      const int device = this_thread().device;
      if (is_legacy(stream) && state.legacy_conflict(device)) return cuda::stream_capture_implicit;
      return cuda::success;
    }
    const StreamEntry* const entry = state.find_stream(Call::cudaStreamIsCapturing, handle(stream));
    if (entry == nullptr) return cuda::invalid_resource_handle;
    if (entry->capture) *status = entry->capture->invalidated ? 2 : 1;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaStreamBeginCapture(Stream stream, cuda::CaptureMode mode) {
  return run(Call::cudaStreamBeginCapture, State::get().device_of(stream), [&] {
    if (mode < 0 || mode > cuda::capture_relaxed) return cuda::invalid_value;
    if (is_default(stream)) return cuda::stream_capture_unsupported;
    State& state = State::get();
    const State::Lock held = state.lock();
    StreamEntry* const entry = state.find_stream(Call::cudaStreamBeginCapture, handle(stream));
    if (entry == nullptr) return cuda::invalid_resource_handle;
    if (entry->capture) return illegal_state;
    entry->capture = std::make_shared<Capture>(Capture{mode, std::this_thread::get_id()});
    entry->last_capture = entry->capture;
    state.captures.push_back(entry->capture);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaStreamEndCapture(Stream stream, void** graph) {
  return run(Call::cudaStreamEndCapture, State::get().device_of(stream), [&] {
    static int a_graph;  // that nobody can launch
    State& state = State::get();
    const State::Lock held = state.lock();
    StreamEntry* const entry = state.find_stream(Call::cudaStreamEndCapture, handle(stream));
    if (entry == nullptr) return cuda::invalid_resource_handle;
    if (!entry->capture) return illegal_state;
    const std::shared_ptr<Capture> capture = entry->capture;
    if (capture->mode != cuda::capture_relaxed && capture->thread != std::this_thread::get_id())
      return cuda::stream_capture_wrong_thread;
    for (auto& [other, it] : state.streams) {
      if (it.capture == capture) it.capture.reset();
    }
    std::erase(state.captures, capture);
    if (graph != nullptr) *graph = capture->invalidated ? nullptr : &a_graph;
    return capture->invalidated ? capture_invalidated : cuda::success;
  });
}
