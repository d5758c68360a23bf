// Can CUDA be used here, and if not, why? Each reason is told apart from the others, because "auto"
// may fall back to the host for some of them and must not for others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/cuda/cudart.hpp"

namespace kvmem::cuda {

enum class Usability : std::uint8_t {
  usable,
  no_runtime,      // no libcudart was found
  no_driver,       // no libcuda.so.1
  no_device,       // a driver, and no GPU that this process may see
  driver_too_old,  // for the runtime that was found
  broken,          // anything else that the runtime says: the set-up must be mended
};

struct Status {
  Usability usability = Usability::no_runtime;
  Error error = success;                  // what counting the devices gave
  std::string sentence;                   // what is the matter and what helps; for people
  std::shared_ptr<const Cudart> runtime;  // null: none was found
  int driver_version = 0;                 // what the driver supports; 0: no driver
  int device_count = 0;

  // The two reasons for which "auto" is the host: there is nothing to use.
  [[nodiscard]] bool absent() const noexcept {
    return usability == Usability::no_runtime || usability == Usability::no_driver ||
           usability == Usability::no_device;
  }
};

// Of that runtime. Makes no context.
[[nodiscard]] Status examine(std::shared_ptr<const Cudart> runtime);

// Of this process: what the first runtime of a search says, but for one that is too new for the
// driver, behind which the others are tried. Looks anew each time, some microseconds once the
// library is loaded. Throws DeviceUnavailable for a KVMEM_CUDART_PATH that cannot be loaded.
[[nodiscard]] Status find_cuda(const std::vector<std::string>& wheels);

// What can be asked of a device without making a context on it. Attributes that the runtime does
// not know are absent.
struct DeviceFacts {
  int ordinal = 0;
  std::string pci_bus_id;                 // "0000:17:00.0"; empty where the runtime does not say
  std::optional<int> compute_capability;  // 90 is 9.0
  std::optional<int> copy_engines;
  std::optional<int> numa_node;  // of the host memory closest to it; absent where unknown
  std::optional<bool> integrated, exclusive_process, concurrent_kernels, unified_addressing,
      stream_priorities, pageable_memory_access, uses_host_page_tables, can_use_host_pointer,
      host_register, host_register_read_only, mps;
};
[[nodiscard]] DeviceFacts facts_of(const Cudart& runtime, int ordinal);

// What the kernel says of a PCI device.
[[nodiscard]] std::optional<int> numa_node_of(const std::string& pci_bus_id,
                                              const std::string& root = "/");

// Of the kernel module, "580.105.08"; empty where there is none.
[[nodiscard]] std::string driver_release(const std::string& root = "/");

}  // namespace kvmem::cuda
