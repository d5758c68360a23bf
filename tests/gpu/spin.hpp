// Holds back a stream of a real GPU: a kernel that spins until it is told to end, from kernels.ptx,
// launched through the driver's library. No CUDA header and no compiler is needed.
//
// Two properties of the driver would let a spinning kernel hold back more than its stream, and are
// set before it is loaded: streams share hardware queues, of which there are 8 unless told
// otherwise, and a kernel that is loaded when it is first launched waits for those that run.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>

#include "base/types.hpp"

namespace kvmem::test {

// The part of libcuda.so.1 that is needed. Never unloaded. Throws std::runtime_error.
class CudaDriver {
 public:
  using Result = int;
  using Context = struct ContextTag*;
  using Module = struct ModuleTag*;
  using Function = struct FunctionTag*;
  using Stream = void*;
  using DevicePointer = unsigned long long;

  CudaDriver() { expect(init(0), "cuInit"); }

  void expect(Result result, const char* call) const {
    if (result == 0) return;
    const char* text = nullptr;
    if (get_error_string(result, &text) != 0 || text == nullptr) text = "an unknown error";
    throw std::runtime_error(std::string(call) + ": " + text + " (" + std::to_string(result) + ")");
  }

 private:
  void* const library_ = open();

  static void* open() {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return library;
  }
  template <class Function>
  [[nodiscard]] Function* function(const char* name) const {
    void* const found = dlsym(library_, name);
    if (found == nullptr) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
    return reinterpret_cast<Function*>(found);
  }

#define KVMEM_DRIVER_CALL(member, symbol, ...) \
  Result (*const member)(__VA_ARGS__) = function<Result(__VA_ARGS__)>(symbol)
 public:
  KVMEM_DRIVER_CALL(init, "cuInit", unsigned);
  KVMEM_DRIVER_CALL(get_error_string, "cuGetErrorString", Result, const char**);
  KVMEM_DRIVER_CALL(device_get, "cuDeviceGet", int*, int);
  KVMEM_DRIVER_CALL(primary_retain, "cuDevicePrimaryCtxRetain", Context*, int);
  KVMEM_DRIVER_CALL(push_current, "cuCtxPushCurrent_v2", Context);
  KVMEM_DRIVER_CALL(pop_current, "cuCtxPopCurrent_v2", Context*);
  KVMEM_DRIVER_CALL(load_data, "cuModuleLoadData", Module*, const void*);
  KVMEM_DRIVER_CALL(get_function, "cuModuleGetFunction", Function*, Module, const char*);
  KVMEM_DRIVER_CALL(host_alloc, "cuMemHostAlloc", void**, std::size_t, unsigned);
  KVMEM_DRIVER_CALL(host_device_pointer, "cuMemHostGetDevicePointer_v2", DevicePointer*, void*,
                    unsigned);
  KVMEM_DRIVER_CALL(stream_create, "cuStreamCreate", Stream*, unsigned);
  KVMEM_DRIVER_CALL(stream_synchronize, "cuStreamSynchronize", Stream);
  KVMEM_DRIVER_CALL(stream_destroy, "cuStreamDestroy_v2", Stream);
  // Function, grid, block, bytes of shared memory, stream, arguments, extra.
  KVMEM_DRIVER_CALL(launch, "cuLaunchKernel", Function, unsigned, unsigned, unsigned, unsigned,
                    unsigned, unsigned, unsigned, Stream, void**, void**);
#undef KVMEM_DRIVER_CALL
};

// Spins on one device, one a stream at a time. One for the process; it is never destroyed, since
// the context must outlive what others still have on it. Any thread.
class Spinner {
 public:
  static Spinner& of_device(int ordinal) {
    static std::mutex mutex;
    static auto* const all = new std::map<int, Spinner*>;
    const std::lock_guard lock(mutex);
    Spinner*& one = (*all)[ordinal];
    if (one == nullptr) one = new Spinner(ordinal);
    return *one;
  }

  void hold(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    Words* const words = &page_[used_++ % page_words];
    *words = {};
    launch(words, reinterpret_cast<CudaDriver::Stream>(stream));
    held_[stream] = words;
  }

  // Also of a stream that was destroyed. False: the kernel had ended by itself, because somebody
  // waited for the stream that was held; those to come get little time.
  [[nodiscard]] bool let_go(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    Words* const words = held_.extract(stream).mapped();
    std::atomic_ref(words->flag).store(1);
    const bool ran_out = std::atomic_ref(words->outcome).load() == 2;
    if (ran_out) limit_ns_ = std::min(limit_ns_, short_limit_ns);
    return !ran_out;
  }

 private:
  struct Words {
    std::uint32_t flag = 0, outcome = 0;
  };
  static constexpr std::size_t page_words = 8192;
  static constexpr std::uint64_t long_limit_ns = 20'000'000'000, short_limit_ns = 1'000'000'000;

  CudaDriver driver_;
  CudaDriver::Context context_ = nullptr;
  CudaDriver::Function spin_ = nullptr;
  std::mutex mutex_;
  Words* page_ = nullptr;  // pinned; a pair comes again after so many spins
  CudaDriver::DevicePointer page_on_device_ = 0;
  std::size_t used_ = 0;
  std::uint64_t limit_ns_ = long_limit_ns;
  std::map<StreamHandle, Words*> held_;

  // The context is current on this thread while it lives.
  struct Current {
    explicit Current(const Spinner& spinner) : driver(spinner.driver_) {
      driver.expect(driver.push_current(spinner.context_), "cuCtxPushCurrent");
    }
    ~Current() {
      CudaDriver::Context popped = nullptr;
      static_cast<void>(driver.pop_current(&popped));
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const CudaDriver& driver;
  };

  explicit Spinner(int ordinal) {
    int device = 0;
    driver_.expect(driver_.device_get(&device, ordinal), "cuDeviceGet");
    driver_.expect(driver_.primary_retain(&context_, device), "cuDevicePrimaryCtxRetain");
    const Current current(*this);
    CudaDriver::Module module = nullptr;
    driver_.expect(driver_.load_data(&module, kernels().c_str()), "cuModuleLoadData");
    driver_.expect(driver_.get_function(&spin_, module, "kvmem_spin"), "cuModuleGetFunction");
    void* page = nullptr;
    constexpr unsigned portable_and_mapped = 1 | 2;
    driver_.expect(driver_.host_alloc(&page, page_words * sizeof(Words), portable_and_mapped),
                   "cuMemHostAlloc");
    page_ = static_cast<Words*>(page);
    driver_.expect(driver_.host_device_pointer(&page_on_device_, page, 0),
                   "cuMemHostGetDevicePointer");
    launch_once();
  }

  // So that nothing is left to be loaded when a spin is launched beside another.
  void launch_once() {
    constexpr unsigned non_blocking = 1;
    CudaDriver::Stream stream = nullptr;
    driver_.expect(driver_.stream_create(&stream, non_blocking), "cuStreamCreate");
    page_[used_] = {.flag = 1};
    launch(&page_[used_++], stream);
    driver_.expect(driver_.stream_synchronize(stream), "cuStreamSynchronize");
    driver_.expect(driver_.stream_destroy(stream), "cuStreamDestroy");
  }

  void launch(const Words* words, CudaDriver::Stream stream) {
    auto flag = page_on_device_ + static_cast<std::size_t>(words - page_) * sizeof(Words);
    std::uint64_t limit_ns = limit_ns_;
    void* arguments[] = {&flag, &limit_ns};
    const Current current(*this);
    driver_.expect(driver_.launch(spin_, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr),
                   "cuLaunchKernel");
  }

  // KVMEM_GPU_KERNELS, for a program that was built elsewhere; else beside this file.
  static std::string kernels() {
    const char* const named = std::getenv("KVMEM_GPU_KERNELS");
    const std::string here = __FILE__;
    const std::string path =
        named != nullptr ? named : here.substr(0, here.rfind('/')) + "/kernels.ptx";
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path + ": set KVMEM_GPU_KERNELS");
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
};

}  // namespace kvmem::test
