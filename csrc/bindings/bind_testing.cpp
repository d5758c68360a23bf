// What kvmem.testing is made of: the clock of a device, and the controls of a virtual one.
#include <algorithm>
#include <array>
#include <utility>

#include "base/check.hpp"
#include "bindings/bind.hpp"
#include "device/virtual_device.hpp"

namespace kvmem::bindings {

namespace {

constexpr double longest_advance = 1e9;  // seconds

double in_seconds(Nanoseconds time) { return static_cast<double>(time) * 1e-9; }

VirtualDevice& virtual_device(const char* call, const PyDevice& device) {
  device.mark.expect_same_process("the device");
  auto* const found = dynamic_cast<VirtualDevice*>(&device.runtime->device());
  KVMEM_EXPECTS(found != nullptr, call, " is for a virtual device, not for '",
                device.runtime->device().info().name, "'");
  return *found;
}

bool is_word(py::handle value, const char* word) {
  return PyUnicode_Check(value.ptr()) && PyUnicode_CompareWithASCIIString(value.ptr(), word) == 0;
}

DeviceCall call_argument(py::handle name) {
  constexpr std::array<std::pair<const char*, DeviceCall>, 11> calls{{
      {"allocate", DeviceCall::allocate},
      {"pin", DeviceCall::pin},
      {"create_stream", DeviceCall::create_stream},
      {"stream_id", DeviceCall::stream_id},
      {"create_event", DeviceCall::create_event},
      {"record", DeviceCall::record},
      {"wait", DeviceCall::wait},
      {"query", DeviceCall::query},
      {"event_time", DeviceCall::event_time},
      {"copy", DeviceCall::copy},
      {"any", DeviceCall::any},
  }};
  std::string names;
  for (const auto& [known, call] : calls) {
    if (is_word(name, known)) return call;
    names += text(names.empty() ? "'" : ", '", known, "'");
  }
  throw InvalidArgument(text("call is ", shown(name), ", one of ", names));
}

Fault fault_argument(py::handle how) {
  if (is_word(how, "refused")) return Fault::refused;
  if (is_word(how, "in_flight")) return Fault::in_flight;
  KVMEM_EXPECTS(is_word(how, "lost"), "how is ", shown(how),
                ", one of 'refused', 'in_flight' and 'lost'");
  return Fault::lost;
}

// From one time at which something happens to the next, and what ended is reaped and what it made
// room for submitted at that time, not at the end.
void advance(const PyDevice& device, const py::object& seconds) {
  VirtualDevice& clock = virtual_device("advance()", device);
  const double by = seconds_argument("seconds", seconds);
  KVMEM_EXPECTS(by <= longest_advance, "seconds is ", by, ", at most ", longest_advance);
  const Nanoseconds now = clock.now();
  KVMEM_EXPECTS(nanoseconds(by) <= VirtualDevice::latest - now, "seconds is ", by,
                ": the clock is at ", in_seconds(now), " s and ends at ",
                in_seconds(VirtualDevice::latest), " s");
  const Nanoseconds until = now + nanoseconds(by);
  const Unlocked unlocked;
  const Runtime::Interrupt interrupt = signals();
  for (;;) {
    device.runtime->advance();
    const auto next = clock.next_time();
    if (!next || *next > until) break;
    clock.advance(std::max<Nanoseconds>(*next - clock.now(), 0));
    interrupt();
  }
  clock.advance(std::max<Nanoseconds>(until - clock.now(), 0));
  device.runtime->advance();
  interrupt();
}

bool step(const PyDevice& device) {
  VirtualDevice& clock = virtual_device("step()", device);
  const Unlocked unlocked;
  device.runtime->advance();
  const bool ended = clock.step();
  device.runtime->advance();
  signals()();
  return ended;
}

void lose(const PyDevice& device) {
  VirtualDevice& lost = virtual_device("lose()", device);
  const Unlocked unlocked;
  lost.lose();
  device.runtime->advance();
}

}  // namespace

void bind_testing(py::module_& module) {
  const auto device = py::arg("device");
  // As an extension module does that is not careful, for the whole process.
  module.def("_translate_all_exceptions", [] {
    py::register_exception_translator([](std::exception_ptr thrown) {
      try {
        if (thrown) std::rethrow_exception(thrown);
      } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
      }
    });
  });
  module.def(
      "_now",
      [](const PyDevice& self) {
        self.mark.expect_same_process("the device");
        return in_seconds(self.runtime->device().now());
      },
      device);
  module.def("_advance", &advance, device, py::arg("seconds"));
  module.def("_step", &step, device);
  module.def(
      "_fail_nth",
      [](const PyDevice& self, const py::object& call, const py::object& nth, const py::object& how,
         const py::object& times) {
        virtual_device("fail_nth()", self)
            .fail_nth(call_argument(call), size_argument("nth", nth), fault_argument(how),
                      size_argument("times", times));
      },
      device, py::arg("call"), py::arg("nth"), py::arg("how"), py::arg("times"));
  module.def(
      "_forget_faults",
      [](const PyDevice& self) { virtual_device("forget_faults()", self).forget_faults(); },
      device);
  module.def("_lose", &lose, device);
  module.def(
      "_hold_copies",
      [](const PyDevice& self, const py::object& count) {
        virtual_device("hold_copies()", self).hold_copies(size_argument("count", count));
      },
      device, py::arg("count"));
  module.def(
      "_release_copies",
      [](const PyDevice& self) { virtual_device("release_copies()", self).release_copies(); },
      device);
  module.def(
      "_may_touch",
      [](const PyDevice& self, const py::object& address, const py::object& nbytes) {
        const auto* const base = reinterpret_cast<const void*>(size_argument("address", address));
        return virtual_device("may_touch()", self).may_touch(base, size_argument("nbytes", nbytes));
      },
      device, py::arg("address"), py::arg("nbytes"));
}

}  // namespace kvmem::bindings
