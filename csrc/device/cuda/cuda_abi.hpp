// The part of the CUDA runtime's C ABI that kvmem uses, declared by itself: no CUDA header is
// needed to build, and this header stands beside CUDA's own without a conflict.
//
// Only what is the same in libcudart.so.12 and libcudart.so.13 is declared once; what differs under
// one name is declared twice. tests/python/test_cuda_abi.py checks every prototype, value and size
// here against the headers of several CUDA releases.
#pragma once

#include <cstddef>

struct CUstream_st;  // CUDA's own tags, so that the pointer types are CUDA's own too
struct CUevent_st;

namespace kvmem::cuda {

using Stream = CUstream_st*;
using Event = CUevent_st*;

// ---- cudaError_t ----

using Error = int;
inline constexpr Error success = 0;
inline constexpr Error invalid_value = 1;
inline constexpr Error memory_allocation = 2;
inline constexpr Error initialization_error = 3;
inline constexpr Error cudart_unloading = 4;
inline constexpr Error stub_library = 34;
inline constexpr Error insufficient_driver = 35;
inline constexpr Error call_requires_newer_driver = 36;
inline constexpr Error devices_unavailable = 46;
inline constexpr Error no_device_found = 100;
inline constexpr Error invalid_device = 101;
inline constexpr Error ecc_uncorrectable = 214;
inline constexpr Error nvlink_uncorrectable = 220;
inline constexpr Error contained = 226;
inline constexpr Error operating_system = 304;
inline constexpr Error invalid_resource_handle = 400;
inline constexpr Error not_ready = 600;
inline constexpr Error illegal_address = 700;
inline constexpr Error launch_timeout = 702;
inline constexpr Error context_is_destroyed = 709;
inline constexpr Error device_assert = 710;
inline constexpr Error host_memory_already_registered = 712;
inline constexpr Error host_memory_not_registered = 713;
inline constexpr Error hardware_stack_error = 714;
inline constexpr Error illegal_instruction = 715;
inline constexpr Error misaligned_address = 716;
inline constexpr Error invalid_address_space = 717;
inline constexpr Error invalid_pc = 718;
inline constexpr Error launch_failure = 719;
inline constexpr Error tensor_memory_leak = 721;
inline constexpr Error not_permitted = 800;
inline constexpr Error not_supported = 801;
inline constexpr Error system_not_ready = 802;
inline constexpr Error system_driver_mismatch = 803;
inline constexpr Error mps_client_terminated = 810;
inline constexpr Error stream_capture_unsupported = 900;  // the first that is about a capture
inline constexpr Error stream_capture_isolation = 905;
inline constexpr Error stream_capture_implicit = 906;
inline constexpr Error captured_event = 907;
inline constexpr Error stream_capture_wrong_thread = 908;  // the last one
inline constexpr Error external_device = 911;
inline constexpr Error unknown = 999;

// ---- cudaDeviceAttr ----

using Attribute = int;
inline constexpr Attribute integrated = 18;
inline constexpr Attribute compute_mode = 20;
inline constexpr Attribute concurrent_kernels = 31;
inline constexpr Attribute async_engine_count = 40;
inline constexpr Attribute unified_addressing = 41;
inline constexpr Attribute compute_capability_major = 75;
inline constexpr Attribute compute_capability_minor = 76;
inline constexpr Attribute stream_priorities = 78;
inline constexpr Attribute pageable_memory_access = 88;
inline constexpr Attribute can_use_host_pointer = 91;  // of registered memory
inline constexpr Attribute host_register_supported = 99;
inline constexpr Attribute pageable_memory_uses_host_page_tables = 100;
inline constexpr Attribute host_register_read_only = 113;
inline constexpr Attribute mps_enabled = 133;
inline constexpr Attribute host_numa_id = 134;

// ---- flags and enumerations ----

inline constexpr unsigned stream_non_blocking = 1;
inline constexpr unsigned event_default = 0;
inline constexpr unsigned event_disable_timing = 2;
inline constexpr unsigned host_register_portable = 1;
inline constexpr unsigned host_register_read_only_flag = 8;

using MemcpyKind = int;  // cudaMemcpyKind
inline constexpr MemcpyKind host_to_device = 1;
inline constexpr MemcpyKind device_to_host = 2;
inline constexpr MemcpyKind by_address = 4;  // cudaMemcpyDefault

using CaptureStatus = int;  // cudaStreamCaptureStatus
inline constexpr CaptureStatus capture_none = 0;
using CaptureMode = int;  // cudaStreamCaptureMode
inline constexpr CaptureMode capture_global = 0;
inline constexpr CaptureMode capture_relaxed = 2;

using MemoryType = int;  // cudaMemoryType
inline constexpr MemoryType memory_unregistered = 0;
inline constexpr MemoryType memory_host = 1;
inline constexpr MemoryType memory_device = 2;
inline constexpr MemoryType memory_managed = 3;

inline constexpr int access_order_stream = 1;  // cudaMemcpySrcAccessOrder
inline constexpr int access_order_any = 3;

// ---- structures ----

struct MemLocation {  // cudaMemLocation
  int type = 0;
  int id = 0;
};

struct MemcpyAttributes {  // cudaMemcpyAttributes
  int source_access_order = 0;
  MemLocation source_hint, target_hint;  // of managed memory only
  unsigned flags = 0;
};

// cudaPointerAttributes has 24 bytes in CUDA 12 and 88 in 13: this is larger than both, and begins
// as both do.
struct PointerAttributes {
  MemoryType type = memory_unregistered;
  int device = 0;
  void* device_pointer = nullptr;
  void* host_pointer = nullptr;
  std::byte room[256 - 24] = {};
};

// ---- functions ----

using GetDeviceCount = Error(int*);
using SetDevice = Error(int);
using GetDevice = Error(int*);
using DeviceGetAttribute = Error(int*, Attribute, int);
using DeviceGetPciBusId = Error(char*, int, int);
using DriverGetVersion = Error(int*);
using RuntimeGetVersion = Error(int*);
using GetLastError = Error();
using PeekAtLastError = Error();
using GetErrorName = const char*(Error);
using GetErrorString = const char*(Error);
using Malloc = Error(void**, std::size_t);
using Free = Error(void*);
using MemGetInfo = Error(std::size_t*, std::size_t*);
using HostRegister = Error(void*, std::size_t, unsigned);
using HostUnregister = Error(void*);
using PointerGetAttributes = Error(PointerAttributes*, const void*);
using StreamCreateWithFlags = Error(Stream*, unsigned);
using StreamDestroy = Error(Stream);
using StreamGetId = Error(Stream, unsigned long long*);
using StreamGetDevice = Error(Stream, int*);  // 12.8
using StreamIsCapturing = Error(Stream, CaptureStatus*);
using StreamWaitEvent = Error(Stream, Event, unsigned);
using ThreadExchangeCaptureMode = Error(CaptureMode*);
using EventCreateWithFlags = Error(Event*, unsigned);
using EventDestroy = Error(Event);
using EventRecord = Error(Event, Stream);
using EventQuery = Error(Event);
using EventElapsedTime = Error(float*, Event, Event);
using MemcpyAsync = Error(void*, const void*, std::size_t, MemcpyKind, Stream);
// One symbol, cudaMemcpyBatchAsync. With the arguments of the wrong one the stream lands where an
// index is to be written.
using MemcpyBatchAsync12 = Error(void** targets, void** sources, std::size_t* sizes,
                                 std::size_t count, MemcpyAttributes*, std::size_t* attribute_index,
                                 std::size_t attributes, std::size_t* failed,
                                 Stream);  // 12.8, 12.9
using MemcpyBatchAsync13 = Error(void* const* targets, const void* const* sources,
                                 const std::size_t* sizes, std::size_t count, MemcpyAttributes*,
                                 std::size_t* attribute_index, std::size_t attributes, Stream);
// The driver's, of libcuda.so.1: does the device have a context in this process?
using PrimaryContextGetState = Error(int device, unsigned* flags, int* active);

}  // namespace kvmem::cuda
