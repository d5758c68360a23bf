// What a caller does with his interest in something that ends once: a transfer, or one of a cache.
#pragma once

#include "bindings/bind.hpp"

namespace kvmem::bindings {

struct InterestWords {
  const char* wait;
  const char* wait_on;
};

template <class Interest>
void bind_interest(py::class_<Interest, Shared<Interest>>& type, const InterestWords& words) {
  type.def_property_readonly(
          "state", [](const Interest& self) { return name_of(self.state()); },
          "queued | in_flight | done | failed | cancelled. The last three are final.")
      .def("done", &Interest::done, "Whether it has ended, in whichever way.")
      .def(
          "wait",
          [](Interest& self, const py::object& timeout) {
            const auto limit = timeout_argument(timeout);
            const Unlocked unlocked;
            self.wait(limit, signals());
          },
          py::arg("timeout") = py::none(), words.wait)
      .def(
          "cancel",
          [](Interest& self) {
            const Unlocked unlocked;
            return self.cancel();
          },
          "Drops interest; returns at once with a CancelOutcome and frees nothing that a copy may "
          "touch.")
      .def(
          "wait_on",
          [](Interest& self, const py::object& stream, std::optional<std::int64_t> stage) {
            const StreamHandle handle = stream_argument(stream);
            const Unlocked unlocked;
            self.wait_on(handle, stage, signals());
          },
          py::arg("stream"), py::arg("stage") = py::none(), words.wait_on)
      .def("_unwake", &Interest::unwake)
      .def("_wake", [](Interest& self, std::shared_ptr<WakeList> list,
                       std::uint64_t token) { self.wake(std::move(list), token); })
      .def("_expect_done", &Interest::expect_done)
      .def("__await__", [](const py::object& self) -> py::object {
        return py::module_::import("kvmem._async").attr("wait")(self).attr("__await__")();
      });
}

}  // namespace kvmem::bindings
