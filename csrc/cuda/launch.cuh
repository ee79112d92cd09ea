// The kernels' instances for one element type: by width of a row and number of queries.
#pragma once
#include <stdexcept>
#include <string>

#include "part.cuh"
#include "launch.h"

namespace txl_cuda {

inline void check_launch() {
#ifdef __CUDACC__
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
#endif
}

template <class S>
void launch(const Problem& p, void* stream) {
  const auto part = part_kernel<S>;
  const auto merge = merge_kernel<typename S::T>;
  const auto grid = [&](int64_t z) {
    return dim3(static_cast<unsigned>(p.B), static_cast<unsigned>(p.H), static_cast<unsigned>(z));
  };
  const int floats = layout(S::Q, S::WIDTH, static_cast<int>(p.part_keys)).floats;
  TXL_LAUNCH(part, grid(p.parts), THREADS, sizeof(float) * floats, stream, p);
  check_launch();
  if (p.parts == 1) return;
  TXL_LAUNCH(merge, grid(p.L), THREADS, sizeof(float) * THREADS * 4, stream, p);
  check_launch();
}

template <class T, int LANES, int CHUNKS>
void by_queries(const Problem& p, void* stream) {
  if (p.L == 1) return launch<Shape<T, LANES, CHUNKS, 1, true>>(p, stream);
  if (p.L <= 4) return launch<Shape<T, LANES, CHUNKS, 4, true>>(p, stream);
  return launch<Shape<T, LANES, CHUNKS, MOST_QUERIES, true>>(p, stream);
}

// Lanes of a row: a power of two that covers it with 16 bytes each; rows beyond a warp take two loads a lane. Rows that
// are not aligned are rare: one instance serves them all. launch.cu's `most_keys` follows these choices.
template <class T>
void by_width(const Problem& p, void* stream) {
  constexpr int E = 16 / sizeof(T), WIDEST = MOST_WIDTH / E / WARP;
  if (!p.aligned) return launch<Shape<T, WARP, WIDEST, MOST_QUERIES, false>>(p, stream);
  if (p.D <= 64) return by_queries<T, 64 / E, 1>(p, stream);
  if (p.D <= 128) return by_queries<T, 128 / E, 1>(p, stream);
  return by_queries<T, WARP, WIDEST>(p, stream);
}

}  // namespace txl_cuda
