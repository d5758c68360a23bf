#include "device/cuda/cudart.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/error.hpp"

namespace kvmem::cuda {

namespace {

constexpr int oldest_version = 12000;

template <auto Member>
void store(Functions& functions, void* symbol) {
  functions.*Member =
      reinterpret_cast<std::remove_reference_t<decltype(functions.*Member)>>(symbol);
}

// A function that every runtime has is required; so is nothing outside its versions.
struct Row {
  const char* symbol;
  void (*store)(Functions&, void*);
  bool required = true;
  int from = 0, until = std::numeric_limits<int>::max();  // versions; `until` excluded
};

constexpr Row rows[] = {
    {"cudaGetDeviceCount", store<&Functions::get_device_count>},
    {"cudaSetDevice", store<&Functions::set_device>},
    {"cudaGetDevice", store<&Functions::get_device>},
    {"cudaDeviceGetAttribute", store<&Functions::device_get_attribute>},
    {"cudaDeviceGetPCIBusId", store<&Functions::device_get_pci_bus_id>},
    {"cudaDriverGetVersion", store<&Functions::driver_get_version>},
    {"cudaRuntimeGetVersion", store<&Functions::runtime_get_version>},
    {"cudaGetLastError", store<&Functions::get_last_error>},
    {"cudaPeekAtLastError", store<&Functions::peek_at_last_error>},
    {"cudaGetErrorName", store<&Functions::get_error_name>},
    {"cudaGetErrorString", store<&Functions::get_error_string>},
    {"cudaMalloc", store<&Functions::malloc>},
    {"cudaFree", store<&Functions::free>},
    {"cudaMemGetInfo", store<&Functions::mem_get_info>},
    {"cudaHostRegister", store<&Functions::host_register>},
    {"cudaHostUnregister", store<&Functions::host_unregister>},
    {"cudaPointerGetAttributes", store<&Functions::pointer_get_attributes>},
    {"cudaStreamCreateWithFlags", store<&Functions::stream_create_with_flags>},
    {"cudaStreamDestroy", store<&Functions::stream_destroy>},
    {"cudaStreamGetId", store<&Functions::stream_get_id>},
    {"cudaStreamGetDevice", store<&Functions::stream_get_device>, false},
    {"cudaStreamIsCapturing", store<&Functions::stream_is_capturing>},
    {"cudaStreamWaitEvent", store<&Functions::stream_wait_event>},
    {"cudaThreadExchangeStreamCaptureMode", store<&Functions::thread_exchange_capture_mode>},
    {"cudaEventCreateWithFlags", store<&Functions::event_create_with_flags>},
    {"cudaEventDestroy", store<&Functions::event_destroy>},
    {"cudaEventRecord", store<&Functions::event_record>},
    {"cudaEventQuery", store<&Functions::event_query>},
    {"cudaEventElapsedTime", store<&Functions::event_elapsed_time>},
    {"cudaMemcpyAsync", store<&Functions::memcpy_async>},
    // Its arguments changed with CUDA 13 under the same name. What CUDA 14 makes of them is not
    // known, so there it is not used.
    {"cudaMemcpyBatchAsync", store<&Functions::memcpy_batch_12>, false, 12080, 13000},
    {"cudaMemcpyBatchAsync", store<&Functions::memcpy_batch_13>, false, 13000, 14000},
};

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw DeviceUnavailable(text("the CUDA runtime ", path, " cannot be used: ", why));
}

// Where the loader found it.
std::string path_of(void* library, const std::string& asked) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return asked;
  return map->l_name != nullptr && *map->l_name != '\0' ? map->l_name : asked;
}

// The driver is no part of the runtime, which loads it when it is first asked for something.
void* driver_symbol(void* library, const char* name) {
  if (void* const own = dlsym(library, name)) return own;  // a runtime that is also the driver
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver != nullptr ? dlsym(driver, name) : nullptr;
}

// Also under the names that wheels give to the libraries which they bring along.
std::vector<std::string> loaded_runtimes() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
        const std::string file = path.substr(path.rfind('/') + 1);
        if (file.starts_with("libcudart") && file.find(".so") != std::string::npos)
          static_cast<std::vector<std::string>*>(found)->push_back(path);
        return 0;
      },
      &paths);
  return paths;
}

std::shared_ptr<const Cudart> load(const std::string& path, const std::string& found_by) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) refuse(path, dlerror());
  const std::string where = path_of(library, path);
  auto runtime = std::make_shared<Cudart>();
  runtime->path = where;
  runtime->found_by = found_by;
  auto* const version =
      reinterpret_cast<RuntimeGetVersion*>(dlsym(library, "cudaRuntimeGetVersion"));
  if (version == nullptr) refuse(where, "it has no cudaRuntimeGetVersion");
  if (version(&runtime->version) != success) refuse(where, "it does not say its version");
  if (runtime->version < oldest_version)
    refuse(where, text("it is CUDA ", version_text(runtime->version), ", older than ",
                       version_text(oldest_version)));
  for (const Row& row : rows) {
    if (runtime->version < row.from || runtime->version >= row.until) continue;
    void* const symbol = dlsym(library, row.symbol);
    if (symbol == nullptr && row.required) refuse(where, text("it has no ", row.symbol));
    row.store(runtime->call, symbol);
  }
  int driver = 0;
  static_cast<void>(
      runtime->call.driver_get_version(&driver));  // loads the driver, if there is one
  store<&Functions::primary_context_get_state>(
      runtime->call, driver_symbol(library, "cuDevicePrimaryCtxGetState"));
  return runtime;
}

}  // namespace

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

std::shared_ptr<const Cudart> load_cudart(const std::string& path) { return load(path, "path"); }

CudartSearch::CudartSearch(std::vector<std::string> wheels) {
  const char* const chosen = std::getenv("KVMEM_CUDART_PATH");
  if (chosen != nullptr && *chosen != '\0') {
    static_cast<void>(load(chosen, "KVMEM_CUDART_PATH"));  // it must load
    candidates_.push_back({chosen, "KVMEM_CUDART_PATH"});
    return;
  }
  for (std::string& path : loaded_runtimes()) candidates_.push_back({std::move(path), "process"});
  for (std::string& path : wheels) candidates_.push_back({std::move(path), "wheel"});
  for (const char* soname : {"libcudart.so.13", "libcudart.so.12"})
    candidates_.push_back({soname, "system"});
}

std::shared_ptr<const Cudart> CudartSearch::next() {
  while (tried_ < candidates_.size()) {
    const Candidate& candidate = candidates_[tried_++];
    try {
      return load(candidate.path, candidate.found_by);
    } catch (const DeviceUnavailable& error) {
      why_ += text(why_.empty() ? "" : "\n", error.what());
    }
  }
  return nullptr;
}

}  // namespace kvmem::cuda
