#include <limits>

#include "base/check.hpp"
#include "bindings/bind.hpp"

namespace kvmem::bindings {

py::array slots_array(std::span<const SlotIndex> slots) {
  py::array_t<std::int64_t> array(static_cast<py::ssize_t>(slots.size()));
  std::copy(slots.begin(), slots.end(), array.mutable_data());
  return array;
}

py::array bytes_view(std::byte* data, std::size_t bytes, const py::object& owner) {
  return py::array(py::dtype::of<std::uint8_t>(), {static_cast<py::ssize_t>(bytes)},
                   {py::ssize_t{1}}, data, owner);
}

py::dict slot_counts(const SlotCounts& counts) {
  py::dict slots;
  slots["capacity_slots"] = counts.capacity;
  slots["free_slots"] = counts.free;
  slots["held_slots"] = counts.held;
  slots["quarantined_slots"] = counts.quarantined;
  slots["poisoned_slots"] = counts.poisoned;
  return slots;
}

namespace {

Pin pin_argument(const std::string& pin) {
  if (pin == "auto") return Pin::automatic;
  if (pin == "required") return Pin::required;
  if (pin == "background") return Pin::background;
  KVMEM_EXPECTS(pin == "never", "pin is '", pin,
                "', one of 'auto', 'required', 'background' and 'never'");
  return Pin::never;
}

HugePages hugepages_argument(const std::string& hugepages) {
  if (hugepages == "never") return HugePages::never;
  if (hugepages == "try") return HugePages::attempt;
  KVMEM_EXPECTS(hugepages == "required", "hugepages is '", hugepages,
                "', one of 'never', 'try' and 'required'");
  return HugePages::required;
}

int descriptor_argument(const py::object& fd) {
  const std::size_t descriptor = size_argument("fd", fd, 0);
  KVMEM_EXPECTS(descriptor <= std::numeric_limits<int>::max(), "fd is ", descriptor,
                ", which is no descriptor");
  return static_cast<int>(descriptor);
}

std::unique_ptr<PyPool> make_pool(const PyDevice& device, const py::object& block_bytes,
                                  const py::object& capacity_bytes, const std::string& pin,
                                  double pin_bytes_per_second, const std::string& hugepages,
                                  std::optional<int> numa_node, bool shared,
                                  const py::object& progress, const py::object& attach) {
  PoolOptions options;
  options.block_bytes = size_argument("block_bytes", block_bytes);
  options.capacity_bytes = size_argument("capacity_bytes", capacity_bytes);
  options.pin = pin_argument(pin);
  options.pin_bytes_per_second = pin_bytes_per_second;
  options.region.hugepages = hugepages_argument(hugepages);
  options.region.numa_node = numa_node;
  options.region.shared = shared;
  if (!attach.is_none()) options.region.attach = descriptor_argument(attach);
  const Runtime::Interrupt interrupt = signals();
  options.region.progress = [&](std::size_t done, std::size_t total) {
    interrupt();
    if (progress.is_none()) return true;
    const Locked gil;
    return !progress(done, total).is(py::bool_(false));
  };
  auto pool = [&] {
    const Unlocked unlocked;
    return std::make_shared<BlockPool>(device.runtime->device_ptr(), options);
  }();
  return std::make_unique<PyPool>(PyPool{device.runtime, std::move(pool)});
}

std::optional<PyBlocks> try_acquire(const PyPool& self, const py::object& count) {
  const std::size_t wanted = size_argument("count", count);
  if (self.pool->free() < wanted) {
    // Some may have come back and only not been seen yet.
    drop_done_copies();
    const Unlocked unlocked;
    self.runtime->advance();
  }
  auto blocks = self.pool->try_acquire(wanted);
  if (!blocks) return std::nullopt;
  return PyBlocks{self.runtime, std::move(*blocks)};
}

PyBlocks acquire(const PyPool& self, const py::object& count, const py::object& timeout) {
  const std::size_t wanted = size_argument("count", count);
  drop_done_copies();
  const auto deadline = self.runtime->deadline_after(timeout_argument(timeout));
  HostBlocks blocks = [&] {
    const Unlocked unlocked;
    return self.runtime->acquire(*self.pool, wanted, deadline, signals());
  }();
  return {self.runtime, std::move(blocks)};
}

// ---- the common case of both: one small number, and the blocks are there ----

// Null without an error: it is not the common case.
PyObject* acquire_at_once(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                          PyObject* names) {
  if (count != 1 || names != nullptr || !PyLong_CheckExact(arguments[0])) return nullptr;
  // pybind11 keeps the one value of an object there; null before __init__.
  const auto* const object = reinterpret_cast<py::detail::instance*>(self);
  const auto* const pool =
      object->simple_layout ? static_cast<const PyPool*>(object->simple_value_holder[0]) : nullptr;
  if (pool == nullptr) return nullptr;
  int overflow = 0;
  const long long wanted = PyLong_AsLongLongAndOverflow(arguments[0], &overflow);
  try {
    if (wanted <= 0 || pool->pool->free() < static_cast<std::uint64_t>(wanted)) return nullptr;
    auto blocks = pool->pool->try_acquire(static_cast<std::size_t>(wanted));
    if (blocks) return LightType<PyBlocks>::create(PyBlocks{pool->runtime, std::move(*blocks)});
  } catch (...) {  // nothing was taken: it comes again, and is translated
  }
  return nullptr;
}

// Kept for as long as the process lives.
PyObject* try_acquire_slowly = nullptr;
PyObject* acquire_slowly = nullptr;

template <PyObject*& slowly>
PyObject* acquire_now(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                      PyObject* names) {
  PyObject* const blocks = acquire_at_once(self, arguments, count, names);
  if (blocks != nullptr || PyErr_Occurred()) return blocks;
  return call_slowly(slowly, self, arguments, count, names);
}

PyMethodDef try_acquire_method =
    fast_method("try_acquire", &acquire_now<try_acquire_slowly>,
                "try_acquire($self, count)\n--\n\n"
                "`count` blocks, or None when fewer are free or somebody waits. Raises "
                "InvalidArgument, Closed.");
PyMethodDef acquire_method = fast_method(
    "acquire", &acquire_now<acquire_slowly>,
    "acquire($self, count, timeout=None)\n--\n\n"
    "Waits in a FIFO, seconds. Raises PoolExhausted at the time-out, CapacityError at once "
    "when\n`count` can never be had.");

void bind_acquire(const py::class_<PyPool>& pool_type) {
  const auto add = [&](PyMethodDef& method) {
    pool_type.attr(method.ml_name) = py::reinterpret_steal<py::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(pool_type.ptr()), &method));
  };
  try_acquire_slowly =
      py::cpp_function(&try_acquire, py::name("try_acquire"), py::arg("self"), py::arg("count"))
          .release()
          .ptr();
  acquire_slowly = py::cpp_function(&acquire, py::name("acquire"), py::arg("self"),
                                    py::arg("count"), py::arg("timeout") = py::none())
                       .release()
                       .ptr();
  add(try_acquire_method);
  add(acquire_method);
}

py::dict pool_stats(const PyPool& self) {
  const PoolStats stats = self.pool->stats();
  py::dict facts = slot_counts(stats.slots);
  facts["peak_held_slots"] = stats.peak_held;
  facts["peak_quarantined_slots"] = stats.peak_quarantined;
  facts["waiters"] = stats.waiters;
  facts["acquired_slots"] = stats.acquired;
  facts["refused"] = stats.refused;
  facts["block_bytes"] = stats.block_bytes;
  facts["slot_bytes"] = stats.slot_bytes;
  facts["padding_bytes"] = stats.padding_bytes;
  facts["region_bytes"] = stats.region.bytes;
  facts["pinned_bytes"] = stats.region.pinned_bytes;
  facts["pin_error"] = stats.pin_error;
  facts["page_bytes"] = stats.region.page_bytes;
  facts["transparent_huge_pages"] = stats.region.transparent_huge_pages;
  facts["numa_node"] = stats.region.numa_node;
  facts["touch_seconds"] = stats.region.touch_seconds;
  return facts;
}

int pool_descriptor(const PyPool& self) {
  const int memfd = self.pool->stats().region.memfd;
  KVMEM_EXPECTS(memfd >= 0,
                "the memory of the pool has no descriptor: it was not made with "
                "shared=True");
  return memfd;
}

py::array arena_view(const py::object& self) {
  const BlockPool& pool = *self.cast<PyPool&>().pool;
  expect_bytes("BlockPool.array", self.cast<PyPool&>().runtime->device());
  return py::array(
      py::dtype::of<std::uint8_t>(),
      {static_cast<py::ssize_t>(pool.capacity()), static_cast<py::ssize_t>(pool.block_bytes())},
      {static_cast<py::ssize_t>(pool.slot_bytes()), py::ssize_t{1}}, pool.data(), self);
}

// A place in the pool's queue, for awaiting.
struct PyTicket {
  Shared<Runtime> runtime;
  Shared<BlockPool> pool;  // outlives the ticket
  std::optional<PoolTicket> ticket;
  PoolTicket& held() {
    if (!ticket) throw AlreadyReleased("the ticket was dropped");
    return *ticket;
  }
};

}  // namespace

void bind_pool(py::module_& module) {
  bind_blocks(module);
  py::class_<WakeList, std::shared_ptr<WakeList>>(module, "_WakeList")
      .def(py::init())
      .def_property_readonly("descriptor", &WakeList::descriptor)
      .def("drain", &WakeList::drain);
  py::class_<PyTicket>(module, "_PoolTicket")
      .def("granted", [](PyTicket& self) { return self.held().granted(); })
      .def("take", [](PyTicket& self) { return PyBlocks{self.runtime, self.held().take()}; })
      .def("drop", [](PyTicket& self) { self.ticket.reset(); });
  py::class_<PyPool> pool_type(module, "BlockPool");
  bind_acquire(pool_type);
  pool_type
      .def(py::init(&make_pool), py::arg("device"), py::kw_only(), py::arg("block_bytes"),
           py::arg("capacity_bytes"), py::arg("pin"), py::arg("pin_bytes_per_second"),
           py::arg("hugepages"), py::arg("numa_node"), py::arg("shared"), py::arg("progress"),
           py::arg("attach"))
      .def("_enqueue",
           [](const PyPool& self, const py::object& count, std::shared_ptr<WakeList> list,
              std::uint64_t token) {
             return std::make_unique<PyTicket>(PyTicket{
                 self.runtime, self.pool,
                 self.pool->enqueue(size_argument("count", count), Waker(std::move(list), token))});
           })
      .def_property_readonly("array", &arena_view,
                             "uint8[slots, block_bytes] view of the whole arena (row stride: slot "
                             "bytes). It keeps the\n"
                             "pool alive; what a row means is up to who holds the slot.")
      .def_property_readonly("block_bytes",
                             [](const PyPool& self) { return self.pool->block_bytes(); })
      .def_property_readonly("slot_bytes",
                             [](const PyPool& self) { return self.pool->slot_bytes(); })
      .def_property_readonly(
          "capacity", [](const PyPool& self) { return self.pool->capacity(); }, "In slots.")
      .def_property_readonly(
          "pinned", [](const PyPool& self) { return self.pool->pinned(); }, "All of it, by now.")
      .def("fileno", &pool_descriptor,
           "The descriptor of the memory of a shared or attached pool, for attach() in another "
           "process. It\n"
           "stays the pool's.")
      .def("stats", &pool_stats,
           "Slots by state, peaks, waiters, bytes by kind, and why pinning in the background ended "
           "early. A\n"
           "dict; every key of a number names its unit.")
      .def(
          "close",
          [](const PyPool& self) {
            self.mark.expect_same_process("the pool");
            self.pool->close();
          },
          "No more acquires; waiters are told; what is held stays good. Twice is fine.");
}

}  // namespace kvmem::bindings
