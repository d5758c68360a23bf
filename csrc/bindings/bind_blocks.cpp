#include <cstring>

#include "base/check.hpp"
#include "bindings/bind.hpp"

namespace kvmem::bindings {

namespace {

PyBlocks part(const PyBlocks& self, const py::slice& range) {
  py::ssize_t start = 0, stop = 0, step = 0, length = 0;
  const auto size = static_cast<py::ssize_t>(self.held().size());
  if (!range.compute(size, &start, &stop, &step, &length)) throw py::error_already_set();
  KVMEM_EXPECTS(step == 1, "host blocks are sliced with step 1, not ", step);
  KVMEM_EXPECTS(length > 0, "a slice of host blocks needs at least one block");
  return {self.runtime,
          self.blocks.share(static_cast<std::size_t>(start), static_cast<std::size_t>(length))};
}

py::array block_view(const PyBlocks& self, const py::object& index) {
  const std::size_t i = index_argument(index, self.held().size());
  expect_bytes("a view of a block", self.runtime->device());
  std::byte* const data = self.blocks.data(i);
  const std::size_t bytes = self.blocks.block_bytes();
  const py::object holder = py::cast(PyBlocks{self.runtime, self.blocks.share(i, 1)});
  if (!holder) throw py::error_already_set();  // no memory
  return bytes_view(data, bytes, holder);
}

py::object item(const PyBlocks& self, const py::object& index) {
  if (!py::isinstance<py::slice>(index)) return block_view(self, index);
  py::object made = py::cast(part(self, py::reinterpret_borrow<py::slice>(index)));
  if (!made) throw py::error_already_set();  // no memory
  return made;
}

py::array gather(const PyBlocks& self, const py::object& out) {
  // Held while the GIL is not: another thread may release `self`.
  const HostBlocks blocks = self.held().share();
  expect_bytes("gather", self.runtime->device());
  const auto rows = static_cast<py::ssize_t>(blocks.size());
  const auto columns = static_cast<py::ssize_t>(blocks.block_bytes());
  py::array target;
  if (out.is_none()) {
    target = py::array_t<std::uint8_t>({rows, columns});
  } else {
    KVMEM_EXPECTS(py::isinstance<py::array>(out), "out is not an array");
    target = out;
    KVMEM_EXPECTS(target.dtype().is(py::dtype::of<std::uint8_t>()) && target.ndim() == 2 &&
                      target.shape(0) == rows && target.shape(1) == columns &&
                      (target.flags() & py::array::c_style) != 0 && target.writeable(),
                  "out must be a writeable C-contiguous uint8 array of ", rows, " x ", columns);
  }
  auto* const data = static_cast<std::byte*>(target.mutable_data());
  const Unlocked unlocked;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::memcpy(data + i * blocks.block_bytes(), blocks.data(i), blocks.block_bytes());
  }
  return target;
}

void release(PyBlocks& self, const py::object& after) {
  static_cast<void>(self.held());
  if (after.is_none()) {
    self.blocks.release();
    return;
  }
  const Ordered order = after_argument(after);
  KVMEM_EXPECTS(order.transfers.empty(),
                "release(after=) takes streams and events; a transfer holds its blocks itself");
  HostBlocks blocks = std::move(self.blocks);  // ours alone while the GIL is released
  try {
    const Unlocked unlocked;
    std::vector<Runtime::Mark> marks;
    for (const StreamHandle stream : order.streams)
      marks.push_back(self.runtime->mark_stream(stream));
    for (const EventHandle event : order.events) marks.push_back(self.runtime->mark_event(event));
    self.runtime->release_after(blocks, marks);
  } catch (...) {
    self.blocks = std::move(blocks);  // nothing was released
    throw;
  }
}

// Kept for as long as the process lives, as the type is.
PyObject* release_slowly = nullptr;

PyObject* release_now(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                      PyObject* names) {
  PyBlocks& held = LightType<PyBlocks>::of(self);
  const bool plain = count == 0 && names == nullptr;
  if (!plain || held.blocks.empty() || held.mark.forked())
    return call_slowly(release_slowly, self, arguments, count, names);
  held.blocks.release();
  Py_RETURN_NONE;
}

PyMethodDef hot_methods[] = {
    fast_method("release", &release_now,
                "release($self, after=None)\n--\n\n"
                "Lets go; the blocks go home unless somebody else holds them. With `after` (a\n"
                "stream, an event, a list of them): when the device has reached that point. A\n"
                "second release raises AlreadyReleased."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_blocks(py::module_& module) {
  using Type = LightType<PyBlocks>;
  Type::make(module, "kvmem._core.HostBlocks",
             "One holder of a few slots of a pool. They go home when the last holder lets go; a\n"
             "copy in flight is a holder. Also a context manager.",
             hot_methods);
  release_slowly = py::cpp_function(&release, py::name("release"), py::arg("self"),
                                    py::arg("after") = py::none())
                       .release()
                       .ptr();
  Type::def("__len__", [](const PyBlocks& self) { return self.blocks.size(); });
  Type::def_property(
      "indices", [](const PyBlocks& self) { return slots_array(self.held().slots()); },
      "int64[count]: the slots, a copy.");
  Type::def("__getitem__", &item, py::arg("index"),
            "uint8[block_bytes], zero-copy; the view holds that block for as long as it lives.\n"
            "Of a slice: HostBlocks, a further holder of those.");
  Type::def("gather", &gather, py::arg("out") = py::none(),
            "A copy of the bytes: uint8[count, block_bytes].");
  Type::def(
      "share", [](const PyBlocks& self) { return PyBlocks{self.runtime, self.held().share()}; },
      "A second holder of the same blocks.");
  Type::def_property("released", [](const PyBlocks& self) { return self.blocks.empty(); });
  Type::def("__enter__", [](const py::object& self) { return self; });
  Type::def("__exit__", [](PyBlocks& self, const py::args&) { self.blocks.release(); });
}

}  // namespace kvmem::bindings
