// The features of CUDA that the kernels use. The tests compile the same source as host C++ against an emulation of
// them.
#pragma once
#include <cstdint>

namespace txl_cuda {

constexpr int THREADS = 128, WARP = 32, WARPS = THREADS / WARP;  // of a block, unless a kernel has its own

}  // namespace txl_cuda

#ifdef __CUDACC__

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define TXL_DEVICE __device__ __forceinline__
#define TXL_ANYWHERE __host__ __device__ __forceinline__
#define TXL_UNROLL _Pragma("unroll")
#define TXL_UNROLL_BY_4 _Pragma("unroll 4")
#define TXL_ROLLED _Pragma("unroll 1")
// At least two blocks for each multiprocessor: by default ptxas would spill a few bytes to fit one block more.
#define TXL_KERNEL __global__ __launch_bounds__(txl_cuda::THREADS, 2)
// The dynamic shared memory as a float*.
#define TXL_SHARED(name) extern __shared__ __align__(16) float name[]
// The same as a char*, at a multiple of 1024 bytes, for tiles.
#define TXL_SHARED_TILES(name) extern __shared__ __align__(1024) char name[]
#define TXL_LAUNCH(kernel, grid, threads, shared, stream, ...) \
  kernel<<<grid, threads, shared, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

namespace txl_cuda {

TXL_DEVICE float bits_to_float(uint32_t x) { return __uint_as_float(x); }
TXL_DEVICE uint32_t float_to_bits(float x) { return __float_as_uint(x); }
TXL_DEVICE float half_to_float(uint16_t x) { return __half2float(__ushort_as_half(x)); }
TXL_DEVICE uint16_t float_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }

TXL_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
TXL_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
TXL_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
TXL_DEVICE int block_z() { return static_cast<int>(blockIdx.z); }
TXL_DEVICE void barrier() { __syncthreads(); }
TXL_DEVICE float shuffle_xor(float x, int step) { return __shfl_xor_sync(0xFFFFFFFFu, x, step); }
TXL_DEVICE uint32_t shuffle_bits_xor(uint32_t x, int step) { return __shfl_xor_sync(0xFFFFFFFFu, x, step); }

struct alignas(16) Chunk {
  uint32_t word[4];
};

// Loads through the read-only cache, which keeps the line for its other 16-byte pieces.
TXL_DEVICE Chunk load_16_bytes(const void* from) {
  const uint4 x = __ldg(static_cast<const uint4*>(from));
  return {{x.x, x.y, x.z, x.w}};
}

}  // namespace txl_cuda

#else
#include "simt_emulation.h"
#endif
