// Python's objects and its global lock.
#pragma once
#include <pybind11/pybind11.h>

#include <cxxabi.h>
#include <unistd.h>

#include <exception>

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

inline bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Takes the GIL again. At interpreter shutdown CPython ends a daemon thread that asks for it by
// unwinding its stack; that must not pass through destructors (py::gil_scoped_release would end the
// process, handles would count references without the GIL), so such a thread waits here for the
// process to end.
inline void take_gil(PyThreadState* state) {
#ifdef __GLIBCXX__
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  PyEval_RestoreThread(state);
#endif
}

// Runs f without the GIL; survives the end of the interpreter.
template <class F>
void without_gil(const F& f) {
  std::exception_ptr error;
  const bool ending = finalizing();  // then this is the thread that ends the interpreter, and it may have the GIL again
  PyThreadState* state = PyEval_SaveThread();
  try {
    f();
  } catch (...) {
    error = std::current_exception();
  }
  while (!ending && finalizing()) pause();  // a daemon thread has nobody to return to
  take_gil(state);
  if (error) std::rethrow_exception(error);
}

}  // namespace txl
