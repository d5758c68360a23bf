// A Python type whose objects hold a T in place: for the objects that are made for every block.
// pybind11 keeps each of its objects in a map by address, which costs more than the block does.
//
// Hot methods come as a table of C functions, the rest is added as to any class of pybind11. With
// the GIL.
#pragma once

#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

namespace kvmem::bindings {

namespace py = pybind11;

// A C method that takes what comes: it serves the common case itself and leaves all others, and so
// every error, to a function of pybind11.
using FastCall = PyObject* (*)(PyObject * self, PyObject* const* arguments, Py_ssize_t count,
                               PyObject* names);

inline PyMethodDef fast_method(const char* name, FastCall call, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

// What a FastCall answers when the case is not the common one.
inline PyObject* call_slowly(py::handle function, PyObject* self, PyObject* const* arguments,
                             Py_ssize_t count, PyObject* names) {
  const Py_ssize_t all = count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  try {
    std::vector<PyObject*> passed{self};
    passed.insert(passed.end(), arguments, arguments + all);
    return PyObject_Vectorcall(function.ptr(), passed.data(), static_cast<std::size_t>(1 + count),
                               names);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

template <class T>
class LightType {
 public:
  // Once, before any other call. `methods` and `full_name`, with the module's, live as long as the
  // process.
  static void make(py::module_& module, const char* full_name, const char* doc,
                   PyMethodDef* methods) {
    PyMemberDef members[] = {
        {"__weaklistoffset__", T_PYSSIZET, offsetof(Object, weak_references), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
                           {Py_tp_doc, const_cast<char*>(doc)},
                           {Py_tp_methods, methods},
                           {Py_tp_members, members},
                           {0, nullptr}};
    PyType_Spec spec{full_name, sizeof(Object), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    PyObject* const made = PyType_FromSpec(&spec);
    if (made == nullptr) throw py::error_already_set();
    type_ = reinterpret_cast<PyTypeObject*>(made);  // never let go of
    module.add_object(std::strrchr(full_name, '.') + 1, made);
  }

  template <class Function, class... Extra>
  static void def(const char* name, Function&& function, const Extra&... extra) {
    type().attr(name) = py::cpp_function(std::forward<Function>(function), py::name(name),
                                         py::is_method(type()), extra...);
  }

  template <class Function>
  static void def_property(const char* name, Function&& get, const char* doc = "") {
    const auto property =
        py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyProperty_Type));
    type().attr(name) =
        property(py::cpp_function(std::forward<Function>(get), py::is_method(type())), py::none(),
                 py::none(), doc);
  }

  [[nodiscard]] static bool is(py::handle value) noexcept { return Py_IS_TYPE(value.ptr(), type_); }
  [[nodiscard]] static T& of(PyObject* object) noexcept {  // of one that is()
    return reinterpret_cast<Object*>(object)->value;
  }
  // Null, with Python's error set, without memory.
  [[nodiscard]] static PyObject* create(T&& value) noexcept {
    Object* const object = PyObject_New(Object, type_);
    if (object == nullptr) return nullptr;
    object->weak_references = nullptr;
    std::construct_at(&object->value, std::move(value));
    return reinterpret_cast<PyObject*>(object);
  }

 private:
  struct Object {
    PyObject_HEAD PyObject* weak_references;
    T value;
  };

  static py::handle type() noexcept { return reinterpret_cast<PyObject*>(type_); }

  static void destroy(PyObject* object) noexcept {
    if (reinterpret_cast<Object*>(object)->weak_references != nullptr)
      PyObject_ClearWeakRefs(object);
    std::destroy_at(&of(object));
    PyTypeObject* const type = Py_TYPE(object);
    PyObject_Free(object);
    Py_DECREF(type);
  }

  static inline PyTypeObject* type_ = nullptr;
};

// For functions of pybind11 that take a T& or return a T.
template <class T>
class LightCaster {
 public:
  static constexpr auto name = py::detail::const_name("object");
  template <class>
  using cast_op_type = T&;

  bool load(py::handle source, bool) {
    if (!LightType<T>::is(source)) return false;
    value_ = &LightType<T>::of(source.ptr());
    return true;
  }
  operator T&() { return *value_; }  // NOLINT: as pybind11 asks for it
  static py::handle cast(T&& value, py::return_value_policy, py::handle) {
    return LightType<T>::create(std::move(value));
  }

 private:
  T* value_ = nullptr;
};

}  // namespace kvmem::bindings
