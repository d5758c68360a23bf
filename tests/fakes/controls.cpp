// The controls, as fake_cudart.h has them.
#pragma GCC visibility push(default)
#include "fakes/fake_cudart.h"
#pragma GCC visibility pop

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fakes/state.hpp"

using namespace kvmem::fake;

namespace {

[[nodiscard]] State& state() { return State::get(); }

// "*": of any, which is none.
std::optional<Call> call_named(const char* name) {
  if (std::strcmp(name, "*") == 0) return std::nullopt;
  const std::optional<Call> call = try_call_of(name);
  if (!call) {
    std::fprintf(stderr, "fake CUDA runtime: there is no function %s\n", name);
    std::abort();
  }
  return call;
}

std::uintptr_t address_of(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

}  // namespace

// ---- set-up ----

void kvmem_fake_reset() { state().reset(); }

void kvmem_fake_set_device_count(int count) {
  const State::Lock held = state().lock();
  state().settings.devices = count;
}

void kvmem_fake_set_driver_version(int version) {
  const State::Lock held = state().lock();
  state().settings.driver = version;
}

void kvmem_fake_set_count_error(int error) {
  const State::Lock held = state().lock();
  state().settings.count_error = error;
}

void kvmem_fake_set_attribute(int device, int attribute, int value) {
  const State::Lock held = state().lock();
  state().settings.attributes[{device, attribute}] = value;
}

void kvmem_fake_set_pci_bus_id(int device, const char* id) {
  const State::Lock held = state().lock();
  state().settings.pci_bus_ids[device] = id;
}

void kvmem_fake_attach(int device, void* model_device) {
  const State::Lock held = state().lock();
  if (state().devices[device].model != nullptr) {
    std::fprintf(stderr, "fake CUDA runtime: device %d is in use: attach before that\n", device);
    std::abort();
  }
  state().settings.attached[device] = static_cast<kvmem::ModelDevice*>(model_device);
}

void* kvmem_fake_model(int device) {
  const State::Lock held = state().lock();
  return &state().model(device);
}

void kvmem_fake_declare_device_memory(int device, const void* base, size_t bytes) {
  const State::Lock held = state().lock();
  state().memory.device.add({address_of(base), bytes, device, false, false});
}

void kvmem_fake_declare_staged(const void* base, size_t bytes) {
  const State::Lock held = state().lock();
  state().memory.staged.add({address_of(base), bytes, 0, false, false});
}

void kvmem_fake_forget_memory(const void* base) {
  const State::Lock held = state().lock();
  state().memory.device.remove(base);
  state().memory.staged.remove(base);
}

// ---- faults ----

void kvmem_fake_fail(const char* function, int nth, int times, int error, int happens) {
  const std::optional<Call> call = call_named(function);
  const State::Lock held = state().lock();
  state().faults.add(call, static_cast<std::uint64_t>(std::max(nth, 1)),
                     static_cast<std::uint64_t>(std::max(times, 1)), {error, happens != 0});
}

void kvmem_fake_lose(int device) { lose(state(), device, kvmem::cuda::illegal_address); }

void kvmem_fake_forget_faults() {
  const State::Lock held = state().lock();
  state().faults.forget();
}

unsigned long long kvmem_fake_calls(const char* function) {
  const std::optional<Call> call = call_named(function);
  const State::Lock held = state().lock();
  return state().faults.calls(call);
}

unsigned long long kvmem_fake_faults() {
  const State::Lock held = state().lock();
  return state().faults.come();
}

// ---- the checker ----

void kvmem_fake_enable(const char* rule, int enabled) {
  state().checker.enable(rule, enabled != 0);
}

void kvmem_fake_set_most_descriptors(size_t most) {
  const State::Lock held = state().lock();
  state().settings.most_descriptors = most;
}

void kvmem_fake_allow(unsigned long long devices) {
  const State::Lock held = state().lock();
  state().settings.allowed = devices;
}

void kvmem_fake_enter() {
  Thread& thread = this_thread();
  if (thread.depth == Thread::most_entered) std::abort();
  thread.entered[thread.depth++] = {thread.last_error, thread.device, thread.mode};
}

void kvmem_fake_leave() {
  Thread& thread = this_thread();
  if (thread.depth == 0) return;  // a reset came between
  const Thread::Entered before = thread.entered[--thread.depth];
  Checker& checker = state().checker;
  {
    const State::Lock held = state().lock();
    state().look_at_registrations();
  }
  // One that is sticky stays for everybody, whoever met it first.
  if (thread.last_error != before.last_error && !is_sticky(thread.last_error)) {
    checker.report(Rule::last_error, "it was ", before.last_error, " before the call and is ",
                   thread.last_error, " behind it");
  }
  if (thread.device != before.device) {
    checker.report(Rule::current_device, "it was ", before.device, " before the call and is ",
                   thread.device, " behind it");
  }
  if (thread.mode != before.mode) {
    checker.report(Rule::current_device, "the capture mode was ", before.mode,
                   " before the call and is ", thread.mode, " behind it");
  }
}

size_t kvmem_fake_violations() { return state().checker.count(); }

const char* kvmem_fake_violation(size_t i) { return state().checker.violation(i); }

void kvmem_fake_forget_violations() { state().checker.forget(); }

// ---- captures ----

int kvmem_fake_capture_invalidated(void* stream) {
  const State::Lock held = state().lock();
  const auto found = state().streams.find(reinterpret_cast<kvmem::StreamHandle>(stream));
  if (found == state().streams.end() || !found->second.last_capture) return 0;
  return found->second.last_capture->invalidated ? 1 : 0;
}

// ---- what there is ----

size_t kvmem_fake_live_streams(int device) {
  const State::Lock held = state().lock();
  return static_cast<size_t>(std::ranges::count_if(state().streams, [&](const auto& entry) {
    return entry.second.device == device && !entry.second.is_default;
  }));
}

size_t kvmem_fake_live_events(int device) {
  const State::Lock held = state().lock();
  return static_cast<size_t>(std::ranges::count_if(state().events, [&](const auto& entry) {
    return entry.second.device == device && entry.second.timing.has_value();
  }));
}

size_t kvmem_fake_registered_bytes() {
  const State::Lock held = state().lock();
  return state().memory.pinned.bytes([](const Region& region) { return !region.ours; });
}

size_t kvmem_fake_allocated_bytes(int device) {
  const State::Lock held = state().lock();
  return state().memory.device.bytes(
      [&](const Region& region) { return region.ours && region.device == device; });
}

int kvmem_fake_has_context(int device) {
  const State::Lock held = state().lock();
  const auto found = state().devices.find(device);
  return found != state().devices.end() && found->second.has_context ? 1 : 0;
}
