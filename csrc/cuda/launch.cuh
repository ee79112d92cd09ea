// CUDA runtime calls around a launch; empty in the tests' emulation.
#pragma once
#include <stdexcept>
#include <string>

#include "launch.h"
#include "simt.h"

namespace txl_cuda {

#ifdef __CUDACC__
inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}
inline void check_launch() { check(cudaGetLastError()); }

// Loads a kernel: CUDA does so when its attributes are first queried.
template <class Kernel>
void load_kernel(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel));
}
#else
inline void check_launch() {}
template <class Kernel>
void load_kernel(Kernel) {}
#endif

}  // namespace txl_cuda
