// The face of the runtime: devices, versions, errors.
#include <cstdio>
#include <cstring>

#include "fakes/state.hpp"

using namespace kvmem::fake;
namespace cuda = kvmem::cuda;

namespace {

struct Value {
  int attribute, value;
};
constexpr Value usual_attributes[] = {
    {1, 1024},  // threads per block
    {15, 1},    // copies overlap with kernels
    {16, 132},  // multiprocessors
    {cuda::integrated, 0},
    {cuda::compute_mode, 0},
    {cuda::concurrent_kernels, 1},
    {33, 1},  // bus
    {34, 0},  // slot
    {cuda::async_engine_count, 2},
    {cuda::unified_addressing, 1},
    {50, 0xF000},  // domain
    {cuda::compute_capability_major, 9},
    {cuda::compute_capability_minor, 0},
    {cuda::stream_priorities, 1},
    {83, 1},  // managed memory
    {cuda::pageable_memory_access, 0},
    {cuda::can_use_host_pointer, 1},
    {cuda::host_register_supported, 1},
    {cuda::pageable_memory_uses_host_page_tables, 0},
    {cuda::host_register_read_only, 0},
    {115, 1},  // memory pools
    {cuda::mps_enabled, 0},
    {cuda::host_numa_id, 0},
};

struct Text {
  Error error;
  const char* name;
  const char* sentence;
};
constexpr Text texts[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {4, "cudaErrorCudartUnloading", "driver shutting down"},
    {21, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {34, "cudaErrorStubLibrary", "CUDA driver is a stub library"},
    {35, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {36, "cudaErrorCallRequiresNewerDriver", "API call is not supported in the installed driver"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {220, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected"},
    {226, "cudaErrorContained", "contained error"},
    {304, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {709, "cudaErrorContextIsDestroyed", "context is destroyed"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the memory is mapped already"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered region"},
    {714, "cudaErrorHardwareStackError", "hardware stack error"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {717, "cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"},
    {718, "cudaErrorInvalidPc", "invalid program counter"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {721, "cudaErrorTensorMemoryLeak", "tensor memory was not given back"},
    {800, "cudaErrorNotPermitted", "operation not permitted"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {802, "cudaErrorSystemNotReady", "system not yet initialized"},
    {803, "cudaErrorSystemDriverMismatch", "system has unsupported display driver / CUDA driver"},
    {810, "cudaErrorMpsClientTerminated", "MPS client has been terminated"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work"},
    {906, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in capture"},
    {908, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a capture of another thread"},
    {911, "cudaErrorExternalDevice", "an external device failed"},
    {999, "cudaErrorUnknown", "unknown error"},
};

const Text* text_of(Error error) {
  for (const Text& text : texts) {
    if (text.error == error) return &text;
  }
  return nullptr;
}

// With the lock.
bool is_device(const State& state, int device) {
  return device >= 0 && device < state.settings.devices;
}

Error look_at_last_error(Call call, bool clear) {
  State& state = State::get();
  Error answer = cuda::success;
  const Error before = this_thread().last_error;
  const Error error = run(call, this_thread().device, [&] {
    answer = before;
    return cuda::success;
  });
  if (error != cuda::success) return error;
  if (state.exiting || !clear) return answer;
  // What no call can recover from stays.
  this_thread().last_error = is_sticky(before) ? before : cuda::success;
  return answer;
}

}  // namespace

KVMEM_FAKE_EXPORT Error cudaDriverGetVersion(int* driver) {
  return run(Call::cudaDriverGetVersion, this_thread().device, [&] {
    const State::Lock held = State::get().lock();
    *driver = State::get().settings.driver;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaRuntimeGetVersion(int* runtime) {
  return run(Call::cudaRuntimeGetVersion, this_thread().device, [&] {
    *runtime = kvmem::fake::version;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaGetLastError() {
  return look_at_last_error(Call::cudaGetLastError, true);
}
KVMEM_FAKE_EXPORT Error cudaPeekAtLastError() {
  return look_at_last_error(Call::cudaPeekAtLastError, false);
}

KVMEM_FAKE_EXPORT const char* cudaGetErrorName(Error error) {
  const Text* const text = text_of(error);
  return text != nullptr ? text->name : "unrecognized error code";
}
KVMEM_FAKE_EXPORT const char* cudaGetErrorString(Error error) {
  const Text* const text = text_of(error);
  return text != nullptr ? text->sentence : "unrecognized error code";
}

KVMEM_FAKE_EXPORT Error cudaGetDeviceCount(int* count) {
  return run(Call::cudaGetDeviceCount, this_thread().device, [&] {
    const State::Lock held = State::get().lock();
    *count = State::get().settings.devices;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaGetDevice(int* device) {
  return run(Call::cudaGetDevice, this_thread().device, [&] {
    *device = this_thread().device;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaSetDevice(int device) {
  return run(Call::cudaSetDevice, device, [&] {
    State& state = State::get();
    const State::Lock held = state.lock();
    if (!is_device(state, device)) return cuda::invalid_device;
    Thread& thread = this_thread();
    state.expect_meant(device);
    if (device != 0 && !thread.was_told) thread.left_default = true;
    // A thread has device 0 without a context there until it is told; going back makes one.
    if (device == 0 && thread.left_default && !state.devices[0].has_context) {
      state.checker.report(Rule::foreign_context,
                           "cudaSetDevice(0) made one for a thread that had device 0 because it "
                           "was never told");
    }
    thread.was_told = true;
    thread.device = device;
    state.make_context(device);
    return state.devices[device].lost_by;
  });
}

KVMEM_FAKE_EXPORT Error cudaDeviceGetAttribute(int* value, cuda::Attribute attribute, int device) {
  return run(Call::cudaDeviceGetAttribute, this_thread().device, [&] {
    State& state = State::get();
    const State::Lock held = state.lock();
    if (!is_device(state, device)) return cuda::invalid_device;
    const auto set = state.settings.attributes.find({device, attribute});
    if (set != state.settings.attributes.end()) {
      *value = set->second;
      return cuda::success;
    }
    for (const Value& usual : usual_attributes) {
      if (usual.attribute != attribute) continue;
      *value = attribute == 33 ? device + 1 : usual.value;
      return cuda::success;
    }
    return cuda::invalid_value;
  });
}

KVMEM_FAKE_EXPORT Error cudaDeviceGetPCIBusId(char* id, int bytes, int device) {
  return run(Call::cudaDeviceGetPCIBusId, this_thread().device, [&] {
    State& state = State::get();
    const State::Lock held = state.lock();
    if (!is_device(state, device)) return cuda::invalid_device;
    char usual[32];  // of no machine
    std::snprintf(usual, sizeof usual, "F000:%02X:00.0", static_cast<unsigned>(device + 1) & 0xFF);
    const auto set = state.settings.pci_bus_ids.find(device);
    const std::string answer = set != state.settings.pci_bus_ids.end() ? set->second : usual;
    if (bytes <= 0 || answer.size() >= static_cast<std::size_t>(bytes)) return cuda::invalid_value;
    std::memcpy(id, answer.c_str(), answer.size() + 1);
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return run(Call::cuDevicePrimaryCtxGetState, this_thread().device, [&] {
    State& state = State::get();
    const State::Lock held = state.lock();
    if (!is_device(state, device)) return cuda::invalid_device;
    *flags = 0;
    *active = state.devices[device].has_context ? 1 : 0;
    return cuda::success;
  });
}

KVMEM_FAKE_EXPORT Error cudaThreadExchangeStreamCaptureMode(cuda::CaptureMode* mode) {
  return run(Call::cudaThreadExchangeStreamCaptureMode, this_thread().device, [&] {
    if (mode == nullptr || *mode < 0 || *mode > cuda::capture_relaxed) return cuda::invalid_value;
    std::swap(this_thread().mode, *mode);
    return cuda::success;
  });
}
