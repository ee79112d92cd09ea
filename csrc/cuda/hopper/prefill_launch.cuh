// Launches of the forward kernel for one element type.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../launch.cuh"
#include "forward.cuh"
#include "tensor_map.cuh"

#if defined(TXL_TWO_WARPGROUPS) && defined(__CUDACC__)
#define TXL_LAUNCH_NEXT launch_early
#else
#define TXL_LAUNCH_NEXT TXL_LAUNCH
#endif

namespace txl_cuda {

inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

inline PrefillProblem make_prefill_problem(const Problem& p) {
  PrefillProblem x;
  static_cast<Problem&>(x) = p;
  for (const View* view : {&p.q, &p.u, &p.w, &p.out}) require_start(*view);
  if (p.has_q_pos) require_start(p.q_pos);
  x.k_rows = map_rows(p, p.k, p.B, p.Hkv, p.L), x.v_rows = map_rows(p, p.v, p.B, p.Hkv, p.L);
  x.k_mem_rows = map_rows(p, p.k_mem, p.B, p.Hkv, p.M), x.v_mem_rows = map_rows(p, p.v_mem, p.B, p.Hkv, p.M);
  x.r_rows = p.has_q_pos ? map_narrow_rows(p, p.r, 0, p.T, p.Dr) : map_rows(p, p.r, 0, p.H, p.T);
  return x;
}

// Loads a kernel that takes more shared memory than is granted without asking, once before its launches.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
#ifdef __CUDACC__
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
#else
  static_cast<void>(kernel), static_cast<void>(bytes);
#endif
}

// Blocks of one batch row and head lie next to each other: they run together, and what they read, keys and
// values or queries, comes from memory once and else from the L2.
inline dim3 grid_of(const Problem& p, int64_t blocks) {
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.H), static_cast<unsigned>(p.B));
}

template <class T>
constexpr auto merge_kernel_of() {
  if constexpr (EARLY_START) {
    return early_merge_kernel<T>;
  } else {
    return merge_kernel<T>;
  }
}

template <class S>
void launch_prefill(const Problem& p, void* stream) {
  const auto kernel = forward_kernel<S>;
  const PrefillProblem call = make_prefill_problem(p);
  TXL_LAUNCH(kernel, grid_of(p, ceil_div(p.L, S::QUERIES) * p.parts), S::THREADS, S::SHARED_BYTES, stream, call);
  check_launch();
  if (p.parts == 1) return;
  const auto merge = merge_kernel_of<typename S::T>();
  const dim3 queries(static_cast<unsigned>(p.B), static_cast<unsigned>(p.H), static_cast<unsigned>(p.L));
  TXL_LAUNCH_NEXT(merge, queries, THREADS, sizeof(float) * THREADS * 4, stream, p);
  check_launch();
}

template <class T>
void forward_prefill_as(const Problem& p, void* stream) {
  if (p.has_q_pos && p.D <= 64) return launch_prefill<ForwardQPos64<T>>(p, stream);
  if (p.has_q_pos) return launch_prefill<ForwardQPos128<T>>(p, stream);
  if (p.D <= 64) return launch_prefill<Forward64<T>>(p, stream);
  return launch_prefill<Forward128<T>>(p, stream);
}

template <class T>
void load_prefill_as(const Problem& p) {
  load_kernel(merge_kernel_of<T>());
  if (p.has_q_pos && p.D <= 64) return allow_shared(forward_kernel<ForwardQPos64<T>>, ForwardQPos64<T>::SHARED_BYTES);
  if (p.has_q_pos) return allow_shared(forward_kernel<ForwardQPos128<T>>, ForwardQPos128<T>::SHARED_BYTES);
  if (p.D <= 64) return allow_shared(forward_kernel<Forward64<T>>, Forward64<T>::SHARED_BYTES);
  return allow_shared(forward_kernel<Forward128<T>>, Forward128<T>::SHARED_BYTES);
}

}  // namespace txl_cuda
