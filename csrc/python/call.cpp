#include "call.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "../settings.h"
#include "interpreter.h"

namespace py = pybind11;

namespace txl {
namespace {

std::array<View*, INPUTS> inputs_of(Attention& a) {
#define TXL_ADDRESS(enumerator, name, member) &a.member,
  return {TXL_INPUTS(TXL_ADDRESS)};
#undef TXL_ADDRESS
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

// Reads an ordinary tensor: of no subclass, dense, its memory holding its values. False for others.
bool read_tensor(const py::handle& x, const py::tuple& types, TensorMetadata& metadata) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  bool ordinary = false;
  for (const py::handle type : types)
    ordinary = ordinary || reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) == type.ptr();
  if (!ordinary || !read_metadata(x, metadata) || !call_method(x, is_neg).is(py::bool_(false))) return false;
  int64_t count = 1;
  for (int64_t i = 0; i < metadata.axes; ++i) count *= metadata.sizes[i];
  // Torch's zeros without memory lie at null plus their offset.
  return !count || reinterpret_cast<uintptr_t>(metadata.data) > static_cast<uint64_t>(metadata.storage_bytes);
}

// with_rows: false to leave out the number of rows, the last axis but one.
void add_tensor(Key& key, const TensorMetadata& metadata, bool with_rows = true) {
  key.add(metadata.axes);
  for (int64_t i = 0; i < metadata.axes; ++i)
    if (with_rows || i != metadata.axes - 2) key.add(metadata.sizes[i]);
  key.add(metadata.strides, metadata.axes);
  key.add(int64_t{metadata.dtype});
  key.add(int64_t{metadata.device_type} << 32 | static_cast<uint32_t>(metadata.device_index));
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

// Whether a setting is None or an int of 64 bits; value: `absent` for None.
bool read_integer(const py::handle& x, int64_t absent, int64_t& value) {
  value = absent;
  if (x.is_none()) return true;
  int overflow = 0;
  if (!PyLong_CheckExact(x.ptr())) return false;
  value = PyLong_AsLongLongAndOverflow(x.ptr(), &overflow);
  return !overflow;
}

// Adds what the validity of the call, and the choice of its kernels, need of the length M of the memory: two bits.
// Returns false if they may need more, so that M itself must be part of the key: the memory is invalid, or so long that
// limits of backends are near.
bool add_memory(Key& key, const py::tuple& call, const TensorMetadata* tensors) {
  constexpr int64_t MAX_KEYS = 1 << 22;  // no limit of a backend is below
  const TensorMetadata &q = tensors[Q], &k = tensors[K_MEM], &v = tensors[V_MEM];
  const bool has_table = !call[R].is_none() || !call[R_BIAS].is_none();
  const TensorMetadata& table = tensors[call[R].is_none() ? R_BIAS : R];
  if (call[K_MEM].is_none() || call[V_MEM].is_none() || q.axes != 4 || k.axes != 4 || v.axes != 4) return false;
  if (!has_table || table.axes < 2 || k.sizes[2] != v.sizes[2]) return false;
  int64_t left = 0, zero_row = 0;
  const int64_t keys = k.sizes[2] + q.sizes[2];
  if (keys > MAX_KEYS || !read_integer(call[LEFT], MAX_KEYS, left)) return false;
  if (!read_integer(call[ZERO_ROW], -1, zero_row) || zero_row < 0 || zero_row > MAX_KEYS) return false;
  key.add(int64_t{k.sizes[2] == 0});
  key.add(int64_t{std::min(keys - 1, left) + zero_row < table.sizes[1]});  // the farthest visible key has a row
  return true;
}

enum State : int { GRAD_ENABLED = 1 };

py::object signature(const py::tuple& call, const py::tuple& types, const py::tuple& others, int state) {
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  if (call.size() != FIELDS) throw py::value_error("signature: not the fields of a Call");
  Key key;
  TensorMetadata tensors[SEED];
  bool gradients = false, aligned = true;
  for (size_t i = 0; i < SEED; ++i) {
    const py::handle x = call[i];
    if (x.is_none()) continue;
    if (!read_tensor(x, types, tensors[i])) return py::none();
    if (i >= INPUTS) continue;
    aligned = aligned && reinterpret_cast<uintptr_t>(tensors[i].data) % 16 == 0;
    if (state & GRAD_ENABLED) gradients = gradients || attribute(x, requires_grad).is(py::bool_(true));
  }
  const bool any_length = !gradients && others.empty() && add_memory(key, call, tensors);
  key.add(int64_t{any_length} | int64_t{gradients} << 1 | int64_t{aligned} << 2 | int64_t{state} << 3);
  for (size_t i = 0; i < FIELDS; ++i) {
    if (i == SEED) continue;  // another at every call
    const py::handle x = call[i];
    if (i < SEED && !x.is_none()) {
      add_tensor(key, tensors[i], !any_length || (i != K_MEM && i != V_MEM));
    } else if (!add_setting(key, x)) {
      return py::none();
    }
  }
  for (const py::handle x : others) {
    TensorMetadata metadata;
    if (x.is_none()) {
      add_setting(key, x);
    } else if (read_tensor(x, types, metadata)) {
      add_tensor(key, metadata);
    } else {
      return py::none();
    }
  }
  return key.take();
}

}  // namespace

py::tuple field_names() {
#define TXL_NAME(enumerator, name, ...) names.append(#name);
  py::list names;
  TXL_INPUTS(TXL_NAME)
  TXL_OTHER_FIELDS(TXL_NAME)
#undef TXL_NAME
  return py::tuple(names);
}

Attention attention_of(const py::tuple& call, const py::handle& out, Type type, uint32_t drop_below) {
  if (call.size() != FIELDS) throw py::value_error("not the fields of a Call");
  Attention a;
  a.type = type;
  a.B = size(call[Q], 0), a.H = size(call[Q], 1), a.L = size(call[Q], 2), a.D = size(call[Q], 3);
  a.Dv = size(call[V], 3), a.Hkv = size(call[K], 1);
  a.Dr = call[Q_POS].is_none() ? a.D : size(call[Q_POS], 3);
  a.T = size(call[call[R].is_none() ? R_BIAS : R], 1);
  Settings settings;
#define TXL_SETTING(type, enumerator, name) \
  settings.name = call[enumerator].is_none() ? std::numeric_limits<type>::max() : call[enumerator].cast<type>();
  TXL_SETTINGS(TXL_SETTING)
#undef TXL_SETTING
  set_settings(a, settings, drop_below);
  const auto inputs = inputs_of(a);
  for (size_t i = 0; i < INPUTS; ++i)
    if (!call[i].is_none()) *inputs[i] = strides_of(call[i]);
  a.start = bounds_of(call[START]), a.end = bounds_of(call[END]);
  a.out = strides_of(out);
  return a;
}

void set_memory(Attention& a, const py::tuple& call) {
  set_memory(a, call[K_MEM].is_none() ? 0 : size(call[K_MEM], 2));
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
  m.def("signature", &signature, py::arg("call"), py::arg("types"), py::arg("others"), py::arg("state"));
}

}  // namespace txl
