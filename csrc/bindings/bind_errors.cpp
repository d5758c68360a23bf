#include <exception>
#include <new>

#include "bindings/bind.hpp"

namespace kvmem::bindings {

namespace {

// The classes are documented in kvmem/errors.py; here they are only filled.
py::object make(const char* name, const Error& error) {
  return py::module_::import("kvmem.errors").attr(name)(words_of(error.what()));
}

void raise(const py::object& error) { PyErr_SetObject(py::type::of(error).ptr(), error.ptr()); }

void raise_at_bound(const char* name, const AtBound& error) {
  const py::object raised = make(name, error);
  const Shortage& s = error.shortage;
  raised.attr("bound") = words_of(s.bound);
  raised.attr("wanted") = s.wanted;
  raised.attr("free") = s.free;
  raised.attr("largest") = s.largest;
  raised.attr("held") = s.held;
  raised.attr("quarantined") = s.quarantined;
  raise(raised);
}

void translate(std::exception_ptr thrown) {
  if (!thrown) return;
  try {
    std::rethrow_exception(thrown);
  } catch (const Busy& e) {
    const py::object raised = make("Busy", e);
    raised.attr("block") = e.block;
    raised.attr("transfer") = e.transfer;
    raise(raised);
  } catch (const Corrupt& e) {
    const py::object raised = make("Corrupt", e);
    raised.attr("block") = e.block;
    raised.attr("slot") = e.slot;
    raised.attr("expected") = e.expected;
    raised.attr("found") = e.found;
    raise(raised);
  } catch (const Incompatible& e) {
    const py::object raised = make("Incompatible", e);
    raised.attr("fields") = e.fields;
    raise(raised);
  } catch (const TimedOut& e) {
    raise_at_bound("TimedOut", e);
  } catch (const PoolExhausted& e) {
    raise_at_bound("PoolExhausted", e);
  } catch (const CapacityError& e) {
    raise_at_bound("CapacityError", e);
  } catch (const InvalidArgument& e) {
    raise(make("InvalidArgument", e));
  } catch (const AlreadyReleased& e) {
    raise(make("AlreadyReleased", e));
  } catch (const Closed& e) {
    raise(make("Closed", e));
  } catch (const Forked& e) {
    raise(make("Forked", e));
  } catch (const NotDone& e) {
    raise(make("NotDone", e));
  } catch (const Cancelled& e) {
    raise(make("Cancelled", e));
  } catch (const CopyFailed& e) {
    raise(make("CopyFailed", e));
  } catch (const DeviceLost& e) {
    raise(make("DeviceLost", e));
  } catch (const DeviceUnavailable& e) {
    raise(make("DeviceUnavailable", e));
  } catch (const Error& e) {
    raise(make("KvmemError", e));
    // pybind11's own come last, behind those of other extension modules, which may take all there
    // is.
  } catch (const py::builtin_exception& e) {
    e.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
}

}  // namespace

void bind_errors(py::module_&) { py::register_local_exception_translator(translate); }

}  // namespace kvmem::bindings
