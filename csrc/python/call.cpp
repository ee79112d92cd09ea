#include "call.h"

#include <algorithm>
#include <array>

#include "objects.h"

namespace py = pybind11;

namespace txl {
namespace {

std::array<View*, INPUTS> inputs_of(Attention& a) { return {&a.q, &a.k, &a.v, &a.r, &a.u, &a.w, &a.k_mem, &a.v_mem}; }

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

}  // namespace

py::tuple field_names() {
  return py::make_tuple("q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem", "start", "end", "seed",
                        "ahead", "window", "zero_row", "scale", "dropout_p");
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
  a.M = call[K_MEM].is_none() ? 0 : size(call[K_MEM], 2);
  a.T = size(call[R], 1), a.zero_row = call[ZERO_ROW].cast<int64_t>();
  a.ahead = call[AHEAD].is_none() ? a.M + a.L : std::min(call[AHEAD].cast<int64_t>(), a.M + a.L);
  a.window = call[WINDOW].is_none() ? 0 : call[WINDOW].cast<int64_t>();
  a.scale = static_cast<float>(call[SCALE].cast<double>());
  a.drop_below = drop_below;
  if (drop_below) a.keep_scale = static_cast<float>(1 / (1 - call[DROPOUT_P].cast<double>()));
  const auto inputs = inputs_of(a);
  for (size_t i = 0; i < INPUTS; ++i)
    if (!call[i].is_none()) *inputs[i] = strides_of(call[i]);
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

}  // namespace txl
