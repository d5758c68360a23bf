#include "fakes/state.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>

namespace kvmem::fake {

namespace {

int number_from(const char* variable, int otherwise) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? std::atoi(value) : otherwise;
}

Settings settings_of_environment() {
  Settings settings;
  settings.devices = number_from("KVMEM_FAKE_DEVICES", settings.devices);
  settings.driver = number_from("KVMEM_FAKE_DRIVER", settings.driver);
  settings.count_error = number_from("KVMEM_FAKE_COUNT_ERROR", settings.count_error);
  return settings;
}

const Settings& first_settings() {
  static const auto& first = *new Settings(settings_of_environment());
  return first;
}

// All of it; also where it may not be read. Nothing is written back: of all calls that tell, this
// one is the quickest.
bool is_mapped(std::uintptr_t base, std::size_t bytes) {
  const std::uintptr_t first = base / slot_alignment_bytes * slot_alignment_bytes;
  return msync(reinterpret_cast<void*>(first), base + bytes - first, MS_ASYNC) == 0 ||
         errno != ENOMEM;
}

// The exit has begun when handlers registered before this library was loaded are still to come.
void note_exit() { State::get().exiting = true; }

void before_fork() { State::get().mutex.lock(); }
void after_fork_in_parent() { State::get().mutex.unlock(); }
void after_fork_in_child() {
  State& state = State::get();
  state.forked = state.forked || std::ranges::any_of(state.devices, [](const auto& entry) {
                   return entry.second.has_context || entry.second.model != nullptr;
                 });
  state.mutex.unlock();
}

[[gnu::constructor]] void at_load() {
  State& state = State::get();
  state.settings = first_settings();
  if (number_from("KVMEM_FAKE_STRICT", 0) != 0) state.checker.make_strict();
  static_cast<void>(std::atexit(note_exit));
  static_cast<void>(pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child));
}

}  // namespace

State& State::get() {
  static auto& state = *new State;
  return state;
}

void State::reset() {
  std::map<int, FakeDevice> gone;
  {
    const Lock held = lock();
    gone.swap(devices);
    flights.forget();
    settings = first_settings();
    faults = {};
    memory.clear();
    checker.reset();
    streams.clear();
    events.clear();
    captures.clear();
    bridges.clear();
    ++generation;
    // In a forked child the threads of devices that run freely are not there to be stopped.
    if (forked.exchange(false)) static_cast<void>(new auto(std::move(gone)));
  }
}  // devices that run freely stop here

ModelDevice& State::model(int device) {
  FakeDevice& it = devices[device];
  if (it.model == nullptr) {
    const auto attached = settings.attached.find(device);
    if (attached != settings.attached.end()) {
      it.model = attached->second;
    } else {
      it.own = std::make_unique<FreeRunning>();
      it.model = &it.own->device();
    }
  }
  if (it.own) it.own->catch_up();
  return *it.model;
}

void State::make_context(int device) {
  FakeDevice& it = devices[device];
  if (it.has_context) return;
  it.has_context = true;
  if (settings.allowed && (*settings.allowed >> device & 1) == 0)
    checker.report(Rule::foreign_context, "on device ", device, ", which is not to be used");
}

void State::make_context(Call call, int device) {
  const CallFacts& facts = facts_of(call);
  Thread& thread = this_thread();
  if (facts.context == Context::yes && !devices[thread.device].has_context) {
    make_context(thread.device);
    thread.made_context = !thread.was_told;
  }
  if (facts.needs == Needs::device) expect_meant(device);
}

void State::expect_meant(int device) {
  Thread& thread = this_thread();
  if (!std::exchange(thread.made_context, false) || device == thread.device) return;
  checker.report(Rule::foreign_context, "on device ", thread.device,
                 ", which the thread had because it was never told: it means device ", device);
}

void State::look_at_registrations() {
  Region* const region = memory.pinned.next();
  if (region == nullptr || region->gone) return;
  region->gone = !is_mapped(region->base, region->bytes);
  if (!region->gone) return;
  checker.report(Rule::unmapped_registered, region->bytes, " bytes at ",
                 reinterpret_cast<const void*>(region->base),
                 " were unmapped while they were registered");
}

Error State::unusable() const noexcept {
  if (settings.driver < major * 1000) return cuda::insufficient_driver;
  if (settings.count_error != cuda::success) return settings.count_error;
  return settings.devices > 0 ? cuda::success : cuda::no_device_found;
}

StreamEntry* State::find_stream(Call call, StreamHandle stream) {
  const auto found = streams.find(stream);
  if (found != streams.end()) return &found->second;
  checker.report(Rule::unknown_handle, facts_of(call).name, ": stream ", stream);
  return nullptr;
}

EventEntry* State::find_event(Call call, EventHandle event) {
  const auto found = events.find(event);
  if (found != events.end()) return &found->second;
  for (const auto& [device, it] : devices) {
    if (it.model == nullptr) continue;
    try {  // one that a test made at the model
      static_cast<void>(it.model->was_recorded(event));
    } catch (const InvalidArgument&) {
      continue;
    }
    EventEntry& entry = events[event];
    entry.device = device;
    return &entry;
  }
  checker.report(Rule::unknown_handle, facts_of(call).name, ": event ", event);
  return nullptr;
}

Before State::before(const StreamEntry& stream) const {
  Before before = stream.before;
  before[stream.number] = stream.batches;
  flights.prune(before);
  return before;
}

bool State::in_flight(const void* base, std::size_t bytes) {
  return std::ranges::any_of(devices, [&](auto& entry) {
    FakeDevice& it = entry.second;
    if (it.own) it.own->catch_up();
    return it.model != nullptr && it.model->may_touch(base, bytes);
  });
}

StreamHandle State::resolve(Stream stream) {
  if (!is_default(stream)) return reinterpret_cast<StreamHandle>(stream);
  const std::size_t which = is_legacy(stream) ? 0 : 1;
  const int device = this_thread().device;
  ModelDevice* it = nullptr;
  {
    const Lock held = lock();
    if (const StreamHandle made = devices[device].default_streams[which]) return made;
    it = &model(device);
  }
  const StreamHandle made = it->create_stream();
  const Lock held = lock();
  StreamHandle& place = devices[device].default_streams[which];
  if (place != 0) {
    it->destroy_stream(made);
    return place;
  }
  StreamEntry& entry = streams[made];
  entry = {};
  entry.number = ++last_stream;
  entry.device = device;
  entry.is_default = true;
  return place = made;
}

int State::device_of(Stream stream) {
  const int current = this_thread().device;
  const Lock held = lock();
  const auto found = streams.find(reinterpret_cast<StreamHandle>(stream));
  return found != streams.end() ? found->second.device : current;
}

int State::device_of(Event event) {
  const int current = this_thread().device;
  const Lock held = lock();
  const auto found = events.find(handle_of(event));
  return found != events.end() ? found->second.device : current;
}

int State::device_of(const void* base) {
  const int current = this_thread().device;
  const Lock held = lock();
  for (const Regions* const regions : {&memory.pinned, &memory.device}) {
    if (const Region* const region = regions->at(base)) return region->device;
  }
  return current;
}

void State::wake(int device) noexcept {
  const Lock held = lock();
  const auto found = devices.find(device);
  if (found != devices.end() && found->second.own) found->second.own->wake();
}

Thread& this_thread() {
  thread_local Thread thread;
  const std::uint64_t generation = State::get().generation.load();
  if (thread.generation != generation) {
    thread = {};
    thread.generation = generation;
  }
  return thread;
}

bool is_sticky(Error error) noexcept {
  constexpr Error sticky[] = {
      cuda::cudart_unloading,     cuda::ecc_uncorrectable,
      cuda::nvlink_uncorrectable, cuda::contained,
      cuda::illegal_address,      cuda::launch_timeout,
      cuda::context_is_destroyed, cuda::device_assert,
      cuda::hardware_stack_error, cuda::illegal_instruction,
      cuda::misaligned_address,   cuda::invalid_address_space,
      cuda::invalid_pc,           cuda::launch_failure,
      cuda::tensor_memory_leak,   cuda::mps_client_terminated,
      cuda::external_device,      cuda::unknown,
  };
  return std::ranges::find(sticky, error) != std::end(sticky);
}

}  // namespace kvmem::fake
