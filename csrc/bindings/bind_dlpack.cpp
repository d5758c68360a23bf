// DLPack both ways: host blocks for whoever imports tensors, and what a tensor says of itself.
#include "base/check.hpp"
#include "bindings/bind.hpp"
#include "bindings/dlpack.hpp"

namespace kvmem::bindings {

namespace {

// ---- export ----

// What is behind a capsule. It holds the blocks and nothing of Python's: its deleter may run on
// any thread, without the GIL, and after the interpreter has ended.
template <class Managed>
struct Export {
  HostBlocks blocks;
  std::int64_t shape[2], strides[2];
  Managed managed;
};

template <class Managed>
void drop(Managed* managed) noexcept {
  delete static_cast<Export<Managed>*>(managed->context);
}

template <class Managed>
void drop_unused(PyObject* capsule) noexcept {
  if (PyCapsule_IsValid(capsule, Managed::fresh) == 0) return;  // its consumer's by now
  drop(static_cast<Managed*>(PyCapsule_GetPointer(capsule, Managed::fresh)));
}

void set_version(dlpack::Legacy&) {}
void set_version(dlpack::Versioned& managed) { managed.major_version = 1; }

// uint8[count, block_bytes]
template <class Managed>
py::object capsule_of(HostBlocks blocks, std::size_t row_bytes, dlpack::Device device) {
  auto made = std::make_unique<Export<Managed>>();
  made->shape[0] = static_cast<std::int64_t>(blocks.size());
  made->shape[1] = static_cast<std::int64_t>(blocks.block_bytes());
  made->strides[0] = static_cast<std::int64_t>(row_bytes);
  made->strides[1] = 1;
  made->managed.tensor = {blocks.data(0), device, 2, dlpack::uint8, made->shape, made->strides, 0};
  made->managed.context = made.get();
  made->managed.deleter = &drop<Managed>;
  set_version(made->managed);
  made->blocks = std::move(blocks);
  PyObject* const capsule = PyCapsule_New(&made->managed, Managed::fresh, &drop_unused<Managed>);
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(made.release());
  return py::reinterpret_steal<py::object>(capsule);
}

py::tuple pair_of(dlpack::Device device) { return py::make_tuple(device.type, device.id); }

// Pinned memory is the CPU's as well, and libraries say so of their own: torch takes no other.
dlpack::Device device_argument(const PyBlocks& self, const py::object& wanted) {
  if (wanted.is_none() || wanted.equal(pair_of(dlpack::cpu))) return dlpack::cpu;
  const bool pinned_by_cuda = self.held().pinned() && self.runtime->device().info().kind == "cuda";
  if (pinned_by_cuda && wanted.equal(pair_of(dlpack::cuda_host))) return dlpack::cuda_host;
  throw py::buffer_error(text("dl_device is ", shown(wanted),
                              ": host blocks stay where they are, which is (1, 0)",
                              pinned_by_cuda ? " or (3, 0)" : ""));
}

bool versioned_argument(const py::object& max_version) {
  if (max_version.is_none()) return false;
  KVMEM_EXPECTS(py::isinstance<py::tuple>(max_version) && py::len(max_version) == 2,
                "max_version is ", shown(max_version), ": not a pair of integers");
  const auto pair = py::reinterpret_borrow<py::tuple>(max_version);
  static_cast<void>(size_argument("max_version", pair[1], 0));
  return size_argument("max_version", pair[0], 0) >= 1;
}

// From the beginning of one block to that of the next.
std::size_t row_bytes_of(const HostBlocks& blocks) {
  const auto slots = blocks.slots();
  if (slots.size() == 1) return blocks.slot_bytes();
  bool even = slots[1] > slots[0];
  const SlotIndex step = slots[1] - slots[0];
  for (std::size_t i = 1; even && i < slots.size(); ++i) even = slots[i] == slots[i - 1] + step;
  if (!even) {
    throw py::buffer_error(
        "these blocks are not evenly spaced, in ascending order: export them one at a time, each "
        "as blocks[i:i+1]");
  }
  if (!blocks.in_one_chunk()) {
    throw py::buffer_error(
        "these blocks were pinned in more than one piece, and no copy may cross from one into the "
        "next: export them in parts, as blocks[i:j]");
  }
  return step * blocks.slot_bytes();
}

// A tensor cannot say that a copy still writes it: there is none, as far as kvmem knows.
HostBlocks share_at_rest(const PyBlocks& self) {
  HostBlocks blocks = self.held().share();
  try {
    blocks.expect_no_copies();
    return blocks;
  } catch (const NotDone&) {  // or it has ended, and only not been seen yet
  }
  {
    const Unlocked unlocked;
    self.runtime->advance();
  }
  blocks.expect_no_copies();
  return blocks;
}

py::object exported(const PyBlocks& self, const py::object& stream, const py::object& max_version,
                    const py::object& dl_device, const py::object& copy) {
  const std::size_t row_bytes = row_bytes_of(self.held());
  expect_bytes("a DLPack export", self.runtime->device());
  KVMEM_EXPECTS(stream.is_none(), "stream is ", shown(stream),
                ": host blocks have no stream, only None");
  KVMEM_EXPECTS(copy.is_none() || PyBool_Check(copy.ptr()), "copy is ", shown(copy),
                ", one of None, False and True");
  if (copy.is(py::bool_(true)))
    throw py::buffer_error("copy is True: host blocks are exported as they are; gather() copies");
  const dlpack::Device device = device_argument(self, dl_device);
  const bool versioned = versioned_argument(max_version);
  HostBlocks blocks = share_at_rest(self);
  return versioned ? capsule_of<dlpack::Versioned>(std::move(blocks), row_bytes, device)
                   : capsule_of<dlpack::Legacy>(std::move(blocks), row_bytes, device);
}

// ---- import ----

template <class Managed>
class Consumed {  // lets go of the tensor at its end
 public:
  explicit Consumed(py::handle capsule)
      : managed_(static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), Managed::fresh))) {
    if (managed_ == nullptr || PyCapsule_SetName(capsule.ptr(), Managed::used) != 0)
      throw py::error_already_set();
  }
  Consumed(const Consumed&) = delete;
  Consumed& operator=(const Consumed&) = delete;
  ~Consumed() {
    if (managed_->deleter != nullptr) managed_->deleter(managed_);
  }
  const Managed* operator->() const { return managed_; }

 private:
  Managed* managed_;
};

py::object tuple_of(const std::int64_t* values, std::int32_t count) {
  if (values == nullptr) return py::none();
  return py::tuple(py::cast(std::vector<std::int64_t>(values, values + count)));
}

// Address, shape, strides in elements or None, bytes of an element, type and id of the device,
// flags.
py::tuple facts_of(const dlpack::Tensor& tensor, std::uint64_t flags) {
  const dlpack::Element element = tensor.element;
  const unsigned bits = unsigned{element.bits} * element.lanes;
  KVMEM_EXPECTS(element.code != dlpack::opaque_handle,
                "it holds opaque handles, which cannot be copied as bytes");
  KVMEM_EXPECTS(bits > 0 && bits % 8 == 0, "its elements have ", bits,
                " bits, which are no whole bytes: view it as bytes");
  KVMEM_EXPECTS(tensor.axes >= 0 && (tensor.axes == 0 || tensor.shape != nullptr), "it has ",
                tensor.axes, " axes and no shape");
  const std::uint64_t address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
  return py::make_tuple(
      address, tensor.axes == 0 ? py::tuple() : tuple_of(tensor.shape, tensor.axes),
      tuple_of(tensor.strides, tensor.axes), bits / 8, tensor.device.type, tensor.device.id, flags);
}

py::tuple read_dlpack(const py::object& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::Versioned::fresh) != 0) {
    const Consumed<dlpack::Versioned> taken(capsule);
    KVMEM_EXPECTS(taken->major_version == 1, "its DLPack version is ", taken->major_version, ".",
                  taken->minor_version, ", not 1.x");
    return facts_of(taken->tensor, taken->flags);
  }
  KVMEM_EXPECTS(PyCapsule_IsValid(capsule.ptr(), dlpack::Legacy::fresh) != 0, shown(capsule),
                " is no DLPack capsule, or was consumed before");
  const Consumed<dlpack::Legacy> taken(capsule);
  return facts_of(taken->tensor, 0);
}

}  // namespace

void bind_dlpack(py::module_& module) {
  using Type = LightType<PyBlocks>;
  Type::def(
      "__dlpack__", &exported, py::kw_only(), py::arg("stream") = py::none(),
      py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
      py::arg("copy") = py::none(),
      "uint8[count, block_bytes], zero-copy, for from_dlpack() of any library; the tensor\n"
      "holds the blocks for as long as it lives. It is on (1, 0), the CPU, pinned or not; on\n"
      "(3, 0), memory pinned by CUDA, if `dl_device` asks for that and it is. Raises\n"
      "BufferError for another `dl_device` and for blocks that are not evenly spaced, NotDone\n"
      "while a copy holds one of them.");
  Type::def(
      "__dlpack_device__",
      [](const PyBlocks& self) {
        static_cast<void>(self.held());
        return pair_of(dlpack::cpu);
      },
      "(1, 0), the CPU.");
  module.def("_read_dlpack", &read_dlpack, py::arg("capsule"));
}

}  // namespace kvmem::bindings
