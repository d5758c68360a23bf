// Is what device/cuda/cuda_abi.hpp declares what NVIDIA's headers declare? Compiled against the
// headers of several CUDA releases by tests/python/test_cuda_abi.py; never linked, never run.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#include "device/cuda/cuda_abi.hpp"

namespace kvmem::cuda {
namespace {

// Which structure of ours stands for which of theirs: with as many bytes, or with room that is
// larger on purpose.
template <class Ours, class Theirs>
inline constexpr bool stands_for = false;
template <>
inline constexpr bool stands_for<PointerAttributes, cudaPointerAttributes> =
    sizeof(PointerAttributes) >= sizeof(cudaPointerAttributes);
#if CUDART_VERSION >= 12080
template <>
inline constexpr bool stands_for<MemcpyAttributes, cudaMemcpyAttributes> =
    sizeof(MemcpyAttributes) == sizeof(cudaMemcpyAttributes);
#endif

// Passed in the same way: an enumeration as its integer, a pointer to a structure as one to ours,
// everything else as the very type.
template <class Ours, class Theirs>
inline constexpr bool same = std::is_same_v<Ours, Theirs>;

template <class Ours, class Theirs>
  requires std::is_enum_v<Theirs>
inline constexpr bool same<Ours, Theirs> =
    std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);

template <class Ours, class Theirs>
inline constexpr bool same_target =
    std::is_const_v<Ours> == std::is_const_v<Theirs> &&
    (same<std::remove_const_t<Ours>, std::remove_const_t<Theirs>> ||
     stands_for<std::remove_const_t<Ours>, std::remove_const_t<Theirs>>);
template <class Ours, class Theirs>
inline constexpr bool same<Ours*, Theirs*> = same_target<Ours, Theirs>;

template <class Ours, class... OurArguments, class Theirs, class... TheirArguments>
inline constexpr bool same<Ours(OurArguments...), Theirs(TheirArguments...)> = [] {
  if constexpr (sizeof...(OurArguments) != sizeof...(TheirArguments))
    return false;
  else
    return same<Ours, Theirs> && (same<OurArguments, TheirArguments> && ...);
}();

#define SAME_FUNCTION(ours, theirs) \
  static_assert(same<ours, decltype(theirs)>, "function " #ours " is not " #theirs)
#define SAME_VALUE(ours, theirs)                                                \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), \
                "value " #ours " is not " #theirs)
#define SAME_TYPE(ours, theirs) static_assert(same<ours, theirs>, "type " #ours " is not " #theirs)
#define SAME_PLACE(ours, our_member, theirs, their_member)                      \
  static_assert(offsetof(ours, our_member) == offsetof(theirs, their_member) && \
                    sizeof(ours::our_member) == sizeof(theirs::their_member),   \
                "member " #ours "::" #our_member " is not " #theirs "::" #their_member)

// The trait itself can say no.
static_assert(same<int*, cudaStreamCaptureStatus*> && !same<MemcpyAttributes*, int*>);
static_assert(!same<unsigned, cudaMemcpyKind> && !same<long, cudaMemcpyKind>);
static_assert(!same<void**, void* const*> && !same<const void*, void*> && !same<int, unsigned>);
static_assert(!same<int(int), int(int, int)> && !same<int(int*), int(unsigned*)>);
static_assert(!same<Event, cudaStream_t> && !same<MemLocation*, cudaPointerAttributes*>);

// ---- types ----

SAME_TYPE(Stream, cudaStream_t);
SAME_TYPE(Event, cudaEvent_t);
SAME_TYPE(Error, cudaError_t);
SAME_TYPE(Attribute, cudaDeviceAttr);
SAME_TYPE(MemcpyKind, cudaMemcpyKind);
SAME_TYPE(CaptureStatus, cudaStreamCaptureStatus);
SAME_TYPE(CaptureMode, cudaStreamCaptureMode);
SAME_TYPE(MemoryType, cudaMemoryType);

// ---- cudaError_t ----

SAME_VALUE(success, cudaSuccess);
SAME_VALUE(invalid_value, cudaErrorInvalidValue);
SAME_VALUE(memory_allocation, cudaErrorMemoryAllocation);
SAME_VALUE(initialization_error, cudaErrorInitializationError);
SAME_VALUE(cudart_unloading, cudaErrorCudartUnloading);
SAME_VALUE(stub_library, cudaErrorStubLibrary);
SAME_VALUE(insufficient_driver, cudaErrorInsufficientDriver);
SAME_VALUE(call_requires_newer_driver, cudaErrorCallRequiresNewerDriver);
SAME_VALUE(devices_unavailable, cudaErrorDevicesUnavailable);
SAME_VALUE(no_device_found, cudaErrorNoDevice);
SAME_VALUE(invalid_device, cudaErrorInvalidDevice);
SAME_VALUE(ecc_uncorrectable, cudaErrorECCUncorrectable);
SAME_VALUE(nvlink_uncorrectable, cudaErrorNvlinkUncorrectable);
#if CUDART_VERSION >= 12080
SAME_VALUE(contained, cudaErrorContained);
SAME_VALUE(tensor_memory_leak, cudaErrorTensorMemoryLeak);
#endif
SAME_VALUE(operating_system, cudaErrorOperatingSystem);
SAME_VALUE(invalid_resource_handle, cudaErrorInvalidResourceHandle);
SAME_VALUE(not_ready, cudaErrorNotReady);
SAME_VALUE(illegal_address, cudaErrorIllegalAddress);
SAME_VALUE(launch_timeout, cudaErrorLaunchTimeout);
SAME_VALUE(context_is_destroyed, cudaErrorContextIsDestroyed);
SAME_VALUE(device_assert, cudaErrorAssert);
SAME_VALUE(host_memory_already_registered, cudaErrorHostMemoryAlreadyRegistered);
SAME_VALUE(host_memory_not_registered, cudaErrorHostMemoryNotRegistered);
SAME_VALUE(hardware_stack_error, cudaErrorHardwareStackError);
SAME_VALUE(illegal_instruction, cudaErrorIllegalInstruction);
SAME_VALUE(misaligned_address, cudaErrorMisalignedAddress);
SAME_VALUE(invalid_address_space, cudaErrorInvalidAddressSpace);
SAME_VALUE(invalid_pc, cudaErrorInvalidPc);
SAME_VALUE(launch_failure, cudaErrorLaunchFailure);
SAME_VALUE(not_permitted, cudaErrorNotPermitted);
SAME_VALUE(not_supported, cudaErrorNotSupported);
SAME_VALUE(system_not_ready, cudaErrorSystemNotReady);
SAME_VALUE(system_driver_mismatch, cudaErrorSystemDriverMismatch);
SAME_VALUE(mps_client_terminated, cudaErrorMpsClientTerminated);
SAME_VALUE(stream_capture_unsupported, cudaErrorStreamCaptureUnsupported);
SAME_VALUE(stream_capture_isolation, cudaErrorStreamCaptureIsolation);
SAME_VALUE(stream_capture_implicit, cudaErrorStreamCaptureImplicit);
SAME_VALUE(captured_event, cudaErrorCapturedEvent);
SAME_VALUE(stream_capture_wrong_thread, cudaErrorStreamCaptureWrongThread);
SAME_VALUE(external_device, cudaErrorExternalDevice);
SAME_VALUE(unknown, cudaErrorUnknown);

// ---- cudaDeviceAttr ----

SAME_VALUE(integrated, cudaDevAttrIntegrated);
SAME_VALUE(compute_mode, cudaDevAttrComputeMode);
SAME_VALUE(concurrent_kernels, cudaDevAttrConcurrentKernels);
SAME_VALUE(async_engine_count, cudaDevAttrAsyncEngineCount);
SAME_VALUE(unified_addressing, cudaDevAttrUnifiedAddressing);
SAME_VALUE(compute_capability_major, cudaDevAttrComputeCapabilityMajor);
SAME_VALUE(compute_capability_minor, cudaDevAttrComputeCapabilityMinor);
SAME_VALUE(stream_priorities, cudaDevAttrStreamPrioritiesSupported);
SAME_VALUE(pageable_memory_access, cudaDevAttrPageableMemoryAccess);
SAME_VALUE(can_use_host_pointer, cudaDevAttrCanUseHostPointerForRegisteredMem);
SAME_VALUE(host_register_supported, cudaDevAttrHostRegisterSupported);
SAME_VALUE(pageable_memory_uses_host_page_tables,
           cudaDevAttrPageableMemoryAccessUsesHostPageTables);
SAME_VALUE(host_register_read_only, cudaDevAttrHostRegisterReadOnlySupported);
#if CUDART_VERSION >= 12040
SAME_VALUE(mps_enabled, cudaDevAttrMpsEnabled);
SAME_VALUE(host_numa_id, cudaDevAttrHostNumaId);
#endif

// ---- flags and enumerations ----

SAME_VALUE(stream_non_blocking, cudaStreamNonBlocking);
SAME_VALUE(event_default, cudaEventDefault);
SAME_VALUE(event_disable_timing, cudaEventDisableTiming);
SAME_VALUE(host_register_portable, cudaHostRegisterPortable);
SAME_VALUE(host_register_read_only_flag, cudaHostRegisterReadOnly);
SAME_VALUE(host_to_device, cudaMemcpyHostToDevice);
SAME_VALUE(device_to_host, cudaMemcpyDeviceToHost);
SAME_VALUE(by_address, cudaMemcpyDefault);
SAME_VALUE(capture_none, cudaStreamCaptureStatusNone);
SAME_VALUE(capture_global, cudaStreamCaptureModeGlobal);
SAME_VALUE(capture_relaxed, cudaStreamCaptureModeRelaxed);
SAME_VALUE(memory_unregistered, cudaMemoryTypeUnregistered);
SAME_VALUE(memory_host, cudaMemoryTypeHost);
SAME_VALUE(memory_device, cudaMemoryTypeDevice);
SAME_VALUE(memory_managed, cudaMemoryTypeManaged);

// ---- structures ----

SAME_PLACE(PointerAttributes, type, cudaPointerAttributes, type);
SAME_PLACE(PointerAttributes, device, cudaPointerAttributes, device);
SAME_PLACE(PointerAttributes, device_pointer, cudaPointerAttributes, devicePointer);
SAME_PLACE(PointerAttributes, host_pointer, cudaPointerAttributes, hostPointer);
static_assert(sizeof(PointerAttributes) >= sizeof(cudaPointerAttributes),
              "size of PointerAttributes");
static_assert(sizeof(cudaPointerAttributes) == (CUDART_VERSION < 13000 ? 24 : 88),
              "size of cudaPointerAttributes");
#if CUDART_VERSION >= 12080
static_assert(sizeof(MemLocation) == sizeof(cudaMemLocation), "size of MemLocation");
SAME_PLACE(MemLocation, type, cudaMemLocation, type);
SAME_PLACE(MemLocation, id, cudaMemLocation, id);
static_assert(sizeof(MemcpyAttributes) == sizeof(cudaMemcpyAttributes), "size of MemcpyAttributes");
SAME_PLACE(MemcpyAttributes, source_access_order, cudaMemcpyAttributes, srcAccessOrder);
SAME_PLACE(MemcpyAttributes, source_hint, cudaMemcpyAttributes, srcLocHint);
SAME_PLACE(MemcpyAttributes, target_hint, cudaMemcpyAttributes, dstLocHint);
SAME_PLACE(MemcpyAttributes, flags, cudaMemcpyAttributes, flags);
SAME_VALUE(access_order_stream, cudaMemcpySrcAccessOrderStream);
SAME_VALUE(access_order_any, cudaMemcpySrcAccessOrderAny);
#endif

// ---- functions ----

SAME_FUNCTION(GetDeviceCount, cudaGetDeviceCount);
SAME_FUNCTION(SetDevice, cudaSetDevice);
SAME_FUNCTION(GetDevice, cudaGetDevice);
SAME_FUNCTION(DeviceGetAttribute, cudaDeviceGetAttribute);
SAME_FUNCTION(DeviceGetPciBusId, cudaDeviceGetPCIBusId);
SAME_FUNCTION(DriverGetVersion, cudaDriverGetVersion);
SAME_FUNCTION(RuntimeGetVersion, cudaRuntimeGetVersion);
SAME_FUNCTION(GetLastError, cudaGetLastError);
SAME_FUNCTION(PeekAtLastError, cudaPeekAtLastError);
SAME_FUNCTION(GetErrorName, cudaGetErrorName);
SAME_FUNCTION(GetErrorString, cudaGetErrorString);
SAME_FUNCTION(Malloc, cudaMalloc);
SAME_FUNCTION(Free, cudaFree);
SAME_FUNCTION(MemGetInfo, cudaMemGetInfo);
SAME_FUNCTION(HostRegister, cudaHostRegister);
SAME_FUNCTION(HostUnregister, cudaHostUnregister);
SAME_FUNCTION(PointerGetAttributes, cudaPointerGetAttributes);
SAME_FUNCTION(StreamCreateWithFlags, cudaStreamCreateWithFlags);
SAME_FUNCTION(StreamDestroy, cudaStreamDestroy);
SAME_FUNCTION(StreamGetId, cudaStreamGetId);
SAME_FUNCTION(StreamIsCapturing, cudaStreamIsCapturing);
SAME_FUNCTION(StreamWaitEvent, cudaStreamWaitEvent);
SAME_FUNCTION(ThreadExchangeCaptureMode, cudaThreadExchangeStreamCaptureMode);
SAME_FUNCTION(EventCreateWithFlags, cudaEventCreateWithFlags);
SAME_FUNCTION(EventDestroy, cudaEventDestroy);
SAME_FUNCTION(EventRecord, cudaEventRecord);
SAME_FUNCTION(EventQuery, cudaEventQuery);
SAME_FUNCTION(EventElapsedTime, cudaEventElapsedTime);
SAME_FUNCTION(MemcpyAsync, cudaMemcpyAsync);
SAME_FUNCTION(PrimaryContextGetState, cuDevicePrimaryCtxGetState);
#if CUDART_VERSION >= 12080
SAME_FUNCTION(StreamGetDevice, cudaStreamGetDevice);
#endif
#if CUDART_VERSION >= 13000
SAME_FUNCTION(MemcpyBatchAsync13, cudaMemcpyBatchAsync);
static_assert(!same<MemcpyBatchAsync12, decltype(cudaMemcpyBatchAsync)>);
#elif CUDART_VERSION >= 12080
SAME_FUNCTION(MemcpyBatchAsync12, cudaMemcpyBatchAsync);
static_assert(!same<MemcpyBatchAsync13, decltype(cudaMemcpyBatchAsync)>);
#endif

}  // namespace
}  // namespace kvmem::cuda
