// The keys of a call, in whatever form Python has them, and the needs of groups. With the GIL.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "base/check.hpp"
#include "bindings/bind.hpp"
#include "cache/index.hpp"

namespace kvmem::bindings {

void bind_policies(py::module_& module);

[[nodiscard]] inline Need need_argument(const py::object& need) {
  if (py::isinstance<py::str>(need)) {
    const auto name = need.cast<std::string>();
    if (name == "all") return {NeedKind::all, 0};
    if (name == "state") return {NeedKind::state, 0};
  } else if (py::hasattr(need, "count")) {
    return {NeedKind::last, size_argument("need", need.attr("count"))};
  }
  throw InvalidArgument(text("need is ", shown(need), ", none of 'all', last(n) and 'state'"));
}

[[nodiscard]] inline std::size_t max_events_argument(const py::object& max_events) {
  const std::size_t count = size_argument("max_events", max_events, 0);
  KVMEM_EXPECTS(count <= (std::size_t{1} << 24U), "max_events is ", count,
                ", which must be at most 2^24");
  return count;
}

// Where the keys of an argument are: a sequence of bytes objects, or one contiguous buffer. It
// keeps neither alive: the argument does, for the call.
class KeysArgument {
 public:
  // `known_bytes`: the length of the index's keys, 0 while there is none.
  KeysArgument(py::handle keys, std::size_t known_bytes) {
    if (PyList_Check(keys.ptr()) || PyTuple_Check(keys.ptr())) {
      from_sequence(keys);
      return;
    }
    KVMEM_EXPECTS(PyObject_CheckBuffer(keys.ptr()), "keys is ", shown(keys),
                  ", neither a list of bytes nor a contiguous buffer");
    from_buffer(keys, known_bytes);
  }
  KeysArgument(const KeysArgument&) = delete;
  KeysArgument& operator=(const KeysArgument&) = delete;

  [[nodiscard]] KeyPointers pointers() const noexcept { return {data_, count_}; }
  [[nodiscard]] std::size_t key_bytes() const noexcept { return key_bytes_; }

 private:
  struct View : Py_buffer {  // let go of by a constructor that throws, too
    View() : Py_buffer{} {}
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() {
      if (obj != nullptr) PyBuffer_Release(this);
    }
  };

  void make_room(std::size_t count) {
    count_ = count;
    data_ = near_.data();
    if (count <= near_.size()) return;
    far_.resize(count);
    data_ = far_.data();
  }

  void from_sequence(py::handle keys) {
    PyObject** const items = PySequence_Fast_ITEMS(keys.ptr());
    make_room(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(keys.ptr())));
    for (std::size_t i = 0; i < count_; ++i) {
      KVMEM_EXPECTS(PyBytes_Check(items[i]), "keys[", i, "] is ", shown(items[i]), ", not bytes");
      const auto bytes = static_cast<std::size_t>(PyBytes_GET_SIZE(items[i]));
      if (i == 0) key_bytes_ = bytes;
      KVMEM_EXPECTS(bytes == key_bytes_, "keys[", i, "] has ", bytes, " bytes, and keys[0] has ",
                    key_bytes_, ": the keys of one index have one length");
      data_[i] = reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(items[i]));
    }
  }

  void from_buffer(py::handle keys, std::size_t known_bytes) {
    if (PyObject_GetBuffer(keys.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      throw InvalidArgument(text("keys is ", shown(keys), ", which is not contiguous"));
    }
    // What an item is by its bytes; objects, text, times and numbers that equal others are not.
    const std::string_view format = view_.format == nullptr ? "B" : view_.format;
    KVMEM_EXPECTS(format.find_first_not_of("@=<>!0123456789bBcsxhHiIlLqQnN") == format.npos,
                  "keys is ", shown(keys), ", whose items are no bytes (format '", format, "')");
    const auto bytes = static_cast<std::size_t>(view_.len);
    const auto item = static_cast<std::size_t>(view_.itemsize);
    if (view_.ndim == 2 && view_.shape[0] > 0) {  // a row a key
      key_bytes_ = static_cast<std::size_t>(view_.shape[1]) * item;
    } else if (item > 1) {  // an item a key: NumPy's S32 and V32
      key_bytes_ = item;
    } else {
      key_bytes_ = known_bytes;
    }
    if (bytes == 0) {
      KVMEM_EXPECTS(view_.ndim < 2 || view_.shape[0] == 0, "keys is ", shown(keys),
                    ": keys of 0 bytes");
      return;
    }
    KVMEM_EXPECTS(key_bytes_ > 0, "keys is one buffer of ", bytes,
                  " bytes: the index must know its key_bytes, or each row must be a key");
    KVMEM_EXPECTS(bytes % key_bytes_ == 0, "keys is a buffer of ", bytes,
                  " bytes, no multiple of the ", key_bytes_, " of a key");
    make_room(bytes / key_bytes_);
    for (std::size_t i = 0; i < count_; ++i)
      data_[i] = static_cast<const std::byte*>(view_.buf) + i * key_bytes_;
  }

  std::array<const std::byte*, 128> near_;
  std::vector<const std::byte*> far_;
  const std::byte** data_ = nullptr;
  std::size_t count_ = 0, key_bytes_ = 0;
  View view_;
};

}  // namespace kvmem::bindings
