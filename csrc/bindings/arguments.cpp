#include <algorithm>
#include <cmath>

#include "base/check.hpp"
#include "bindings/bind.hpp"
#include "bindings/bind_stream.hpp"

namespace kvmem::bindings {

namespace {

bool is_integer(py::handle value) {
  return !PyBool_Check(value.ptr()) && PyIndex_Check(value.ptr());
}

// Of something that is_integer(). Throws what its __index__ raises.
py::int_ integer_of(py::handle value) {
  PyObject* const number = PyNumber_Index(value.ptr());
  if (number == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::int_>(number);
}

std::optional<std::int64_t> int64_of(
    py::handle value) {  // of something that is_integer(); null: it does not fit
  int overflow = 0;
  const long long small = PyLong_AsLongLongAndOverflow(integer_of(value).ptr(), &overflow);
  return overflow == 0 ? std::optional<std::int64_t>(small) : std::nullopt;
}

std::optional<std::uintptr_t> pointer_of(py::handle value) {
  if (value.is_none()) return 0;
  if (!is_integer(value)) return std::nullopt;
  const unsigned long long number = PyLong_AsUnsignedLongLong(integer_of(value).ptr());
  if (!PyErr_Occurred()) return number;
  PyErr_Clear();  // negative, or beyond 2^64
  return std::nullopt;
}

// Handles travel as ints, as ctypes pointers (.value), or as objects that turn into ints.
std::optional<std::uintptr_t> handle_of(py::handle value) {
  return py::hasattr(value, "value") ? pointer_of(value.attr("value")) : pointer_of(value);
}

struct Foreign {
  std::uintptr_t handle = 0;
  bool is_event = false;
};

std::optional<Foreign> foreign_at(py::handle value, const char* attribute, bool is_event) {
  if (const auto handle = handle_of(value.attr(attribute))) return Foreign{*handle, is_event};
  return std::nullopt;
}

std::optional<Foreign> foreign_of(py::handle value) {
  if (value.is_none()) return std::nullopt;
  if (const auto handle = handle_of(value)) return Foreign{*handle, false};
  if (py::hasattr(value, "cuda_stream")) return foreign_at(value, "cuda_stream", false);
  if (py::hasattr(value, "cuda_event")) return foreign_at(value, "cuda_event", true);
  if (py::hasattr(value, "__cuda_stream__")) {
    const py::object protocol = value.attr("__cuda_stream__");
    // Version, handle.
    const py::tuple pair = PyCallable_Check(protocol.ptr()) ? protocol() : protocol;
    if (pair.size() != 2) return std::nullopt;
    if (const auto handle = handle_of(pair[1])) return Foreign{*handle, false};
    return std::nullopt;
  }
  const bool is_event =
      py::type::handle_of(value).attr("__name__").cast<std::string>().find("Event") !=
      std::string::npos;
  for (const char* attribute : {"ptr", "handle"}) {
    if (!py::hasattr(value, attribute)) continue;
    if (const auto foreign = foreign_at(value, attribute, is_event)) return foreign;
  }
  return std::nullopt;
}

bool is_list(py::handle value) {
  return py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value);
}

void add_after(Ordered& ordered, py::handle value) {
  if (value.is_none()) {
    throw InvalidArgument(
        "after is required: a stream, an event, a transfer, a list of them, or kvmem.READY");
  }
  if (py::isinstance<Ready>(value)) return;
  if (py::isinstance<Transfer>(value)) {
    ordered.transfers.push_back(value.cast<Shared<Transfer>>());
  } else if (py::isinstance<PyStream>(value)) {
    ordered.streams.push_back(value.cast<PyStream&>().stream.handle());
  } else if (py::isinstance<PyEvent>(value)) {
    ordered.events.push_back(value.cast<PyEvent&>().event.handle());
  } else if (is_list(value)) {
    if (py::len(value) == 0)
      throw InvalidArgument("after is an empty list: say kvmem.READY when nothing is pending");
    for (const py::handle each : value) {
      KVMEM_EXPECTS(!is_list(each), "after: a list holds ", shown(each),
                    ", not a stream, event or transfer");
      add_after(ordered, each);
    }
  } else if (const auto foreign = foreign_of(value)) {
    if (foreign->is_event)
      ordered.events.push_back(foreign->handle);
    else
      ordered.streams.push_back(foreign->handle);
  } else {
    throw InvalidArgument(
        text("after: ", shown(value), " is no stream, event, transfer or list of them"));
  }
}

}  // namespace

std::string shown(py::handle value) {
  constexpr std::size_t most = 120;
  try {
    std::string words = py::repr(value).cast<std::string>();
    if (words.size() <= most) return words;
    std::size_t end = most;
    while ((static_cast<unsigned char>(words[end]) & 0xC0U) == 0x80U) --end;  // inside a character
    return words.substr(0, end) + "...";
  } catch (const py::error_already_set&) {
    return text("<", Py_TYPE(value.ptr())->tp_name, ">");
  }
}

py::str words_of(std::string_view text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

std::size_t size_argument(const char* name, py::handle value, std::size_t least) {
  KVMEM_EXPECTS(is_integer(value), name, " is ", shown(value), ": not an integer");
  const auto small = int64_of(value);
  KVMEM_EXPECTS(small, name, " is ", shown(value), ", outside 0 to 2^63 - 1");
  KVMEM_EXPECTS(*small >= 0 && static_cast<std::size_t>(*small) >= least, name, " is ", *small,
                ", at least ", least);
  return static_cast<std::size_t>(*small);
}

std::size_t index_argument(py::handle index, std::size_t size) {
  if (!PyIndex_Check(index.ptr()))
    throw py::type_error(text("an index is an integer, not ", shown(index)));
  const py::ssize_t i = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
  if (i == -1 && PyErr_Occurred()) throw py::error_already_set();
  const auto count = static_cast<py::ssize_t>(size);
  if (i < -count || i >= count) throw py::index_error(text("block ", i, " of ", count));
  return static_cast<std::size_t>(i < 0 ? i + count : i);
}

std::vector<std::int64_t> ids_argument(const char* name, py::handle value) {
  std::vector<std::int64_t> ids;
  if (py::isinstance<py::array>(value)) {
    const auto array = py::reinterpret_borrow<py::array>(value);
    KVMEM_EXPECTS(array.ndim() == 1, name, " has ", array.ndim(), " dimensions, not 1");
    KVMEM_EXPECTS(array.dtype().kind() == 'i' || array.dtype().kind() == 'u', name,
                  " is an array of ", shown(array.dtype()), ", not of integers");
    const auto exact =
        py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>::ensure(array);
    if (!exact) throw py::error_already_set();
    if (array.dtype().kind() == 'u' &&
        array.itemsize() == 8) {  // what does not fit came out negative
      const bool fits = std::all_of(exact.data(), exact.data() + exact.size(),
                                    [](std::int64_t id) { return id >= 0; });
      KVMEM_EXPECTS(fits, name, " holds a number beyond 2^63");
    }
    ids.assign(exact.data(), exact.data() + exact.size());
    return ids;
  }
  KVMEM_EXPECTS(py::isinstance<py::sequence>(value) && !py::isinstance<py::str>(value) &&
                    !py::isinstance<py::bytes>(value) && !py::isinstance<py::bytearray>(value),
                name, " is ", shown(value), ": not a sequence of integers");
  // An item may be made as it is asked for, as of a range: held, not only looked at.
  for (const py::object each : py::reinterpret_borrow<py::sequence>(value)) {
    KVMEM_EXPECTS(is_integer(each), name, " holds ", shown(each), ": not an integer");
    const auto id = int64_of(each);
    KVMEM_EXPECTS(id, name, " holds ", shown(each), ", beyond 2^63");
    ids.push_back(*id);
  }
  return ids;
}

double seconds_argument(const char* name, const py::object& seconds) {
  const bool is_number = !PyBool_Check(seconds.ptr()) && !py::isinstance<py::array>(seconds) &&
                         (PyIndex_Check(seconds.ptr()) || py::hasattr(seconds, "__float__"));
  KVMEM_EXPECTS(is_number, name, " is ", shown(seconds), ": not a number of seconds");
  const double value = PyFloat_AsDouble(seconds.ptr());
  if (PyErr_Occurred()) {
    const py::error_already_set error;
    if (!error.matches(PyExc_OverflowError)) throw error;
    throw InvalidArgument(text(name, " is ", shown(seconds), ": too large"));
  }
  KVMEM_EXPECTS(value >= 0, name, " is ", value, " s, at least 0");  // also refuses NaN
  return value;
}

Nanoseconds nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

std::optional<double> timeout_argument(const py::object& timeout) {
  if (timeout.is_none()) return std::nullopt;
  return seconds_argument("timeout", timeout);
}

std::optional<Tag> tag_argument(const py::object& tag) {
  if (tag.is_none()) return std::nullopt;
  if (is_integer(tag)) {
    const auto number = int64_of(tag);
    KVMEM_EXPECTS(number, "tag is ", shown(tag), ", outside -2^63 to 2^63 - 1");
    return Tag(*number);
  }
  KVMEM_EXPECTS(PyUnicode_Check(tag.ptr()), "tag is ", shown(tag), ": not an integer or a string");
  Py_ssize_t bytes = 0;
  const char* const words = PyUnicode_AsUTF8AndSize(tag.ptr(), &bytes);
  if (words == nullptr) {  // lone surrogates
    PyErr_Clear();
    throw InvalidArgument(text("tag is ", shown(tag), ": not valid Unicode"));
  }
  return Tag(std::string(words, static_cast<std::size_t>(bytes)));
}

Priority priority_argument(const std::string& name) {
  if (name == "demand") return Priority::demand;
  KVMEM_EXPECTS(name == "background", "priority is '", name, "', one of 'demand' and 'background'");
  return Priority::background;
}

StreamHandle stream_argument(py::handle value) {
  if (py::isinstance<PyStream>(value)) return value.cast<PyStream&>().stream.handle();
  const auto foreign = foreign_of(value);
  KVMEM_EXPECTS(foreign && !foreign->is_event, "stream: ", shown(value), " is no stream");
  return foreign->handle;
}

Ordered after_argument(py::handle value) {
  Ordered ordered;
  add_after(ordered, value);
  return ordered;
}

Runtime::Interrupt signals() {
  return [] {
    const Locked gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    drop_done_copies();
  };
}

}  // namespace kvmem::bindings
