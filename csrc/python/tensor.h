// A torch.Tensor as kernels need it, without a header of torch: by torch's C functions for compiled
// models, which its versions have in common, or, where one is missing, by Python's attributes.
#pragma once
#include <pybind11/pybind11.h>

#include "../attention.h"

namespace txl {

int64_t size(const pybind11::handle& tensor, size_t axis);
int64_t stride(const pybind11::handle& tensor, size_t axis);

// Strides of a tensor [.., .., .., D]; missing axes have stride 0. data is left null.
View strides_of(const pybind11::handle& tensor);

// x.data_ptr(); null for None.
void* pointer_of(const pybind11::handle& tensor);

// Both.
View view_of(const pybind11::handle& tensor);

// The facts that the C functions return; sizes and strides lie in the tensor.
struct Facts {
  int64_t axes = 0, storage_bytes = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0, device_index = 0;
  void* data = nullptr;
};

// False without the functions, and for what has no strides or no memory of its own: sparse and
// nested tensors, batches of functorch.
bool tell(const pybind11::handle& tensor, Facts& facts);

// m.TORCH_FUNCTIONS: their names; m.set_torch_functions(addresses); m.facts(tensor) -> (shape,
// strides, address) by them, or None.
void define_facts(pybind11::module_& m);

}  // namespace txl
