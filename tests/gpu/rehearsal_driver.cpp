// A CUDA driver without a GPU, for rehearsing what runs on one: as much of libcuda.so.1 as spin.hpp
// and gpu_driver.py call, in front of the fake runtime (tests/fakes) that KVMEM_CUDART_PATH names.
// test_gpu_rehearsal.py builds it and runs the tests of this folder on it.
//
// The kernels run on the CPU, one thread a launch, when their stream gets there. They are told by
// their names; the text of kernels.ptx is not looked at.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "device/model_device.hpp"
#include "fakes/fake_cudart.h"

namespace {

using namespace kvmem;

constexpr int success = 0, no_image = 209, not_ready = 600, illegal_address = 700;
std::atomic<bool> lost{false};

template <class Function>
Function* runtime(const char* name) {
  static void* const library = dlopen(std::getenv("KVMEM_CUDART_PATH"), RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

ModelDevice& model() {
  return *static_cast<ModelDevice*>(runtime<decltype(kvmem_fake_model)>("kvmem_fake_model")(0));
}

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

bool idle(void* stream) {
  const EventHandle end = model().create_event(false);
  model().record(end, reinterpret_cast<StreamHandle>(stream));
  const EventState state = model().query(end);
  model().destroy_event(end);
  return state == EventState::done;
}

struct Launch {
  std::string kernel;
  std::uint64_t arguments[3];

  Launch(const char* name, void** given) : kernel(name), arguments{} {
    const bool has_two = kernel != "kvmem_poke", has_three = has_two && kernel != "kvmem_spin";
    std::memcpy(&arguments[0], given[0], 8);
    if (has_two) std::memcpy(&arguments[1], given[1], 8);
    if (has_three) std::memcpy(&arguments[2], given[2], kernel == "kvmem_fill" ? 4 : 8);
  }

  void run() const {
    auto* const words = reinterpret_cast<std::uint32_t*>(arguments[0]);
    if (kernel == "kvmem_spin") {
      const auto limit = std::chrono::steady_clock::now() + std::chrono::nanoseconds(arguments[1]);
      const std::atomic_ref flag(words[0]);
      while (flag.load() == 0 && !lost && std::chrono::steady_clock::now() < limit) nap();
      std::atomic_ref(words[1]).store(flag.load() != 0 ? 1 : 2);
    } else if (kernel == "kvmem_fill") {
      for (std::uint32_t i = 0; i < arguments[1]; ++i) {
        words[i] = static_cast<std::uint32_t>(arguments[2]) + i * 0x9E3779B1U;
      }
    } else if (kernel == "kvmem_read") {
      std::memcpy(words, reinterpret_cast<const void*>(arguments[1]), arguments[2] * 4);
    }
  }
};

int launch(const Launch& what, void* stream) {
  if (lost) return illegal_address;
  int captures = 0;
  runtime<int(void*, int*)>("cudaStreamIsCapturing")(stream, &captures);
  if (captures != 0) return success;  // it would run when the graph does, and none ever does
  if (what.kernel == "kvmem_poke") {
    lost = true;
    runtime<decltype(kvmem_fake_fail)>("kvmem_fake_fail")("*", 1, 1, illegal_address, 0);
    return success;
  }
  const EventHandle begin = model().create_event(false), end = model().create_event(false);
  const auto on = reinterpret_cast<StreamHandle>(stream);
  model().record_unsignalled(end);
  model().record(begin, on);
  model().wait(on, end);
  std::thread([=] {
    while (model().query(begin) == EventState::pending) nap();
    what.run();
    model().signal(end);
    model().destroy_event(begin);
    model().destroy_event(end);
  }).detach();
  return success;
}

int unless_lost(int result) { return lost ? illegal_address : result; }

}  // namespace

#define DRIVER_CALL extern "C" __attribute__((visibility("default"))) int

DRIVER_CALL cuInit(unsigned) { return success; }
DRIVER_CALL cuGetErrorString(int, const char** text) {
  *text = "an error of the rehearsal";
  return success;
}
DRIVER_CALL cuDeviceGetCount(int* count) {
  *count = 1;
  return success;
}
DRIVER_CALL cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return success;
}
DRIVER_CALL cuDeviceGetPCIBusId(char* text, int length, int device) {
  return runtime<int(char*, int, int)>("cudaDeviceGetPCIBusId")(text, length, device);
}
DRIVER_CALL cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &lost;
  return success;
}
DRIVER_CALL cuCtxPushCurrent_v2(void*) { return success; }
DRIVER_CALL cuCtxPopCurrent_v2(void**) { return success; }

DRIVER_CALL cuModuleLoadData(void** module, const void* image) {
  *module = &lost;
  return std::strstr(static_cast<const char*>(image), ".version") != nullptr ? success : no_image;
}
DRIVER_CALL cuModuleGetFunction(void** function, void*, const char* name) {
  *function = strdup(name);
  return success;
}
DRIVER_CALL cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, unsigned, void* stream, void** arguments, void**) {
  return launch({static_cast<const char*>(function), arguments}, stream);
}

DRIVER_CALL cuMemAlloc_v2(void** base, std::size_t bytes) {
  return unless_lost(runtime<int(void**, std::size_t)>("cudaMalloc")(base, bytes));
}
DRIVER_CALL cuMemHostAlloc(void** base, std::size_t bytes, unsigned) {
  *base = std::aligned_alloc(4096, round_up(bytes, 4096));
  return success;
}
DRIVER_CALL cuMemHostGetDevicePointer_v2(void** address, void* base, unsigned) {
  *address = base;
  return success;
}
DRIVER_CALL cuMemcpyHtoD_v2(void* target, const void* source, std::size_t bytes) {
  if (!lost) std::memcpy(target, source, bytes);
  return unless_lost(success);
}
DRIVER_CALL cuMemcpyDtoH_v2(void* target, const void* source, std::size_t bytes) {
  if (!lost) std::memcpy(target, source, bytes);
  return unless_lost(success);
}

DRIVER_CALL cuStreamCreate(void** stream, unsigned flags) {
  return runtime<int(void**, unsigned)>("cudaStreamCreateWithFlags")(stream, flags);
}
DRIVER_CALL cuStreamDestroy_v2(void* stream) {
  return runtime<int(void*)>("cudaStreamDestroy")(stream);
}
DRIVER_CALL cuStreamSynchronize(void* stream) {
  while (stream != nullptr && !lost && !idle(stream)) nap();
  return unless_lost(success);
}
DRIVER_CALL cuStreamQuery(void* stream) { return unless_lost(idle(stream) ? success : not_ready); }
DRIVER_CALL cuEventCreate(void** event, unsigned flags) {
  return runtime<int(void**, unsigned)>("cudaEventCreateWithFlags")(event, flags);
}
DRIVER_CALL cuEventRecord(void* event, void* stream) {
  return runtime<int(void*, void*)>("cudaEventRecord")(event, stream);
}
DRIVER_CALL cuStreamBeginCapture_v2(void* stream, int mode) {
  return runtime<int(void*, int)>("cudaStreamBeginCapture")(stream, mode);
}
DRIVER_CALL cuStreamEndCapture(void* stream, void** graph) {
  return runtime<int(void*, void**)>("cudaStreamEndCapture")(stream, graph);
}
DRIVER_CALL cuGraphDestroy(void*) { return success; }
