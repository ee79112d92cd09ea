// The functions of launch.h in the Python module, which call those of the library beside it.
#pragma once
#include <pybind11/pybind11.h>

namespace txl_cuda {

// Adds set_library(address of what the library's txl_cuda_library returned) -> whether module and library are of the
// same sources; it sets compiler, architectures and clock_limit.
void define_library(pybind11::module_& m);

}  // namespace txl_cuda
