// A Python type whose objects hold a T in place: for the objects that are made for every block.
// pybind11 keeps each of its objects in a map by address, which costs more than the block does.
//
// Hot methods come as a table of C functions, the rest is added as to any class of pybind11. With
// the GIL.
#pragma once

#include <cstring>
#include <memory>
#include <utility>

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
  py::tuple passed(1 + count);
  passed[0] = py::reinterpret_borrow<py::object>(self);
  for (Py_ssize_t i = 0; i < count; ++i)
    passed[static_cast<std::size_t>(1 + i)] = py::reinterpret_borrow<py::object>(arguments[i]);
  py::dict named;
  for (Py_ssize_t i = count; i < all; ++i) {
    if (PyDict_SetItem(named.ptr(), PyTuple_GET_ITEM(names, i - count), arguments[i]) != 0)
      return nullptr;
  }
  return PyObject_Call(function.ptr(), passed.ptr(), named.ptr());
}

template <class T>
class LightType {
 public:
  // Once, before any other call. `methods` and `full_name`, with the module's, live as long as the
  // process.
  static void make(py::module_& module, const char* full_name, const char* doc,
                   PyMethodDef* methods) {
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
                           {Py_tp_doc, const_cast<char*>(doc)},
                           {Py_tp_methods, methods},
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
    if (object != nullptr) std::construct_at(&object->value, std::move(value));
    return reinterpret_cast<PyObject*>(object);
  }

 private:
  struct Object {
    PyObject_HEAD T value;
  };

  static py::handle type() noexcept { return reinterpret_cast<PyObject*>(type_); }

  static void destroy(PyObject* object) noexcept {
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
