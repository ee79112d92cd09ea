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
  return {&a.q, &a.k, &a.v, &a.r, &a.u, &a.w, &a.k_mem, &a.v_mem, &a.r_bias, &a.q_pos, &a.sink};
}

Bounds bounds_of(const py::handle& tensor) {
  if (tensor.is_none()) return {};
  return {nullptr, stride(tensor, 0), stride(tensor, 1)};
}

// The signature of a call.

class Key {
 public:
  Key() { bytes_.reserve(1024); }

  template <class T>
  void add(const T* values, int64_t count) {
    bytes_.append(reinterpret_cast<const char*>(values), static_cast<size_t>(count) * sizeof(T));
  }
  void add(int64_t x) { add(&x, 1); }
  void add(double x) { add(&x, 1); }
  void add(const PyObject* x) { add(&x, 1); }
  py::bytes take() const { return py::bytes(bytes_); }

 private:
  std::string bytes_;
};

// False if x is not an ordinary tensor: of no subclass, dense, its memory holding its values.
bool add_tensor(Key& key, const py::handle& x, const py::tuple& types) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  bool ordinary = false;
  for (const py::handle type : types)
    ordinary = ordinary || reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) == type.ptr();
  TensorMetadata facts;
  if (!ordinary || !read_metadata(x, facts) || !call_method(x, is_neg).is(py::bool_(false))) return false;
  int64_t count = 1;
  for (int64_t i = 0; i < facts.axes; ++i) count *= facts.sizes[i];
  // Torch's zeros without memory lie at null plus their offset.
  if (count && reinterpret_cast<uintptr_t>(facts.data) <= static_cast<uint64_t>(facts.storage_bytes)) return false;
  key.add(facts.axes);
  key.add(facts.sizes, facts.axes);
  key.add(facts.strides, facts.axes);
  key.add(int64_t{facts.dtype});
  key.add(int64_t{facts.device_type} << 32 | static_cast<uint32_t>(facts.device_index));
  return true;
}

// False if x is not exactly what it should be: True, 1 and 1.0 are equal, but not equally valid.
bool add_setting(Key& key, const py::handle& x) {
  if (x.is_none() || PyBool_Check(x.ptr())) {
    key.add(x.ptr());
  } else if (PyFloat_CheckExact(x.ptr())) {
    key.add(reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())));
    key.add(PyFloat_AS_DOUBLE(x.ptr()));
  } else if (PyLong_CheckExact(x.ptr())) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(x.ptr(), &overflow);
    if (overflow) return false;
    key.add(reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())));
    key.add(static_cast<int64_t>(value));
  } else {
    return false;
  }
  return true;
}

py::object signature(const py::tuple& call, const py::tuple& types, const py::tuple& others) {
  if (call.size() != FIELDS) throw py::value_error("signature: not the fields of a Call");
  Key key;
  for (size_t i = 0; i < FIELDS; ++i) {
    if (i == SEED) continue;  // another at every call
    const py::handle x = call[i];
    if (!(i < SEED && !x.is_none() ? add_tensor(key, x, types) : add_setting(key, x))) return py::none();
  }
  for (const py::handle x : others)
    if (!(x.is_none() ? add_setting(key, x) : add_tensor(key, x, types))) return py::none();
  return key.take();
}

}  // namespace

py::tuple field_names() {
  return py::make_tuple("q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem", "r_bias", "q_pos",
                        "sink", "start", "end", "seed", "left", "right", "zero_row", "scale", "dropout_p", "softcap",
                        "position_scale", "zero_outside");
}

Attention attention_of(const py::tuple& call, const py::handle& out, Type type, uint32_t drop_below) {
  if (call.size() != FIELDS) throw py::value_error("not the fields of a Call");
  Attention a;
  a.type = type;
  a.B = size(call[Q], 0), a.H = size(call[Q], 1), a.L = size(call[Q], 2), a.D = size(call[Q], 3);
  a.Dv = size(call[V], 3), a.Hkv = size(call[K], 1);
  a.Dr = call[Q_POS].is_none() ? a.D : size(call[Q_POS], 3);
  a.M = call[K_MEM].is_none() ? 0 : size(call[K_MEM], 2);
  a.T = size(call[call[R].is_none() ? R_BIAS : R], 1), a.zero_row = call[ZERO_ROW].cast<int64_t>();
  for (auto [side, field] : {std::pair{&a.left, LEFT}, std::pair{&a.right, RIGHT}})
    *side = call[field].is_none() ? a.M + a.L : std::min(call[field].cast<int64_t>(), a.M + a.L);
  a.scale = static_cast<float>(call[SCALE].cast<double>());
  a.zero_outside = call[ZERO_OUTSIDE].cast<bool>();
  a.position_scale = static_cast<float>(call[POSITION_SCALE].cast<double>());
  a.softcap = static_cast<float>(call[SOFTCAP].cast<double>());
  a.drop_below = drop_below;
  if (drop_below) a.keep_scale = 65536.f / static_cast<float>(65536 - drop_below);
  const auto inputs = inputs_of(a);
  for (size_t i = 0; i < INPUTS; ++i)
    if (!call[i].is_none()) *inputs[i] = strides_of(call[i]);
  if (!call[R_BIAS].is_none()) a.r_bias.s1 = stride(call[R_BIAS], 1);  // its last axis may be strided
  if (!call[SINK].is_none()) a.sink.s2 = stride(call[SINK], 2);        // so may this one
  a.start = bounds_of(call[START]), a.end = bounds_of(call[END]);
  a.out = strides_of(out);
  return a;
}

void set_pointers(Attention& a, const py::tuple& call, const py::handle& out, const py::handle& lse) {
  const auto inputs = inputs_of(a);
  for (size_t i = 0; i < INPUTS; ++i) inputs[i]->data = pointer_of(call[i]);
  a.start.data = static_cast<const int32_t*>(pointer_of(call[START]));
  a.end.data = static_cast<const int32_t*>(pointer_of(call[END]));
  a.out.data = pointer_of(out);
  a.lse = static_cast<float*>(pointer_of(lse));
}

void define_signature(py::module_& m) {
  m.def("signature", &signature, py::arg("call"), py::arg("types"), py::arg("others") = py::tuple());
}

}  // namespace txl
