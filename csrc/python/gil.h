// Work without Python's global lock that survives the end of the interpreter.
#pragma once
#include <pybind11/pybind11.h>

#include <cxxabi.h>
#include <unistd.h>

#include <exception>

namespace txl {

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

// Runs f without the GIL.
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
