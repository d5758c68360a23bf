#include "device/cuda/cuda_status.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "base/error.hpp"

namespace kvmem::cuda {

namespace {

std::string visible_devices() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible != nullptr ? text("CUDA_VISIBLE_DEVICES is '", visible, "'")
                            : std::string("CUDA_VISIBLE_DEVICES is not set");
}

// What to do about a set-up that is broken.
const char* advice(Error error) {
  switch (error) {
    case stub_library:
      return "the libcuda.so.1 that was found is the toolkit's stub, not the driver: take its "
             "folder "
             "out of LD_LIBRARY_PATH";
    case initialization_error:
      return "the driver could not be initialised: in a forked child of a process that used CUDA "
             "it never can be (use spawn); else see whether nvidia-smi works and the device nodes "
             "/dev/nvidia* are there";
    case system_not_ready:
      return "the system is not ready: on machines with NVSwitch the fabric manager must run";
    case system_driver_mismatch:
      return "the driver's library and the kernel module are of different releases: reboot after "
             "an update, or give the container the host's library";
    case devices_unavailable:
      return "every device is in use by another process, or in a mode that forbids use";
    case unknown:
      return "the driver does not say why: see whether nvidia-smi works, the kernel log, and "
             "whether the module nvidia-uvm is loaded";
    default:
      return "see whether nvidia-smi works";
  }
}

std::string runtime_text(const Cudart& runtime) {
  return text("CUDA runtime ", version_text(runtime.version), " (", runtime.path, ")");
}

std::string sentence_of(const Status& status) {
  const Cudart& runtime = *status.runtime;
  const std::string driver = version_text(status.driver_version);
  switch (status.usability) {
    case Usability::usable:
      return text(runtime_text(runtime), ", driver for CUDA ", driver, ", ", status.device_count,
                  status.device_count == 1 ? " device" : " devices");
    case Usability::no_driver:
      return text("no NVIDIA driver: libcuda.so.1 was not found by the ", runtime_text(runtime));
    case Usability::no_device:
      return text("the NVIDIA driver (CUDA ", driver,
                  ") shows no GPU to this process: none is there, ", "or they are hidden; ",
                  visible_devices());
    case Usability::driver_too_old:
      return text("the NVIDIA driver is for CUDA ", driver, ", too old for the ",
                  runtime_text(runtime), ": update the driver",
                  runtime.version >= 13000
                      ? " to release 580 or newer, or install an older runtime "
                        "(nvidia-cuda-runtime-cu12)"
                      : " to release 525 or newer");
    default:
      return text("CUDA is broken here: ", runtime.call.get_error_name(status.error), " (",
                  status.error, "): ", advice(status.error), "; ", runtime_text(runtime));
  }
}

Usability usability_of(const Status& status) {
  switch (status.error) {
    case success:
      return status.device_count > 0 ? Usability::usable : Usability::no_device;
    case no_device_found:
      return Usability::no_device;
    case insufficient_driver:
      return status.driver_version == 0 ? Usability::no_driver : Usability::driver_too_old;
    default:
      return Usability::broken;
  }
}

}  // namespace

Status examine(std::shared_ptr<const Cudart> runtime) {
  Status status;
  status.runtime = std::move(runtime);
  const Functions& call = status.runtime->call;
  const bool was_clean = call.peek_at_last_error() == success;
  if (call.driver_get_version(&status.driver_version) != success) status.driver_version = 0;
  status.error = call.get_device_count(&status.device_count);
  if (status.error != success) status.device_count = 0;
  if (was_clean) static_cast<void>(call.get_last_error());  // not left for somebody else to find
  status.usability = usability_of(status);
  status.sentence = sentence_of(status);
  return status;
}

Status find_cuda(const std::vector<std::string>& wheels) {
  CudartSearch search(wheels);
  std::optional<Status> first;
  while (auto runtime = search.next()) {
    Status status = examine(std::move(runtime));
    // Another runtime may be old enough for the driver. All else it would say as well.
    if (status.usability != Usability::driver_too_old) return status;
    if (!first) first = std::move(status);
  }
  if (first) return *first;
  Status none;
  none.sentence = text(
      "no CUDA runtime was found: install nvidia-cuda-runtime, or name a libcudart.so in "
      "KVMEM_CUDART_PATH",
      search.why().empty() ? "" : "\n", search.why());
  return none;
}

DeviceFacts facts_of(const Cudart& runtime, int ordinal) {
  const Functions& call = runtime.call;
  const bool was_clean = call.peek_at_last_error() == success;
  const auto number = [&](Attribute attribute) -> std::optional<int> {
    int value = 0;
    if (call.device_get_attribute(&value, attribute, ordinal) != success) return std::nullopt;
    return value;
  };
  const auto flag = [&](Attribute attribute) -> std::optional<bool> {
    const auto value = number(attribute);
    return value ? std::optional<bool>(*value != 0) : std::nullopt;
  };
  DeviceFacts facts;
  facts.ordinal = ordinal;
  char bus_id[32] = "";
  if (call.device_get_pci_bus_id(bus_id, sizeof bus_id, ordinal) == success) {
    facts.pci_bus_id = bus_id;
    std::ranges::transform(facts.pci_bus_id, facts.pci_bus_id.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  }
  const auto major = number(compute_capability_major), minor = number(compute_capability_minor);
  if (major && minor) facts.compute_capability = 10 * *major + *minor;
  facts.copy_engines = number(async_engine_count);
  facts.numa_node = number(host_numa_id);
  if (!facts.numa_node || *facts.numa_node < 0) facts.numa_node = numa_node_of(facts.pci_bus_id);
  facts.integrated = flag(integrated);
  constexpr int exclusive_process_mode = 3;
  const auto mode = number(compute_mode);
  if (mode) facts.exclusive_process = *mode == exclusive_process_mode;
  facts.concurrent_kernels = flag(concurrent_kernels);
  facts.unified_addressing = flag(unified_addressing);
  facts.stream_priorities = flag(stream_priorities);
  facts.pageable_memory_access = flag(pageable_memory_access);
  facts.uses_host_page_tables = flag(pageable_memory_uses_host_page_tables);
  facts.can_use_host_pointer = flag(can_use_host_pointer);
  facts.host_register = flag(host_register_supported);
  facts.host_register_read_only = flag(host_register_read_only);
  facts.mps = flag(mps_enabled);
  if (was_clean) static_cast<void>(call.get_last_error());
  return facts;
}

std::optional<int> numa_node_of(const std::string& pci_bus_id, const std::string& root) {
  if (pci_bus_id.empty()) return std::nullopt;
  std::ifstream file(text(root, "sys/bus/pci/devices/", pci_bus_id, "/numa_node"));
  int node = -1;
  if (!(file >> node) || node < 0)
    return std::nullopt;  // the kernel says -1 where it does not know
  return node;
}

std::string driver_release(const std::string& root) {
  std::ifstream file(text(root, "proc/driver/nvidia/version"));
  std::string word;
  while (file >> word) {
    const bool is_release = word.find('.') != std::string::npos &&
                            word.find_first_not_of("0123456789.") == std::string::npos &&
                            word.front() != '.';
    if (is_release) return word;
  }
  return {};
}

}  // namespace kvmem::cuda
