// What of a call decides whether it is valid, as one string of bytes. Python's own attribute access, without Python.
#pragma once
#include <pybind11/pybind11.h>

namespace txl {

// x.name() for an interned name; throws what Python raised.
inline pybind11::object call_method(const pybind11::handle& x, PyObject* name) {
  PyObject* result = PyObject_CallMethodNoArgs(x.ptr(), name);
  if (!result) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// m.signature(call, ordinary types, strided layout) -> bytes or None; see txl_kernels.plain.signature.
void define_signature(pybind11::module_& m);

}  // namespace txl
