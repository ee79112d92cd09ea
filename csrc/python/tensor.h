// Access to torch.Tensor without torch's headers: by the C functions that torch has for compiled models, which are the
// same in all of its versions, or, if one is missing, by Python attributes.
#pragma once
#include <pybind11/pybind11.h>

#include "../attention.h"

namespace txl {

int64_t size(const pybind11::handle& tensor, size_t axis);
int64_t stride(const pybind11::handle& tensor, size_t axis);

// The strides of a tensor's first three axes; missing axes have stride 0. data is null.
View strides_of(const pybind11::handle& tensor);

// x.data_ptr(); null for None.
void* pointer_of(const pybind11::handle& tensor);

// The strides and the pointer.
View view_of(const pybind11::handle& tensor);

// A tensor's metadata, as the C functions return it; sizes and strides point into the tensor.
struct TensorMetadata {
  int64_t axes = 0, storage_bytes = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0, device_index = 0;
  void* data = nullptr;
};

// Reads the metadata of a tensor. Returns false without the C functions, and for tensors without strides or memory of
// their own: sparse and nested tensors, functorch's batched tensors.
bool read_metadata(const pybind11::handle& tensor, TensorMetadata& metadata);

// Adds to a module TORCH_FUNCTIONS, the names of the C functions; set_torch_functions(addresses); and
// tensor_metadata(tensor) -> (shape, strides, address), read by them, or None.
void define_tensor_metadata(pybind11::module_& m);

}  // namespace txl
