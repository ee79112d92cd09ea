// Attributes and methods of Python objects by interned names.
#pragma once
#include <pybind11/pybind11.h>

namespace txl {

// x.name; throws what Python raised.
inline pybind11::object attribute(const pybind11::handle& x, PyObject* name) {
  PyObject* result = PyObject_GetAttr(x.ptr(), name);
  if (!result) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// x.name(); throws what Python raised.
inline pybind11::object call_method(const pybind11::handle& x, PyObject* name) {
  PyObject* result = PyObject_CallMethodNoArgs(x.ptr(), name);
  if (!result) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

}  // namespace txl
