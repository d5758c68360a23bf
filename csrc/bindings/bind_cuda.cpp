// CUDA as Python sees it: whether it can be used here, what its devices are, and opening one.
// Nothing is loaded before the first call.
#include "bindings/bind.hpp"
#include "device/cuda/cuda_device.hpp"
#include "device/cuda/cuda_status.hpp"

namespace kvmem::bindings {

namespace {

const char* name_of(cuda::Usability usability) {
  switch (usability) {
    case cuda::Usability::usable:
      return "usable";
    case cuda::Usability::no_runtime:
      return "no_runtime";
    case cuda::Usability::no_driver:
      return "no_driver";
    case cuda::Usability::no_device:
      return "no_device";
    case cuda::Usability::driver_too_old:
      return "driver_too_old";
    case cuda::Usability::broken:
      return "broken";
  }
  return "";
}

py::object capability(const std::optional<int>& number) {  // 90 is "9.0"
  if (!number) return py::none();
  return py::str(text(*number / 10, ".", *number % 10));
}

void add_facts(py::dict& into, const cuda::DeviceFacts& facts) {
  into["pci_bus_id"] = facts.pci_bus_id;
  into["compute_capability"] = capability(facts.compute_capability);
  into["numa_node"] = facts.numa_node;
  into["integrated"] = facts.integrated;
  into["exclusive_process"] = facts.exclusive_process;
  into["concurrent_kernels"] = facts.concurrent_kernels;
  into["unified_addressing"] = facts.unified_addressing;
  into["stream_priorities"] = facts.stream_priorities;
  into["pageable_memory_access"] = facts.pageable_memory_access;
  into["uses_host_page_tables"] = facts.uses_host_page_tables;
  into["can_use_host_pointer"] = facts.can_use_host_pointer;
  into["host_register"] = facts.host_register;
  into["host_register_read_only"] = facts.host_register_read_only;
  into["mps"] = facts.mps;
}

py::dict device_facts(const cuda::Status& status, int ordinal) {
  if (!status.runtime) throw DeviceUnavailable(status.sentence);
  const cuda::DeviceFacts facts = [&] {
    const Unlocked unlocked;
    return cuda::facts_of(*status.runtime, ordinal);
  }();
  py::dict made;
  made["copy_engines"] = facts.copy_engines;
  add_facts(made, facts);
  return made;
}

std::unique_ptr<PyDevice> open_cuda(const cuda::Status& status, int ordinal, bool batch,
                                    std::size_t max_descriptors,
                                    std::vector<std::string> no_batch_drivers) {
  if (status.usability != cuda::Usability::usable) throw DeviceUnavailable(status.sentence);
  cuda::Options options;
  options.ordinal = ordinal;
  options.batch = batch;
  options.max_descriptors = max_descriptors;
  options.no_batch_drivers = std::move(no_batch_drivers);
  auto runtime = [&] {
    const Unlocked unlocked;
    return Runtime::make(cuda::make_cuda_device(status.runtime, options));
  }();
  return std::make_unique<PyDevice>(PyDevice{std::move(runtime), nullptr});
}

void bind_status(py::module_& module) {
  const auto of_runtime = [](auto member) {
    return [member](const cuda::Status& self) {  // by value
      const cuda::Cudart none;
      return (self.runtime ? *self.runtime : none).*member;
    };
  };
  py::class_<cuda::Status>(module, "_CudaStatus")
      .def_property_readonly("usability",
                             [](const cuda::Status& self) { return name_of(self.usability); })
      .def_property_readonly("absent", &cuda::Status::absent)
      .def_readonly("error", &cuda::Status::error)
      .def_readonly("sentence", &cuda::Status::sentence)
      .def_property_readonly("runtime_path", of_runtime(&cuda::Cudart::path))
      .def_property_readonly("runtime_found_by", of_runtime(&cuda::Cudart::found_by))
      .def_property_readonly("runtime_version", of_runtime(&cuda::Cudart::version))
      .def_readonly("driver_version", &cuda::Status::driver_version)
      .def_readonly("device_count", &cuda::Status::device_count)
      .def("device_facts", &device_facts, py::arg("ordinal"));
}

}  // namespace

void add_cuda_info(py::dict& facts, const Device& device) {
  const auto* const found = dynamic_cast<const cuda::CudaDevice*>(&device);
  if (found == nullptr) return;
  add_facts(facts, found->facts());
  facts["copy_path"] = found->copy_path();
  facts["runtime_path"] = found->runtime().path;
  facts["runtime_found_by"] = found->runtime().found_by;
  facts["runtime_version"] = cuda::version_text(found->runtime().version);
}

void bind_cuda(py::module_& module) {
  bind_status(module);
  module.def(
      "_find_cuda",
      [](const std::vector<std::string>& wheels) {
        const Unlocked unlocked;
        return cuda::find_cuda(wheels);
      },
      py::arg("wheels"));
  module.def("_driver_release", &cuda::driver_release, py::arg("root"));
  py::reinterpret_borrow<py::class_<PyDevice>>(module.attr("Device"))
      .def(py::init(&open_cuda), py::kw_only(), py::arg("cuda"), py::arg("ordinal"),
           py::arg("batch"), py::arg("max_descriptors"), py::arg("no_batch_drivers"));
}

}  // namespace kvmem::bindings
