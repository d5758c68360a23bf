// NVIDIA's CUDA runtime library, found and loaded at run time: a table of functions, where it came
// from and its version. One wheel of kvmem so installs anywhere, and shares the runtime of the
// engine that it is linked into.
//
// Nothing is loaded before load_cudart() is called. A library is never unloaded. Any thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/cuda/cuda_abi.hpp"

namespace kvmem::cuda {

// Null where the runtime does not have it.
struct Functions {
  GetDeviceCount* get_device_count = nullptr;
  SetDevice* set_device = nullptr;
  GetDevice* get_device = nullptr;
  DeviceGetAttribute* device_get_attribute = nullptr;
  DeviceGetPciBusId* device_get_pci_bus_id = nullptr;
  DriverGetVersion* driver_get_version = nullptr;
  RuntimeGetVersion* runtime_get_version = nullptr;
  GetLastError* get_last_error = nullptr;
  PeekAtLastError* peek_at_last_error = nullptr;
  GetErrorName* get_error_name = nullptr;
  GetErrorString* get_error_string = nullptr;
  Malloc* malloc = nullptr;
  Free* free = nullptr;
  MemGetInfo* mem_get_info = nullptr;
  HostRegister* host_register = nullptr;
  HostUnregister* host_unregister = nullptr;
  PointerGetAttributes* pointer_get_attributes = nullptr;
  StreamCreateWithFlags* stream_create_with_flags = nullptr;
  StreamDestroy* stream_destroy = nullptr;
  StreamGetId* stream_get_id = nullptr;
  StreamGetDevice* stream_get_device = nullptr;  // optional
  StreamIsCapturing* stream_is_capturing = nullptr;
  StreamWaitEvent* stream_wait_event = nullptr;
  ThreadExchangeCaptureMode* thread_exchange_capture_mode = nullptr;
  EventCreateWithFlags* event_create_with_flags = nullptr;
  EventDestroy* event_destroy = nullptr;
  EventRecord* event_record = nullptr;
  EventQuery* event_query = nullptr;
  EventElapsedTime* event_elapsed_time = nullptr;
  MemcpyAsync* memcpy_async = nullptr;
  MemcpyBatchAsync12* memcpy_batch_12 = nullptr;  // at most one of these two: the version says
  MemcpyBatchAsync13* memcpy_batch_13 = nullptr;
  PrimaryContextGetState* primary_context_get_state = nullptr;  // optional
};

struct Cudart {
  Functions call;
  std::string path;      // of the library
  std::string found_by;  // "KVMEM_CUDART_PATH", "process", "wheel", "system"; "path": it was given
  int version = 0;       // 12080 is 12.8
};

// "12.8" of 12080.
[[nodiscard]] std::string version_text(int version);

// The library of that path. Throws DeviceUnavailable that says what is wrong with it: it cannot be
// loaded, lacks a function, or is older than CUDA 12.0.
[[nodiscard]] std::shared_ptr<const Cudart> load_cudart(const std::string& path);

// The candidates in the order in which they are tried: KVMEM_CUDART_PATH, and then nothing else;
// or what the process has loaded already, `wheels` (paths), and the sonames that the system's
// loader may know. Each is loaded only when its turn comes. Those that cannot be loaded are passed
// over, and why() has a line for each; but KVMEM_CUDART_PATH must load: throws DeviceUnavailable.
class CudartSearch {
 public:
  explicit CudartSearch(std::vector<std::string> wheels);
  [[nodiscard]] std::shared_ptr<const Cudart> next();  // null: there are no more
  [[nodiscard]] const std::string& why() const noexcept { return why_; }

 private:
  struct Candidate {
    std::string path, found_by;
  };
  std::vector<Candidate> candidates_;
  std::size_t tried_ = 0;
  std::string why_;
};

}  // namespace kvmem::cuda
