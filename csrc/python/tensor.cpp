#include "tensor.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "interpreter.h"

namespace py = pybind11;

namespace txl {
namespace {

// The functions of torch/csrc/inductor/aoti_torch/c/shim.h. They take an at::Tensor*, and an at::Tensor is one pointer,
// which Python has as `_cdata`. They return 0 on success.
template <class T>
using Function = int32_t (*)(void* const* tensor, T* result);

struct Functions {
  Function<int64_t> axes, storage_bytes;
  Function<int64_t*> sizes, strides;
  Function<int32_t> dtype, device_type, device_index;
  Function<void*> data;
};

constexpr size_t kFunctions = 8;
const char* const kNames[kFunctions] = {
    "aoti_torch_get_dim",   "aoti_torch_get_storage_size", "aoti_torch_get_sizes",        "aoti_torch_get_strides",
    "aoti_torch_get_dtype", "aoti_torch_get_device_type",  "aoti_torch_get_device_index", "aoti_torch_get_data_ptr",
};

Functions g_functions;
bool g_complete = false;

void set_torch_functions(const std::vector<uint64_t>& addresses) {
  if (addresses.size() != kFunctions) throw py::value_error("an address is needed for each of TORCH_FUNCTIONS");
  size_t next = 0;
  g_complete = true;
  const auto set = [&](auto& function) {
    g_complete = g_complete && addresses[next];
    function = reinterpret_cast<std::decay_t<decltype(function)>>(addresses[next++]);
  };
  Functions& f = g_functions;
  set(f.axes), set(f.storage_bytes), set(f.sizes), set(f.strides), set(f.dtype);
  set(f.device_type), set(f.device_index), set(f.data);
}

void* handle_of(const py::handle& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_cdata");
  void* const p = PyLong_AsVoidPtr(attribute(tensor, name).ptr());
  if (!p && PyErr_Occurred()) throw py::error_already_set();
  return p;
}

template <class T>
T call(Function<T> function, void* tensor) {
  T result{};
  if (function(&tensor, &result)) throw std::runtime_error("this tensor has no strides or no memory of its own");
  return result;
}

py::tuple shape_in_python(const py::handle& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("shape");
  return attribute(tensor, name);
}

py::tuple strides_in_python(const py::handle& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("stride");
  return call_method(tensor, name);
}

View strides_of(void* tensor) {
  View view;
  int64_t* const targets[] = {&view.s0, &view.s1, &view.s2};
  const auto axes = call(g_functions.axes, tensor);
  const int64_t* const strides = call(g_functions.strides, tensor);
  for (int64_t axis = 0; axis < std::min<int64_t>(axes, 3); ++axis) *targets[axis] = strides[axis];
  return view;
}

py::object tensor_metadata(const py::handle& tensor) {
  TensorMetadata x;
  if (!read_metadata(tensor, x)) return py::none();
  const auto tuple = [&](const int64_t* values) { return py::tuple(py::cast(std::vector(values, values + x.axes))); };
  return py::make_tuple(tuple(x.sizes), tuple(x.strides), reinterpret_cast<uint64_t>(x.data));
}

}  // namespace

int64_t size(const py::handle& tensor, size_t axis) {
  if (g_complete) return call(g_functions.sizes, handle_of(tensor))[axis];
  return shape_in_python(tensor)[axis].cast<int64_t>();
}

int64_t stride(const py::handle& tensor, size_t axis) {
  if (g_complete) return call(g_functions.strides, handle_of(tensor))[axis];
  return strides_in_python(tensor)[axis].cast<int64_t>();
}

View strides_of(const py::handle& tensor) {
  if (g_complete) return strides_of(handle_of(tensor));
  View view;
  int64_t* const targets[] = {&view.s0, &view.s1, &view.s2};
  const py::tuple strides = strides_in_python(tensor);
  for (size_t axis = 0; axis < std::min<size_t>(strides.size(), 3); ++axis)
    *targets[axis] = strides[axis].cast<int64_t>();
  return view;
}

void* pointer_of(const py::handle& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  if (tensor.is_none()) return nullptr;
  if (g_complete) return call(g_functions.data, handle_of(tensor));
  return reinterpret_cast<void*>(call_method(tensor, name).cast<int64_t>());
}

View view_of(const py::handle& tensor) {
  View view;
  if (g_complete) {
    void* const x = handle_of(tensor);
    view = strides_of(x);
    view.data = call(g_functions.data, x);
  } else {
    view = strides_of(tensor);
    view.data = pointer_of(tensor);
  }
  return view;
}

bool read_metadata(const py::handle& tensor, TensorMetadata& m) {
  if (!g_complete) return false;
  void* const x = handle_of(tensor);
  const auto read = [x](auto function, auto& result) { return function(&x, &result) == 0; };
  const Functions& f = g_functions;
  int64_t *sizes = nullptr, *strides = nullptr;
  const bool succeeded = read(f.axes, m.axes) && read(f.sizes, sizes) && read(f.strides, strides) &&
                         read(f.dtype, m.dtype) && read(f.device_type, m.device_type) &&
                         read(f.device_index, m.device_index) && read(f.storage_bytes, m.storage_bytes) &&
                         read(f.data, m.data);
  m.sizes = sizes, m.strides = strides;
  return succeeded;
}

void define_tensor_metadata(py::module_& m) {
  m.attr("TORCH_FUNCTIONS") = py::tuple(py::cast(std::vector<std::string>(kNames, kNames + kFunctions)));
  m.def("set_torch_functions", &set_torch_functions);
  m.def("tensor_metadata", &tensor_metadata);
}

}  // namespace txl
