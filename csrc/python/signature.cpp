#include "signature.h"

#include <cstdint>
#include <string>

#include "call.h"
#include "objects.h"

namespace py = pybind11;

namespace txl {
namespace {

struct Names {
  PyObject* const layout = PyUnicode_InternFromString("layout");
  PyObject* const is_zero = PyUnicode_InternFromString("_is_zerotensor");
  PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* const shape = PyUnicode_InternFromString("shape");
  PyObject* const stride = PyUnicode_InternFromString("stride");
  PyObject* const dtype = PyUnicode_InternFromString("dtype");
  PyObject* const device = PyUnicode_InternFromString("device");
};

class Key {
 public:
  void add(int64_t x) { bytes_.append(reinterpret_cast<const char*>(&x), sizeof x); }
  void add(double x) { bytes_.append(reinterpret_cast<const char*>(&x), sizeof x); }
  void add(const void* x) { bytes_.append(reinterpret_cast<const char*>(&x), sizeof x); }

  void add_integers(const py::handle& tuple) {
    if (!PyTuple_Check(tuple.ptr())) throw py::type_error("signature: a tensor's shape or strides are no tuple");
    const Py_ssize_t count = PyTuple_GET_SIZE(tuple.ptr());
    add(static_cast<int64_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      const long long x = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
      if (x == -1 && PyErr_Occurred()) throw py::error_already_set();
      add(static_cast<int64_t>(x));
    }
  }
  py::bytes take() const { return py::bytes(bytes_); }

 private:
  std::string bytes_;
};

// False if x is not an ordinary tensor.
bool add_tensor(Key& key, const py::handle& x, const py::tuple& types, const py::handle& strided) {
  static const Names names;
  bool ordinary = false;
  for (const py::handle type : types)
    ordinary = ordinary || reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) == type.ptr();
  if (!ordinary || !attribute(x, names.layout).is(strided) || !call_method(x, names.is_neg).is(py::bool_(false)) ||
      !call_method(x, names.is_zero).is(py::bool_(false)))
    return false;
  key.add_integers(attribute(x, names.shape));
  key.add_integers(call_method(x, names.stride));
  key.add(static_cast<const void*>(attribute(x, names.dtype).ptr()));  // dtypes are one object each
  key.add(static_cast<int64_t>(py::hash(attribute(x, names.device))));
  return true;
}

// False if x is not exactly what it should be: True, 1 and 1.0 are equal, but not equally valid.
bool add_setting(Key& key, const py::handle& x) {
  if (x.is_none() || PyBool_Check(x.ptr())) {
    key.add(static_cast<const void*>(x.ptr()));
  } else if (PyFloat_CheckExact(x.ptr())) {
    key.add(static_cast<const void*>(Py_TYPE(x.ptr())));
    key.add(PyFloat_AS_DOUBLE(x.ptr()));
  } else if (PyLong_CheckExact(x.ptr())) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(x.ptr(), &overflow);
    if (overflow) return false;
    key.add(static_cast<const void*>(Py_TYPE(x.ptr())));
    key.add(static_cast<int64_t>(value));
  } else {
    return false;
  }
  return true;
}

py::object signature(const py::tuple& call, const py::tuple& types, const py::handle& strided) {
  if (call.size() != FIELDS) throw py::value_error("signature: not the fields of a Call");
  Key key;
  for (size_t i = 0; i < FIELDS; ++i) {
    if (i == SEED) continue;  // another at every call
    const py::handle x = call[i];
    if (i < SEED && !x.is_none()) {
      if (!add_tensor(key, x, types, strided)) return py::none();
    } else if (!add_setting(key, x)) {
      return py::none();
    }
  }
  return key.take();
}

}  // namespace

void define_signature(py::module_& m) { m.def("signature", &signature); }

}  // namespace txl
