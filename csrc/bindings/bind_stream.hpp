// A stream as Python holds it: with the arrays that its copies still read and write.
#pragma once

#include <deque>

#include "bindings/bind.hpp"

namespace kvmem::bindings {

struct Ready {};  // the type of kvmem.READY

struct PyStream {
  // One copy of the user's own. Kept until it was observed: the device reads the descriptors and
  // the arrays.
  struct Copy {
    std::byte* target;
    const std::byte* source;
    std::size_t size;
    Event event;
    py::object target_owner, source_owner;
    bool unguarded = false;  // it may run, and no event could be recorded behind it
  };

  PyStream(Shared<Runtime> device_runtime, Stream own);
  ~PyStream();
  PyStream(const PyStream&) = delete;
  PyStream& operator=(const PyStream&) = delete;

  void copy(const py::array& target, const py::array& source);  // throws InvalidArgument
  using Copies = std::deque<std::unique_ptr<Copy>>;
  [[nodiscard]] Copies take_done() noexcept;  // to be dropped by the caller

  Shared<Runtime> runtime;
  Stream stream;
  Copies copies;
};

}  // namespace kvmem::bindings
