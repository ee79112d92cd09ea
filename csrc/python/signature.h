// What of a call decides whether it is valid, as one string of bytes.
#pragma once
#include <pybind11/pybind11.h>

namespace txl {

// m.signature(call, ordinary types, strided layout) -> bytes or None; see
// txl_kernels.operators.fast_path.
void define_signature(pybind11::module_& m);

}  // namespace txl
