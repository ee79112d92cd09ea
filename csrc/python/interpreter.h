// Attributes and methods of Python objects, and the GIL.
#pragma once
#include <pybind11/pybind11.h>

#include <cxxabi.h>
#include <unistd.h>

#include <exception>

namespace txl {

// Returns x.name; throws error_already_set if Python raised.
inline pybind11::object attribute(const pybind11::handle& x, PyObject* name) {
  PyObject* result = PyObject_GetAttr(x.ptr(), name);
  if (!result) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// Returns x.name(); throws error_already_set if Python raised.
inline pybind11::object call_method(const pybind11::handle& x, PyObject* name) {
  PyObject* result = PyObject_CallMethodNoArgs(x.ptr(), name);
  if (!result) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Reacquires the GIL. During interpreter shutdown CPython ends a daemon thread that requests the GIL by unwinding its
// stack. Destructors must not run then: py::gil_scoped_release would end the process, and handles would count
// references without the GIL. So such a thread waits here for the process to end.
inline void acquire_gil(PyThreadState* state) {
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

// Runs f without the GIL. It may return during interpreter shutdown.
template <class F>
void without_gil(const F& f) {
  std::exception_ptr error;
  const bool is_last = is_finalizing();  // the thread that finalizes the interpreter, which may reacquire the GIL
  PyThreadState* state = PyEval_SaveThread();
  try {
    f();
  } catch (...) {
    error = std::current_exception();
  }
  while (!is_last && is_finalizing()) pause();  // a daemon thread, which has no caller any more
  acquire_gil(state);
  if (error) std::rethrow_exception(error);
}

}  // namespace txl
