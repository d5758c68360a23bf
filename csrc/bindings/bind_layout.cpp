#include "bindings/bind.hpp"

namespace kvmem::bindings {

namespace {

Region make_region(const py::object& address, const py::object& stride_bytes,
                   const py::object& payload_bytes, const py::object& block_count,
                   const std::string& memory, const py::object& stage) {
  return {size_argument("address", address),
          size_argument("stride_bytes", stride_bytes),
          size_argument("payload_bytes", payload_bytes),
          size_argument("block_count", block_count),
          memory == "cuda" ? "cuda:0" : memory,
          static_cast<std::int64_t>(size_argument("stage", stage, 0))};
}

}  // namespace

void bind_layout(py::module_& module) {
  py::class_<Region>(
      module, "Region",
      "The segments of all blocks in one allocation: block i's segment stands at address +\n"
      "i * stride_bytes and has payload_bytes. `stage` is the step of a restore it belongs to.")
      .def(py::init(&make_region), py::arg("address"), py::arg("stride_bytes"),
           py::arg("payload_bytes"), py::arg("block_count"), py::arg("memory") = "host",
           py::arg("stage") = 0)
      .def_readonly("address", &Region::address)
      .def_readonly("stride_bytes", &Region::stride_bytes)
      .def_readonly("payload_bytes", &Region::payload_bytes)
      .def_readonly("block_count", &Region::block_count)
      .def_readonly("memory", &Region::memory)
      .def_readonly("stage", &Region::stage);

  py::class_<KVLayout, std::shared_ptr<KVLayout>>(module, "KVLayout")
      .def(py::init<std::vector<Region>>(), py::arg("regions"))
      .def_property_readonly(
          "regions",
          [](const KVLayout& self) {
            return std::vector<Region>(self.regions().begin(), self.regions().end());
          },
          "As declared.")
      .def_property_readonly(
          "stages",
          [](const KVLayout& self) {
            return std::vector<std::int64_t>(self.stages().begin(), self.stages().end());
          },
          "The distinct stages, ascending.")
      .def_property_readonly("block_bytes", &KVLayout::block_bytes,
                             "Payload of one block, all regions.")
      .def_property_readonly("block_count", &KVLayout::block_count)
      .def_property_readonly("smallest_segment_bytes", &KVLayout::smallest_segment_bytes)
      .def_property_readonly("memory", &KVLayout::memory);
}

}  // namespace kvmem::bindings
