#include <unordered_set>

#include "base/check.hpp"
#include "bindings/bind_stream.hpp"
#include "device/host_device.hpp"
#include "device/virtual_device.hpp"

namespace kvmem::bindings {

namespace {

// Every stream that Python holds; the GIL guards it. Never destroyed: streams may outlive the
// module.
std::unordered_set<PyStream*>& all_streams() {
  static auto* const streams = new std::unordered_set<PyStream*>;
  return *streams;
}

}  // namespace

void expect_bytes(const char* what, const Device& device) {
  KVMEM_EXPECTS(device.info().has_bytes, what,
                ": no bytes move on this device (move_bytes=False); ",
                "its memory is addresses only, and touching one would crash the process");
}

void drop_done_copies() {
  PyStream::Copies done;  // dropped when nothing is being walked any more: that runs Python code
  for (PyStream* const stream : all_streams()) {
    for (auto& copy : stream->take_done()) done.push_back(std::move(copy));
  }
}

PyStream::PyStream(Shared<Runtime> device_runtime, Stream own)
    : runtime(std::move(device_runtime)), stream(std::move(own)) {
  all_streams().insert(this);
}

PyStream::~PyStream() {
  all_streams().erase(this);
  static_cast<void>(take_done());
  // Still running: its arrays must outlive it.
  for (auto& copy : copies) static_cast<void>(copy.release());
  const UnlockedIf unlocked(calls_block(*runtime));
  const Stream gone(std::move(stream));
}

PyStream::Copies PyStream::take_done() noexcept {
  // One that is not recorded is still being queued by another thread.
  const auto is_done = [&](Copy& copy) noexcept {
    try {
      if (copy.unguarded) copy.event.record(stream.handle());
      copy.unguarded = false;
    } catch (...) {  // tried again the next time
    }
    return copy.event.recorded() && copy.event.query() == EventState::done;
  };
  Copies done;
  while (!copies.empty() && is_done(*copies.front())) {
    done.push_back(std::move(copies.front()));
    copies.pop_front();
  }
  return done;
}

void PyStream::copy(const py::array& target, const py::array& source) {
  const auto contiguous = [](const py::array& array) {
    return (array.flags() & py::array::c_style) != 0;
  };
  const Device& device = runtime->device();
  KVMEM_EXPECTS(dynamic_cast<const ModelDevice*>(&device) != nullptr,
                "copy between arrays is for the host device and the virtual device: on '",
                device.info().name, "' arrays are ordinary memory, which no asynchronous copy may ",
                "touch; offload and restore through a Manager, or copy with the library that owns ",
                "the device memory");
  expect_bytes("copy between arrays", device);
  KVMEM_EXPECTS(contiguous(target) && contiguous(source), "copy: both arrays must be C-contiguous");
  KVMEM_EXPECTS(target.writeable(), "copy: the target is read-only");
  KVMEM_EXPECTS(target.nbytes() == source.nbytes(), "copy: the target has ", target.nbytes(),
                " bytes, the source ", source.nbytes());
  static_cast<void>(take_done());
  if (target.nbytes() == 0) return;
  auto made = std::make_unique<Copy>(Copy{static_cast<std::byte*>(const_cast<void*>(target.data())),
                                          static_cast<const std::byte*>(source.data()),
                                          static_cast<std::size_t>(target.nbytes()),
                                          runtime->events()->acquire(), target, source});
  copies.push_back(std::move(made));  // before it is submitted: from then on it must stay
  Copy& queued = *copies.back();
  const CopyDescriptors batch{&queued.target, &queued.source, &queued.size, 1};
  try {
    const Unlocked unlocked;
    runtime->device().copy(batch, Direction::to_device, SourceAccess::stream_order,
                           stream.handle());
    queued.event.record(stream.handle());
  } catch (const InvalidArgument&) {  // refused before anything was queued
    std::erase_if(copies, [&](const auto& copy) { return copy.get() == &queued; });
    throw;
  } catch (...) {
    queued.unguarded = !queued.event.recorded();
    throw;
  }
}

namespace {

struct PyBuffer {
  PyBuffer(Shared<Runtime> device_runtime, std::size_t size)
      : runtime(std::move(device_runtime)), bytes(size) {
    const UnlockedIf unlocked(calls_block(*runtime));
    base = runtime->device().allocate(bytes);
  }
  ~PyBuffer() {
    if (mark.must_leak()) return;
    const UnlockedIf unlocked(calls_block(*runtime));
    runtime->device().deallocate(base, bytes);
  }
  PyBuffer(const PyBuffer&) = delete;
  PyBuffer& operator=(const PyBuffer&) = delete;

  Shared<Runtime> runtime;
  ProcessMark mark;
  void* base = nullptr;
  std::size_t bytes;
};

py::dict info_of(const PyDevice& device) {
  const DeviceInfo& info = device.runtime->device().info();
  py::dict facts;
  facts["kind"] = info.kind;
  facts["name"] = info.name;
  facts["memory_bytes"] = info.memory_bytes;
  facts["copy_engines"] = info.copy_engines;
  facts["copy_kernel"] = info.copy_kernel;
  facts["needs_pinned_host"] = info.needs_pinned_host;
  facts["max_descriptors"] = info.max_descriptors;
  facts["virtual_time"] = info.virtual_time;
  facts["has_bytes"] = info.has_bytes;
  facts["numa_node"] = info.numa_node;
  add_cuda_info(facts, device.runtime->device());
  return facts;
}

std::unique_ptr<PyDevice> make_host(unsigned workers, double bytes_per_second) {
  HostDeviceOptions options;
  options.workers = workers;
  options.most_bytes_per_second = bytes_per_second;
  auto device = make_host_device(options);
  return std::make_unique<PyDevice>(PyDevice{Runtime::make(device), device});
}

std::unique_ptr<PyDevice> make_virtual(std::uint64_t seed, double bytes_per_second,
                                       double latency_seconds, bool shared_link, bool moves_bytes) {
  VirtualOptions options;
  options.seed = seed;
  options.bytes_per_second = bytes_per_second;
  options.latency = nanoseconds(latency_seconds);
  options.shared_link = shared_link;
  options.moves_bytes = moves_bytes;
  auto device = make_virtual_device(options);
  return std::make_unique<PyDevice>(PyDevice{Runtime::make(device), device});
}

std::unique_ptr<PyEvent> make_host_event(const PyDevice& device) {
  if (!device.model)
    throw InvalidArgument("host_event() is for the host device and the virtual device");
  auto made = std::make_unique<PyEvent>(device.runtime, device.runtime->events()->acquire());
  device.model->record_unsignalled(made->event.handle());
  made->event.mark_recorded();
  return made;
}

bool wait_for_event(Runtime& runtime, Event& event, const py::object& timeout) {
  const auto deadline = runtime.deadline_after(timeout_argument(timeout));
  const Unlocked unlocked;
  const auto reached = [&] {
    const EventState state = event.query();
    if (state == EventState::lost) throw DeviceLost("the device was lost under the stream");
    return state == EventState::done;
  };
  return runtime.wait_until(reached, deadline, signals());
}

std::unique_ptr<PyStream> make_stream(const PyDevice& device) {
  const auto make = [&] {
    const UnlockedIf unlocked(calls_block(*device.runtime));
    return Stream(device.runtime->device_ptr());
  };
  return std::make_unique<PyStream>(device.runtime, make());
}

std::unique_ptr<PyEvent> record(PyStream& self) {
  const auto recorded = [&] {
    const UnlockedIf unlocked(calls_block(*self.runtime));
    Event event = self.runtime->events()->acquire();
    event.record(self.stream.handle());
    return event;
  };
  return std::make_unique<PyEvent>(self.runtime, recorded());
}

void synchronize(PyStream& self, const py::object& timeout) {
  const auto end = record(self);
  if (!wait_for_event(*self.runtime, end->event, timeout))
    throw TimedOut("the stream did not become idle in time", {});
  static_cast<void>(self.take_done());
}

void bind_ready_and_buffer(py::module_& module) {
  py::class_<Ready>(module, "Ready", "The type of READY.").def("__repr__", [](const Ready&) {
    return "kvmem.READY";
  });
  module.attr("READY") = Ready{};

  py::class_<PyBuffer>(module, "DeviceBuffer",
                       "Device memory, freed when the last reference goes. Address in bytes.")
      .def_property_readonly(
          "address",
          [](const PyBuffer& self) { return reinterpret_cast<std::uintptr_t>(self.base); })
      .def_property_readonly("nbytes", [](const PyBuffer& self) { return self.bytes; })
      .def_property_readonly(
          "array",
          [](const py::object& self) {
            auto& buffer = self.cast<PyBuffer&>();
            const Device& device = buffer.runtime->device();
            if (dynamic_cast<const ModelDevice*>(&device) == nullptr)
              throw InvalidArgument("array is for the host device and the virtual device");
            expect_bytes("DeviceBuffer.array", device);
            return bytes_view(static_cast<std::byte*>(buffer.base), buffer.bytes, self);
          },
          "uint8[nbytes] view; host and virtual device only. It keeps the buffer alive.");
}

void bind_streams(py::module_& module) {
  // Both before their methods, so that the signatures name them.
  py::class_<PyEvent> event_class(module, "Event", "A point in a stream.");
  py::class_<PyStream> stream_class(
      module, "Stream", "A FIFO of device work. Destroying it never blocks; its work still ends.");
  event_class
      .def_property_readonly("handle", [](const PyEvent& self) { return self.event.handle(); })
      .def(
          "done",
          [](PyEvent& self) {
            const UnlockedIf unlocked(calls_block(*self.runtime));
            return self.event.query() == EventState::done;
          },
          "Whether the device has reached it.")
      .def(
          "set",
          [](PyEvent& self) {
            auto* const model = dynamic_cast<ModelDevice*>(&self.runtime->device());
            if (model == nullptr)
              throw InvalidArgument("set() is for events of Device.host_event()");
            model->signal(self.event.handle());
          },
          "Signals an event of Device.host_event(), once.")
      .def(
          "record",
          [](PyEvent& self, PyStream& stream) {
            const UnlockedIf unlocked(calls_block(*self.runtime));
            self.event.record(stream.stream.handle());
          },
          py::arg("stream"),
          "Moves the event to the end of what the stream holds now; waits made before keep the old "
          "point.");

  stream_class
      .def_property_readonly("handle", [](const PyStream& self) { return self.stream.handle(); })
      .def_property_readonly("id", [](const PyStream& self) { return self.stream.id(); })
      .def("copy", &PyStream::copy, py::arg("target"), py::arg("source"),
           "Queues a copy between two C-contiguous arrays of equal bytes; both stay alive until it "
           "is done.\n"
           "On a virtual device it takes the link to the device.")
      .def("record", &record, "An event at the end of what the stream holds now.")
      .def(
          "wait",
          [](PyStream& self, PyEvent& event) {
            const UnlockedIf unlocked(calls_block(*self.runtime));
            self.runtime->device().wait(self.stream.handle(), event.event.handle());
          },
          py::arg("event"), "Work queued from now on runs after the event's latest record.")
      .def("synchronize", &synchronize, py::arg("timeout") = py::none(),
           "Waits, helping to copy, until everything queued so far has run. Raises TimedOut.");
}

}  // namespace

void bind_device(py::module_& module) {
  bind_ready_and_buffer(module);
  bind_streams(module);
  py::class_<PyDevice>(module, "Device", "A device: its memory, streams and events. Any thread.")
      .def(py::init(&make_host), py::kw_only(), py::arg("workers"), py::arg("bytes_per_second"))
      .def(py::init(&make_virtual), py::kw_only(), py::arg("seed"), py::arg("bytes_per_second"),
           py::arg("latency_seconds"), py::arg("shared_link"), py::arg("moves_bytes"))
      .def_property_readonly(
          "kind", [](const PyDevice& self) { return self.runtime->device().info().kind; })
      .def_property_readonly(
          "name", [](const PyDevice& self) { return self.runtime->device().info().name; })
      .def_property_readonly("_info", &info_of)
      .def(
          "alloc",
          [](const PyDevice& self, const py::object& nbytes) {
            return std::make_unique<PyBuffer>(self.runtime, size_argument("nbytes", nbytes));
          },
          py::arg("nbytes"), "Device memory for tools and tests, in bytes. Raises CapacityError.")
      .def("stream", &make_stream, "A new stream.")
      .def("host_event", &make_host_event,
           "An event that is pending until set(): for CPU engines whose compute is no stream. Host "
           "and virtual device only.");
}

}  // namespace kvmem::bindings
