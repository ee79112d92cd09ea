// The kernels' instances for one element type: by width of a row and number of queries.
#pragma once
#include <stdexcept>
#include <string>

#include "decode.cuh"
#include "launch.h"

namespace txl_cuda {

inline void check_launch() {
#ifdef __CUDACC__
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
#endif
}

template <class T, int LANES, int CHUNKS, int Q>
void launch(const Problem& p, void* stream) {
  const auto part = part_kernel<T, LANES, CHUNKS, Q>;
  const auto merge = merge_kernel<T>;
  const dim3 blocks(static_cast<unsigned>(p.B * p.H), static_cast<unsigned>(p.parts));
  TXL_LAUNCH(part, blocks, THREADS, static_cast<size_t>(shared_bytes(p.L, p.D, p.part_keys)), stream, p);
  check_launch();
  if (p.parts == 1) return;
  TXL_LAUNCH(merge, dim3(static_cast<unsigned>(p.B * p.H * p.L)), THREADS, 0, stream, p);
  check_launch();
}

template <class T, int LANES, int CHUNKS>
void by_queries(const Problem& p, void* stream) {
  if (p.L == 1) return launch<T, LANES, CHUNKS, 1>(p, stream);
  if (p.L <= 4) return launch<T, LANES, CHUNKS, 4>(p, stream);
  return launch<T, LANES, CHUNKS, MOST_QUERIES>(p, stream);
}

// Lanes of a row: a power of two that covers it with 16 bytes each; rows beyond a warp take two loads a lane.
template <class T>
void by_width(const Problem& p, void* stream) {
  constexpr int E = PER_CHUNK<T>;
  if (p.D <= 64) return by_queries<T, 64 / E, 1>(p, stream);
  if (p.D <= 128) return by_queries<T, 128 / E, 1>(p, stream);
  return by_queries<T, WARP, 256 / E / WARP>(p, stream);
}

}  // namespace txl_cuda
