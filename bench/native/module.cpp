// kvmem_bench: what bench/ measures that Python is too slow to drive. Every call does its work with
// the GIL released and does not time it; the harness does.
#include <pybind11/pybind11.h>

#include "batch_bench.hpp"
#include "copy_bench.hpp"
#include "copy_list.hpp"
#include "disk_bench.hpp"
#include "map_bench.hpp"
#include "pool_bench.hpp"

namespace py = pybind11;

namespace {

using namespace kvmem::bench;
using Unlocked = py::call_guard<py::gil_scoped_release>;

void bind_pool(py::module_& module) {
  py::register_exception<NotInstalled>(module, "NotInstalled");
  py::class_<PoolBench>(module, "PoolChurn")
      .def(py::init([](const std::string& contender, unsigned threads, std::uint32_t live,
                       std::uint32_t capacity, std::size_t block_bytes) {
             PoolSetup setup;
             setup.threads = threads;
             setup.live = live;
             setup.capacity = capacity;
             setup.block_bytes = block_bytes;
             return make_pool_bench(contender, setup);
           }),
           py::arg("contender"), py::kw_only(), py::arg("threads") = 1, py::arg("live") = 512,
           py::arg("capacity") = 4096, py::arg("block_bytes") = 4096)
      .def("run", &PoolBench::run, py::arg("operations"), Unlocked());
}

void bind_map(py::module_& module) {
  py::class_<BareMap>(module, "BareMap")
      .def(py::init<std::string_view>(), py::arg("keys"))
      .def("find", &BareMap::find, py::arg("keys"), Unlocked());
}

void bind_batch(py::module_& module) {
  py::class_<BatchBench>(module, "BatchBuild")
      .def(py::init<std::size_t, std::size_t, std::size_t, bool>(), py::kw_only(),
           py::arg("blocks"), py::arg("regions"), py::arg("segment_bytes"), py::arg("contiguous"))
      .def_property_readonly("segments", &BatchBench::segments)
      .def_property_readonly("descriptors", &BatchBench::descriptors)
      .def("build", &BatchBench::build, py::arg("times"), Unlocked())
      .def("by_hand", &BatchBench::by_hand, py::arg("times"), Unlocked());
}

void bind_copies(py::module_& module) {
  py::class_<CopyList>(module, "CopyList")
      .def(py::init<>())
      .def("add", &CopyList::add, py::arg("target"), py::arg("source"), py::arg("nbytes"))
      .def("with_kernel", &CopyList::with_kernel, Unlocked())
      .def("with_memcpy", &CopyList::with_memcpy, Unlocked());
  py::class_<ScatteredCopy>(module, "ScatteredCopy")
      .def(py::init<std::size_t, std::size_t, unsigned, unsigned>(), py::arg("segment_bytes"),
           py::arg("nbytes"), py::kw_only(), py::arg("threads"), py::arg("seed") = 1)
      .def("copy_with_memcpy", &ScatteredCopy::copy_with_memcpy, Unlocked())
      .def("copy_with_nt", &ScatteredCopy::copy_with_nt, Unlocked())
      .def("copy_with_kvmem", &ScatteredCopy::copy_with_kvmem, Unlocked())
      .def("copy_with_device", &ScatteredCopy::copy_with_device, Unlocked())
      .def("copy_with_crc", &ScatteredCopy::copy_with_crc, Unlocked())
      .def("memcpy_then_crc", &ScatteredCopy::memcpy_then_crc, Unlocked())
      .def("crc_only", &ScatteredCopy::crc_only, Unlocked())
      .def("clear_targets", &ScatteredCopy::clear_targets, Unlocked())
      .def("all_copied", &ScatteredCopy::all_copied, Unlocked());
}

void bind_disk(py::module_& module) {
  py::class_<DiskBench>(module, "DiskBlocks", py::buffer_protocol())  // of the blocks
      .def(py::init<const std::string&, std::size_t, std::uint32_t, unsigned>(), py::arg("folder"),
           py::kw_only(), py::arg("block_bytes"), py::arg("blocks"), py::arg("depth"))
      .def("tier_write", &DiskBench::tier_write, Unlocked())
      .def("tier_read", &DiskBench::tier_read, Unlocked())
      .def("raw_write", &DiskBench::raw_write, Unlocked())
      .def("raw_read", &DiskBench::raw_read, Unlocked())
      .def("raw_write_with_headers", &DiskBench::raw_write_with_headers, Unlocked())
      .def("fill", &DiskBench::fill, Unlocked())
      .def("clear", &DiskBench::clear, Unlocked())
      .def("holds", &DiskBench::holds, Unlocked())
      .def_property_readonly("direct", &DiskBench::direct)
      .def_buffer([](const DiskBench& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.buffers()),
                               static_cast<py::ssize_t>(self.bytes()));
      });
}

}  // namespace

PYBIND11_MODULE(kvmem_bench, module) {
  bind_pool(module);
  bind_map(module);
  bind_batch(module);
  bind_copies(module);
  bind_disk(module);
}
