// The face of the runtime: memory of the device, and host memory that the device may reach.
#include <chrono>
#include <cstring>
#include <thread>

#include "device/host_memory.hpp"
#include "fakes/state.hpp"

using namespace kvmem::fake;
namespace cuda = kvmem::cuda;

namespace {

constexpr std::size_t largest_registration_bytes = std::size_t{512} << 30;
constexpr unsigned io_memory_flag = 4;

std::uintptr_t address_of(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

std::size_t whole_pages(std::size_t bytes) {
  return kvmem::round_up(bytes, kvmem::slot_alignment_bytes);
}

// Memory is not given back under a copy: a real cudaFree waits, and so does this one where copies
// end by themselves. Where a test ends them nobody might, so it is leaked. Answers whether it may
// go.
bool wait_for_copies(State& state, Call call, const Region& region) {
  const auto* const base = reinterpret_cast<const void*>(region.base);
  {
    const State::Lock held = state.lock();
    if (!state.in_flight(base, region.bytes)) return true;
    state.checker.report(Rule::freed_in_flight, facts_of(call).name, " of ", region.bytes,
                         " bytes at ", base, " under a copy");
    if (!state.devices[region.device].own) return false;
  }
  for (int naps = 0; naps < 10'000; ++naps) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const State::Lock held = state.lock();
    if (!state.in_flight(base, region.bytes)) return true;
  }
  return false;
}

// With the lock.
int attribute(const State& state, int device, int attribute, int usual) {
  const auto set = state.settings.attributes.find({device, attribute});
  return set != state.settings.attributes.end() ? set->second : usual;
}

Error check_registration(State& state, void* base, std::size_t bytes, unsigned flags) {
  const int device = this_thread().device;
  if (const Error error = state.refuse_unsafe(Call::cudaHostRegister); error != cuda::success)
    return error;
  if (base == nullptr || bytes == 0) return cuda::invalid_value;
  const bool read_only = (flags & cuda::host_register_read_only_flag) != 0;
  if (attribute(state, device, cuda::host_register_supported, 1) == 0 ||
      (read_only && attribute(state, device, cuda::host_register_read_only, 0) == 0) ||
      (flags & io_memory_flag) != 0) {
    return cuda::not_supported;
  }
  if (bytes >= largest_registration_bytes) return cuda::memory_allocation;
  if (state.memory.pinned.any_in(address_of(base), bytes))
    return cuda::host_memory_already_registered;
  return cuda::success;
}

}  // namespace

KVMEM_FAKE_EXPORT Error cudaMalloc(void** base, std::size_t bytes) {
  const int device = this_thread().device;
  return run(Call::cudaMalloc, device, [&] {
    State& state = State::get();
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      if (const Error error = state.refuse_unsafe(Call::cudaMalloc); error != cuda::success)
        return error;
      model = &state.model(device);
    }
    *base = nullptr;
    if (bytes == 0) return cuda::success;
    void* const made = model->allocate(bytes);
    const State::Lock held = state.lock();
    state.memory.device.add({address_of(made), bytes, device, false, true});
    *base = made;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaFree(void* base) {
  State& state = State::get();
  return run(Call::cudaFree, state.device_of(base), [&] {
    Region region;
    {
      const State::Lock held = state.lock();
      if (const Error error = state.refuse_unsafe(Call::cudaFree); error != cuda::success)
        return error;
      if (base == nullptr) return cuda::success;
      const Region* const found = state.memory.device.at(base);
      if (found == nullptr || !found->ours) return cuda::invalid_value;
      region = *found;
    }
    const bool may_go = wait_for_copies(state, Call::cudaFree, region);
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      state.memory.device.remove(base);
      model = &state.model(region.device);
    }
    if (may_go) model->deallocate(base, region.bytes);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const int device = this_thread().device;
  return run(Call::cudaMemGetInfo, device, [&] {
    State& state = State::get();
    const State::Lock held = state.lock();
    *total = state.model(device).info().memory_bytes;
    if (*total == 0) *total = std::size_t{80} << 30;  // a test's own device that does not say
    const std::size_t used = state.memory.device.bytes(
        [&](const Region& region) { return region.ours && region.device == device; });
    *free = *total - std::min(used, *total);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaHostRegister(void* base, std::size_t bytes, unsigned flags) {
  const int device = this_thread().device;
  return run(Call::cudaHostRegister, device, [&] {
    State& state = State::get();
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      state.look_at_registrations();
      if (const Error error = check_registration(state, base, bytes, flags); error != cuda::success)
        return error;
      model = &state.model(device);
    }
    model->pin(base, whole_pages(bytes));
    const State::Lock held = state.lock();
    state.memory.pinned.add({address_of(base), bytes, device,
                             (flags & cuda::host_register_read_only_flag) != 0, false});
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaHostUnregister(void* base) {
  State& state = State::get();
  return run(Call::cudaHostUnregister, state.device_of(base), [&] {
    Region region;
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      if (const Error error = state.refuse_unsafe(Call::cudaHostUnregister); error != cuda::success)
        return error;
      const Region* const found = state.memory.pinned.at(base);
      if (found == nullptr || found->ours) return cuda::host_memory_not_registered;
      region = *found;
      if (state.in_flight(base, region.bytes)) {
        state.checker.report(Rule::freed_in_flight, "cudaHostUnregister of ", region.bytes,
                             " bytes at ", base, " under a copy");
      }
      state.memory.pinned.remove(base);
      model = &state.model(region.device);
    }
    model->unpin(base, whole_pages(region.bytes));
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaHostAlloc(void** base, std::size_t bytes, unsigned flags) {
  const int device = this_thread().device;
  return run(Call::cudaHostAlloc, device, [&] {
    State& state = State::get();
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      if (const Error error = state.refuse_unsafe(Call::cudaHostAlloc); error != cuda::success)
        return error;
      if (flags > 7) return cuda::invalid_value;
      model = &state.model(device);
    }
    *base = nullptr;
    if (bytes == 0) return cuda::success;
    const std::size_t mapped = whole_pages(bytes);
    void* const made = kvmem::map_memory(mapped);
    try {
      model->pin(made, mapped);
      const State::Lock held = state.lock();
      state.memory.pinned.add({address_of(made), bytes, device, false, true});
    } catch (...) {
      kvmem::unmap_memory(made, mapped);
      throw;
    }
    *base = made;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaFreeHost(void* base) {
  State& state = State::get();
  return run(Call::cudaFreeHost, state.device_of(base), [&] {
    Region region;
    {
      const State::Lock held = state.lock();
      if (const Error error = state.refuse_unsafe(Call::cudaFreeHost); error != cuda::success)
        return error;
      if (base == nullptr) return cuda::success;
      const Region* const found = state.memory.pinned.at(base);
      if (found == nullptr || !found->ours) return cuda::invalid_value;
      region = *found;
    }
    const bool may_go = wait_for_copies(state, Call::cudaFreeHost, region);
    kvmem::ModelDevice* model = nullptr;
    {
      const State::Lock held = state.lock();
      state.memory.pinned.remove(base);
      model = &state.model(region.device);
    }
    if (!may_go) return cuda::success;
    model->unpin(base, whole_pages(region.bytes));
    kvmem::unmap_memory(base, whole_pages(region.bytes));
    return cuda::success;
  });
}

// The structure has grown: who gave 24 bytes to the newer runtime loses what lies behind them.
KVMEM_FAKE_EXPORT Error cudaPointerGetAttributes(cuda::PointerAttributes* attributes,
                                                 const void* at) {
  return run(Call::cudaPointerGetAttributes, this_thread().device, [&] {
    constexpr std::size_t bytes = kvmem::fake::major == 12 ? 24 : 88;
    State& state = State::get();
    const State::Lock held = state.lock();
    cuda::PointerAttributes answer;
    answer.type = cuda::memory_unregistered;
    answer.device = -2;
    answer.host_pointer = const_cast<void*>(at);
    if (const Region* const device = state.memory.device.of(address_of(at))) {
      answer.type = cuda::memory_device;
      answer.device = device->device;
      answer.device_pointer = const_cast<void*>(at);
      answer.host_pointer = nullptr;
    } else if (const Region* const host = state.memory.pinned.of(address_of(at))) {
      answer.type = cuda::memory_host;
      answer.device = host->device;
      answer.device_pointer = const_cast<void*>(at);
    }
    std::memcpy(static_cast<void*>(attributes), &answer, bytes);
    return cuda::success;
  });
}
