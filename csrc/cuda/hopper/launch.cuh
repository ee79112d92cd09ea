// The Hopper kernels' instances for one element type.
#pragma once
#include "../launch.cuh"
#include "forward.cuh"
#include "tensor_map.cuh"

namespace txl_cuda {

template <class T>
using Narrow = ForwardShape<T, 64, 2, 3, 4>;
template <class T>
using Wide = ForwardShape<T, 128, 2, 2, 4>;

inline LongProblem describe_call(const Problem& p) {
  LongProblem x;
  static_cast<Problem&>(x) = p;
  x.k_rows = map_rows(p, p.k, p.B, p.L), x.v_rows = map_rows(p, p.v, p.B, p.L);
  x.k_mem_rows = map_rows(p, p.k_mem, p.B, p.M), x.v_mem_rows = map_rows(p, p.v_mem, p.B, p.M);
  x.r_rows = map_rows(p, p.r, 0, p.T);
  return x;
}

// Loads a kernel that takes more shared memory than is granted without asking.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
#ifdef __CUDACC__
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
#else
  static_cast<void>(kernel), static_cast<void>(bytes);
#endif
}

template <class S>
void launch_long(const Problem& p, void* stream) {
  const auto kernel = forward_kernel<S>;
  allow_shared(kernel, S::shared);
  const auto grid = [&](int64_t z) {
    return dim3(static_cast<unsigned>(p.B), static_cast<unsigned>(p.H), static_cast<unsigned>(z));
  };
  const LongProblem call = describe_call(p);
  TXL_LAUNCH(kernel, grid((p.L + S::QUERIES - 1) / S::QUERIES * p.parts), S::THREADS, S::shared, stream, call);
  check_launch();
  if (p.parts == 1) return;
  const auto merge = merge_kernel<typename S::T>;
  TXL_LAUNCH(merge, grid(p.L), THREADS, sizeof(float) * THREADS * 4, stream, p);
  check_launch();
}

template <class T>
void forward_long_as(const Problem& p, void* stream) {
  if (p.D <= 64) return launch_long<Narrow<T>>(p, stream);
  return launch_long<Wide<T>>(p, stream);
}

template <class T>
void load_forward_as(const Problem& p) {
  load_kernel(merge_kernel<T>);
  if (p.D <= 64) return allow_shared(forward_kernel<Narrow<T>>, Narrow<T>::shared);
  return allow_shared(forward_kernel<Wide<T>>, Wide<T>::shared);
}

}  // namespace txl_cuda
