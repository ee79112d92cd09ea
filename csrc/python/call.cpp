#include "call.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "interpreter.h"

namespace py = pybind11;

namespace txl {
namespace {

std::array<View*, INPUTS> inputs_of(Attention& a) {
  return {&a.q, &a.k, &a.v, &a.r, &a.u, &a.w, &a.k_mem, &a.v_mem, &a.r_bias};
}

int64_t size(const py::handle& tensor, size_t axis) {
  static PyObject* const name = PyUnicode_InternFromString("shape");
  return py::tuple(attribute(tensor, name))[axis].cast<int64_t>();
}

py::tuple all_strides(const py::handle& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("stride");
  return call_method(tensor, name);
}

Bounds bounds_of(const py::handle& tensor) {
  if (tensor.is_none()) return {};
  const py::tuple strides = all_strides(tensor);
  return {nullptr, strides[0].cast<int64_t>(), strides[1].cast<int64_t>()};
}

// What follows: the signature of a call.

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

py::tuple field_names() {
  return py::make_tuple("q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem", "r_bias", "start", "end",
                        "seed", "ahead", "window", "zero_row", "scale", "dropout_p", "softcap");
}

View strides_of(const py::handle& tensor) {
  View view;
  int64_t* const strides[] = {&view.s0, &view.s1, &view.s2};
  const py::tuple all = all_strides(tensor);
  for (size_t axis = 0; axis + 1 < all.size(); ++axis) *strides[axis] = all[axis].cast<int64_t>();
  return view;
}

void* pointer_of(const py::handle& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  return tensor.is_none() ? nullptr : reinterpret_cast<void*>(call_method(tensor, name).cast<int64_t>());
}

Attention attention_of(const py::tuple& call, const py::handle& out, Type type, uint32_t drop_below) {
  if (call.size() != FIELDS) throw py::value_error("not the fields of a Call");
  Attention a;
  a.type = type;
  a.B = size(call[Q], 0), a.H = size(call[Q], 1), a.L = size(call[Q], 2), a.D = size(call[Q], 3);
  a.Dv = size(call[V], 3);
  a.M = call[K_MEM].is_none() ? 0 : size(call[K_MEM], 2);
  a.T = size(call[call[R].is_none() ? R_BIAS : R], 1), a.zero_row = call[ZERO_ROW].cast<int64_t>();
  a.ahead = call[AHEAD].is_none() ? a.M + a.L : std::min(call[AHEAD].cast<int64_t>(), a.M + a.L);
  a.window = call[WINDOW].is_none() ? 0 : call[WINDOW].cast<int64_t>();
  a.scale = static_cast<float>(call[SCALE].cast<double>());
  a.softcap = static_cast<float>(call[SOFTCAP].cast<double>());
  a.drop_below = drop_below;
  if (drop_below) a.keep_scale = static_cast<float>(1 / (1 - call[DROPOUT_P].cast<double>()));
  const auto inputs = inputs_of(a);
  for (size_t i = 0; i < INPUTS; ++i)
    if (!call[i].is_none()) *inputs[i] = strides_of(call[i]);
  if (!call[R_BIAS].is_none())
    a.r_bias.s1 = all_strides(call[R_BIAS])[1].cast<int64_t>();  // its last axis may be strided
  a.start = bounds_of(call[START]), a.end = bounds_of(call[END]);
  a.out = strides_of(out);
  return a;
}

void point_to(Attention& a, const py::tuple& call, const py::handle& out, const py::handle& lse) {
  const auto inputs = inputs_of(a);
  for (size_t i = 0; i < INPUTS; ++i) inputs[i]->data = pointer_of(call[i]);
  a.start.data = static_cast<const int32_t*>(pointer_of(call[START]));
  a.end.data = static_cast<const int32_t*>(pointer_of(call[END]));
  a.out.data = pointer_of(out);
  a.lse = static_cast<float*>(pointer_of(lse));
}

void define_signature(py::module_& m) { m.def("signature", &signature); }

}  // namespace txl
