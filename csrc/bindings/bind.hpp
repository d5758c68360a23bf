// What the binding files share. They translate and do nothing else: arguments in, results out, the
// GIL released around what can block.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/gil.hpp"
#include "bindings/light_type.hpp"
#include "device/model_device.hpp"
#include "offload/manager.hpp"

namespace kvmem::bindings {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_device(py::module_& module);
void bind_cuda(py::module_& module);
void bind_testing(py::module_& module);
void bind_blocks(py::module_& module);
void bind_dlpack(py::module_& module);
void bind_pool(py::module_& module);
void bind_layout(py::module_& module);
void bind_transfer(py::module_& module);
void bind_manager(py::module_& module);
void bind_index(py::module_& module);
void bind_cache(py::module_& module);

[[nodiscard]] inline bool calls_block(const Runtime& runtime) {
  return runtime.device().info().calls_block;
}

// ---- what Python objects hold ----

// With a transfer go the events that it ran behind, and its manager if it was the last to hold it.
template <>
[[nodiscard]] inline bool may_wait_at_its_end(const Transfer& transfer) noexcept {
  const auto& manager = transfer.job()->manager;
  return calls_block(*manager->runtime()) || manager.use_count() == 1;
}

struct PyDevice {
  Shared<Runtime> runtime;
  std::shared_ptr<ModelDevice> model;  // null unless it is one: host and virtual
  ProcessMark mark = {};
};

struct PyStream;  // bind_device.cpp
struct PyEvent {
  PyEvent(Shared<Runtime> device_runtime, Event own)
      : runtime(std::move(device_runtime)), event(std::move(own)) {}
  PyEvent(const PyEvent&) = delete;
  PyEvent& operator=(const PyEvent&) = delete;
  ~PyEvent() {
    const UnlockedIf unlocked(calls_block(*runtime));
    const Event gone(std::move(event));
  }

  Shared<Runtime> runtime;
  Event event;
};

struct PyPool {
  Shared<Runtime> runtime;
  Shared<BlockPool> pool;  // the kernel takes its time to unmap gigabytes
  ProcessMark mark = {};
};

struct PyBlocks {
  Shared<Runtime> runtime;
  HostBlocks blocks;
  ProcessMark mark = {};
  [[nodiscard]] const HostBlocks& held() const {  // throws AlreadyReleased, Forked
    mark.expect_same_process("the blocks");
    if (blocks.empty()) throw AlreadyReleased("the blocks were released");
    return blocks;
  }
};

}  // namespace kvmem::bindings

template <>
class pybind11::detail::type_caster<kvmem::bindings::PyBlocks>
    : public kvmem::bindings::LightCaster<kvmem::bindings::PyBlocks> {};

namespace kvmem::bindings {

// ---- arguments ----

// A repr that is never the problem itself: short, and there for values whose own one fails.
[[nodiscard]] std::string shown(py::handle value);
// What is no UTF-8 in it is replaced: a name may have come as bytes.
[[nodiscard]] py::str words_of(std::string_view text);
// An integer that fits and is at least `least`; InvalidArgument names what is wrong. bool is no
// integer here.
[[nodiscard]] std::size_t size_argument(const char* name, py::handle value, std::size_t least = 1);
// Counts from the end when negative.
[[nodiscard]] std::size_t index_argument(py::handle index, std::size_t size);
[[nodiscard]] std::vector<std::int64_t> ids_argument(const char* name, py::handle value);
// Seconds, at least 0.
[[nodiscard]] double seconds_argument(const char* name, const py::object& value);
[[nodiscard]] Nanoseconds nanoseconds(double seconds);  // rounded; the caller knows that it fits
// Seconds; None: for ever.
[[nodiscard]] std::optional<double> timeout_argument(const py::object& timeout);
[[nodiscard]] std::optional<Tag> tag_argument(const py::object& tag);
[[nodiscard]] Priority priority_argument(const std::string& name);

// Streams and events of ours or of others: an int handle, __cuda_stream__, .cuda_stream,
// .cuda_event, .ptr, .handle.
[[nodiscard]] StreamHandle stream_argument(py::handle value);
struct Ordered {
  std::vector<StreamHandle> streams;
  std::vector<EventHandle> events;
  std::vector<Shared<Transfer>> transfers;
};
// Also a list of them, a Transfer, or READY.
[[nodiscard]] Ordered after_argument(py::handle value);

// A stream keeps the arrays of its copies until they are done, and those may hold blocks: lets go
// of them. With the GIL.
void drop_done_copies();

// While a thread of Python's waits: looks for signals and drops done copies, for whose blocks it
// may be waiting.
[[nodiscard]] Runtime::Interrupt signals();

// ---- results ----

// What a CUDA device is besides; nothing of another.
void add_cuda_info(py::dict& facts, const Device& device);
// What shows bytes is refused where memory is addresses only. Throws InvalidArgument.
void expect_bytes(const char* what, const Device& device);

[[nodiscard]] py::array slots_array(std::span<const SlotIndex> slots);  // int64, a copy
// uint8[bytes] at `data`, alive as long as `owner`.
[[nodiscard]] py::array bytes_view(std::byte* data, std::size_t bytes, const py::object& owner);
[[nodiscard]] py::object seconds(Nanoseconds ns);  // float, or None where it is -1
[[nodiscard]] py::dict slot_counts(const SlotCounts& counts);
[[nodiscard]] const char* name_of(TransferKind kind);
[[nodiscard]] const char* name_of(TransferState state);
[[nodiscard]] const char* name_of(Priority priority);

}  // namespace kvmem::bindings
