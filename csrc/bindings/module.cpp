#include "bindings/bind.hpp"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The core of kvmem. Use the names that the package exports.";
  module.attr("__version__") = KVMEM_VERSION;
  kvmem::bindings::bind_errors(module);
  kvmem::bindings::bind_device(module);
  kvmem::bindings::bind_cuda(module);
  kvmem::bindings::bind_testing(module);
  kvmem::bindings::bind_pool(module);
  kvmem::bindings::bind_dlpack(module);
  kvmem::bindings::bind_layout(module);
  kvmem::bindings::bind_transfer(module);
  kvmem::bindings::bind_manager(module);
  kvmem::bindings::bind_index(module);
  kvmem::bindings::bind_cache(module);
  module.def("_set_exiting", &kvmem::bindings::note_python_exits);
}
