// CUDA runtime calls around a launch; empty in the tests' emulation.
#pragma once
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

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

// Enqueues a kernel that may begin before the one enqueued before it has ended (wait_on_dependent_grids).
template <class... Parameters>
void launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, void* stream,
                  const std::remove_cv_t<Parameters>&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads)), config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = &attribute, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}
#else
inline void check_launch() {}
inline void fill_zeros(void* data, int64_t bytes, void*) { memset(data, 0, static_cast<size_t>(bytes)); }
template <class Kernel>
void load_kernel(Kernel) {}
#endif

}  // namespace txl_cuda
