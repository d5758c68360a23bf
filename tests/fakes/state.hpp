// All that the fake knows, and the frame around every call of it.
//
// A call is counted, fails if that is planned, is checked, and is at most one call of the model
// with the same meaning. The state is never destroyed: calls may come until the process has ended.
// Its lock is not held across a call of the model that somebody may have told to do something.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/cuda/cuda_abi.hpp"
#include "fakes/calls.hpp"
#include "fakes/checker.hpp"
#include "fakes/flights.hpp"
#include "fakes/free_running.hpp"
#include "fakes/memory.hpp"

#define KVMEM_FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvmem::fake {

using cuda::Event;
using cuda::Stream;
using kvmem::EventHandle;
using kvmem::StreamHandle;

inline constexpr int version = KVMEM_FAKE_CUDART;
inline constexpr int major = version / 1000;
inline constexpr int first_driver_of_12_8 = 12080;  // an older one lacks two functions

struct Settings {
  int devices = 1;
  int driver = version;
  Error count_error = cuda::success;
  std::map<std::pair<int, int>, int> attributes;  // device, attribute
  std::map<int, std::string> pci_bus_ids;
  std::map<int, ModelDevice*> attached;
  std::size_t most_descriptors = std::size_t(-1);
  std::optional<unsigned long long> allowed;  // devices, a bit each
};

struct Capture {
  cuda::CaptureMode mode;
  std::thread::id thread;  // that began it
  bool invalidated = false;
};

struct StreamEntry {
  std::uint64_t number = 0;  // never comes again
  int device = 0;
  bool blocking = false;    // the legacy default stream waits for it
  bool is_default = false;  // legacy, or of the thread
  std::uint64_t batches = 0;
  Before before;  // batches of other streams that this one waited for
  std::shared_ptr<Capture> capture, last_capture;
};

struct EventEntry {
  int device = 0;
  std::optional<bool> timing;  // absent: not made here
  bool recorded = false;
  // Since the latest record. Two threads may ask at once, and the one that was told first be late.
  bool polled = false, seen_done = false;
  std::shared_ptr<Capture> captured;
  Before before;  // of the latest record
};

struct FakeDevice {
  ModelDevice* model = nullptr;  // null: not needed so far
  std::unique_ptr<FreeRunning> own;
  bool has_context = false;
  Error lost_by = cuda::success;
  StreamHandle default_streams[2] =
      {};  // the legacy one, that of the threads; 0: not needed so far
};

struct Thread {
  std::uint64_t generation = 0;  // of the state
  Error last_error = cuda::success;
  int device = 0;
  bool was_told = false;      // its device
  bool left_default = false;  // device 0, which it had without having been told
  bool made_context = false;  // there without having been told, by a call that does not say why
  cuda::CaptureMode mode = cuda::capture_global;

  struct Entered {
    Error last_error;
    int device;
    cuda::CaptureMode mode;
  };
  static constexpr std::size_t most_entered = 32;
  Entered entered[most_entered] = {};
  std::size_t depth = 0;
};

// A wait for an event of another device.
struct Bridge {
  ModelDevice* from;
  EventHandle reached;  // the event, as it was recorded then
  ModelDevice* to;
  EventHandle gate;  // that the stream waits for
};

struct State {
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] static State& get();
  [[nodiscard]] Lock lock() { return Lock(mutex); }
  void reset();

  std::mutex mutex;  // guards what follows
  Settings settings;
  Faults faults;
  Memory memory;
  Checker checker;  // has a lock of its own
  Flights flights{checker};
  std::map<int, FakeDevice> devices;
  std::unordered_map<StreamHandle, StreamEntry> streams;
  std::unordered_map<EventHandle, EventEntry> events;
  std::vector<std::shared_ptr<Capture>> captures;  // going on
  std::vector<Bridge> bridges;
  std::uint64_t last_stream = 0;

  std::atomic<std::uint64_t> generation{1};
  std::atomic<bool> exiting{false};
  std::atomic<bool> forked{false};  // from a process that used a device

  // ---- with the lock ----
  // The model, made if need be. Moves the clock of one that runs freely.
  [[nodiscard]] ModelDevice& model(int device);
  void make_context(int device);
  // What a call does besides, that is about that device.
  void make_context(Call call, int device);
  // The thread shows which device it means. Where it has made a context on another that it was
  // never told to use, nobody asked for that one.
  void expect_meant(int device);
  void look_at_registrations();
  [[nodiscard]] Error unusable() const noexcept;  // why no device is
  // Null, and then reported.
  [[nodiscard]] StreamEntry* find_stream(Call call, StreamHandle stream);
  [[nodiscard]] EventEntry* find_event(Call call, EventHandle event);
  // What has an event of this stream behind it.
  [[nodiscard]] Before before(const StreamEntry& stream) const;
  // May a copy of any device touch it?
  [[nodiscard]] bool in_flight(const void* base, std::size_t bytes);

  // ---- captures, with the lock; success: go on ----
  [[nodiscard]] Error refuse_unsafe(Call call);
  // The same for a look at what was recorded in a capture.
  void note_look_at_captured(Call call, Capture& capture);
  // Of work for that stream; captured: it becomes part of the graph, and is dropped.
  [[nodiscard]] Error refuse_captured(const StreamEntry& stream, bool& captured);
  // Does a stream capture that waits for the legacy default stream?
  [[nodiscard]] bool legacy_conflict(int device) const;

  // ---- without the lock ----
  // The stream behind a handle: default streams have one of the model's for each device.
  [[nodiscard]] StreamHandle resolve(Stream stream);
  [[nodiscard]] int device_of(Stream stream);
  [[nodiscard]] int device_of(Event event);
  [[nodiscard]] int device_of(const void* memory);  // that begins there
  void bridge(ModelDevice& from, EventHandle event, ModelDevice& to, StreamHandle stream);
  void look_at_bridges();
  void wake(int device) noexcept;
};

[[nodiscard]] Thread& this_thread();
[[nodiscard]] bool is_sticky(Error error) noexcept;
[[nodiscard]] inline EventHandle handle_of(Event event) {
  return reinterpret_cast<EventHandle>(event);
}
[[nodiscard]] inline bool is_legacy(Stream stream) {
  return reinterpret_cast<StreamHandle>(stream) <= 1;
}
[[nodiscard]] inline bool is_default(Stream stream) {
  return reinterpret_cast<StreamHandle>(stream) <= 2;
}

// What the model says of an event; with `waits`, once it is no longer pending.
[[nodiscard]] Error wait_for(State& state, ModelDevice& model, int device, EventHandle event,
                             bool waits);

// ---- the frame ----

void lose(State& state, int device, Error error);  // from now on each call answers that

struct Work {
  Error (*run)(void* it);
  void* it;
};
// `device` is the one that the call is about; `reached`, where it is asked for: the call got as far
// as its work.
Error run_call(Call call, int device, const Work& work, bool* reached = nullptr) noexcept;

template <class Body>
Error run(Call call, int device, Body&& body, bool* reached = nullptr) noexcept {
  return run_call(
      call, device,
      {[](void* it) { return (*static_cast<std::remove_reference_t<Body>*>(it))(); }, &body},
      reached);
}

}  // namespace kvmem::fake
