// CUDA runtime calls around a launch; empty in the tests' emulation.
#pragma once
#include <cstring>
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

// Enqueues zeros for `bytes` bytes.
inline void fill_zeros(void* data, int64_t bytes, void* stream) {
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}

// Loads a kernel: CUDA does so when its attributes are first queried.
template <class Kernel>
void load_kernel(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel));
}
#else
inline void check_launch() {}
inline void fill_zeros(void* data, int64_t bytes, void*) { memset(data, 0, static_cast<size_t>(bytes)); }
template <class Kernel>
void load_kernel(Kernel) {}
#endif

}  // namespace txl_cuda
