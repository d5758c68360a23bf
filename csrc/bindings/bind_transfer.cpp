#include "base/check.hpp"
#include "bindings/bind_interest.hpp"

namespace kvmem::bindings {

const char* name_of(TransferKind kind) {
  return kind == TransferKind::offload ? "offload" : "restore";
}
const char* name_of(Priority priority) {
  return priority == Priority::demand ? "demand" : "background";
}
const char* name_of(TransferState state) {
  switch (state) {
    case TransferState::queued:
      return "queued";
    case TransferState::in_flight:
      return "in_flight";
    case TransferState::done:
      return "done";
    case TransferState::failed:
      return "failed";
    case TransferState::cancelled:
      return "cancelled";
  }
  return "";
}

py::object seconds(Nanoseconds ns) {
  if (ns < 0) return py::none();
  return py::float_(static_cast<double>(ns) * 1e-9);
}

namespace {

// ---- HostCopy ----

// Python's HostCopy: the core's, and where its blocks are at home.
struct PyCopy {
  Shared<Manager> manager;
  std::shared_ptr<HostCopy> copy;
};

}  // namespace

bool is_host_copy(py::handle value) { return py::isinstance<PyCopy>(value); }

const HostCopy& host_copy(py::handle value) {
  KVMEM_EXPECTS(is_host_copy(value), "copy is ", py::repr(value).cast<std::string>(),
                ", not a HostCopy");
  return *value.cast<PyCopy&>().copy;
}

namespace {

PyCopy part(const PyCopy& self, std::size_t first, std::size_t count) {
  KVMEM_EXPECTS(count > 0, "a slice of a host copy needs at least one block");
  return {self.manager, std::make_shared<HostCopy>(self.copy->slice(first, count))};
}

PyCopy item(const PyCopy& self, const py::object& index) {
  const auto size = static_cast<py::ssize_t>(self.copy->size());
  if (py::isinstance<py::slice>(index)) {
    py::ssize_t start = 0, stop = 0, step = 0, length = 0;
    if (!py::reinterpret_borrow<py::slice>(index).compute(size, &start, &stop, &step, &length))
      throw py::error_already_set();
    KVMEM_EXPECTS(step == 1, "a host copy is sliced with step 1, not ", step);
    return part(self, static_cast<std::size_t>(start), static_cast<std::size_t>(length));
  }
  return part(self, index_argument(index, self.copy->size()), 1);
}

PyCopy concat(const py::sequence& copies) {
  KVMEM_EXPECTS(py::len(copies) > 0, "concat needs at least one host copy");
  Shared<Manager> manager;
  std::shared_ptr<const KVLayout> layout;
  std::vector<SlotIndex> slots;
  for (const py::object each : copies) {
    const HostCopy& copy = host_copy(each);
    const auto& its_manager = each.cast<PyCopy&>().manager;
    if (manager.get() == nullptr) {
      manager = its_manager;
      layout = copy.layout_ptr();
    }
    KVMEM_EXPECTS(its_manager.get() == manager.get(),
                  "concat: the host copies are of different managers");
    const auto more = copy.blocks().slots();
    slots.insert(slots.end(), more.begin(), more.end());
  }
  return {manager, std::make_shared<HostCopy>(layout, manager->pool()->share_indices(slots))};
}

void bind_host_copy(py::module_& module) {
  py::class_<PyCopy>(
      module, "HostCopy",
      "The result of a finished offload: blocks in host memory, in the order of the transfer, and "
      "what\n"
      "is needed to restore them. A holder of its blocks; a slice or a share is a further one.")
      .def("__len__", [](const PyCopy& self) { return self.copy->size(); })
      .def("__getitem__", &item, py::arg("index"),
           "A HostCopy of that block or slice, which holds it too.")
      .def(
          "share", [](const PyCopy& self) { return part(self, 0, self.copy->size()); },
          "A second holder.")
      .def_static("concat", &concat, py::arg("copies"),
                  "One HostCopy of the blocks of several, in that order; a further holder of each.")
      .def(
          "release", [](const PyCopy& self) { self.copy->release(); },
          "Lets go. A second release raises AlreadyReleased.")
      .def(
          "verify",
          [](const PyCopy& self) {
            // Held while the GIL is not: another thread may release `self`.
            const HostCopy held = self.copy->slice(0, self.copy->size());
            expect_bytes("verify", self.manager->runtime()->device());
            const Unlocked unlocked;
            return held.verify();
          },
          "Sums the blocks that have a checksum, now, and compares. How many those are; Corrupt "
          "for "
          "the first that\n"
          "differs.")
      .def_property_readonly("released", [](const PyCopy& self) { return self.copy->released(); })
      .def_property_readonly(
          "nbytes", [](const PyCopy& self) { return self.copy->nbytes(); }, "Payload bytes.")
      .def_property_readonly(
          "blocks",
          [](const PyCopy& self) {
            return PyBlocks{self.manager->runtime(), self.copy->blocks().share()};
          },
          "The blocks as HostBlocks: a further holder.")
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](const PyCopy& self, const py::args&) {
        if (self.copy->released()) return;
        try {
          self.copy->release();
        } catch (const Forked&) {
          // A with block of the parent's: there is nothing to let go of here.
        }
      });
}

// ---- Transfer ----

py::object result(const py::object& self) {
  auto& transfer = self.cast<Transfer&>();
  auto copy = [&] {
    const Unlocked unlocked;  // it may wait for another thread that asks the device
    return transfer.result();
  }();
  if (!copy) return py::none();
  // The same object every time, so that releasing it once is releasing it.
  if (!py::hasattr(self, "_result"))
    self.attr("_result") = PyCopy{transfer.job()->manager, std::move(copy)};
  return self.attr("_result");
}

void bind_ends(py::module_& module) {
  py::native_enum<CancelOutcome>(
      module, "CancelOutcome", "enum.Enum",
      "What cancel() found. The transfer ends exactly once all the same.")
      .value("not_submitted", CancelOutcome::not_submitted, "It ended cancelled, now.")
      .value("draining", CancelOutcome::draining,
             "It ends when what was submitted has been observed to end.")
      .value("already_done", CancelOutcome::already_done)
      .finalize();

  py::class_<Report>(module, "Report",
                     "How a tagged transfer ended: plain values that hold no block.")
      .def_readonly("id", &Report::id)
      .def_readonly("tag", &Report::tag)
      .def_property_readonly("kind", [](const Report& self) { return name_of(self.kind); })
      .def_property_readonly("state", [](const Report& self) { return name_of(self.state); })
      .def_readonly("error", &Report::error)
      .def("__repr__", [](const Report& self) {
        return text("Report(id=", self.id, ", kind=", name_of(self.kind),
                    ", state=", name_of(self.state), ")");
      });
}

}  // namespace

void bind_transfer(py::module_& module) {
  bind_host_copy(module);
  bind_ends(module);
  py::class_<Transfer, Shared<Transfer>> transfer(
      module, "Transfer", py::dynamic_attr(),
      "Interest in one offload or restore. Dropping it is always safe: the copy goes on, its "
      "blocks stay held until\n"
      "its end was observed, and a result that nobody can ask for goes home then.");
  transfer.def_property_readonly("id", [](const Transfer& self) { return self.job()->id; })
      .def_property_readonly("kind", [](const Transfer& self) { return name_of(self.job()->kind); })
      .def_property_readonly(
          "staged", [](const Transfer& self) { return self.job()->staged(); },
          "Whether it goes through the staging ring, because the pool is not pinned.")
      .def("result", &result,
           "An offload's HostCopy, the same object every time; None for a restore. NotDone before "
           "the end.");
  bind_interest(
      transfer,
      {.wait =
           "Waits for the end, in seconds. Raises the transfer's error (CopyFailed, DeviceLost, "
           "Cancelled) or TimedOut.",
       .wait_on =
           "Work queued on `stream` from now on runs after this transfer, or after that stage of "
           "it and those before.\n"
           "Raises the transfer's error if it has one by then; a later failure shows in its end "
           "alone."});
}

}  // namespace kvmem::bindings
