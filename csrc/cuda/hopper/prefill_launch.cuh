// Launches of the forward kernel for one element type.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../launch.cuh"
#include "forward_persistent.cuh"
#include "tensor_map.cuh"

#if defined(TXL_EARLY_START) && defined(__CUDACC__)
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

// Items of persistent blocks, and their order. A section's heads have at most this many bytes of keys and values, half
// of the L2 of an H100.
template <class S>
PersistentProblem make_persistent_problem(const Problem& p) {
  constexpr int64_t SECTION_BYTES = 24 << 20, ITEM = 2;
  PersistentProblem x;
  static_cast<PrefillProblem&>(x) = make_prefill_problem(p);
  const int64_t blocks = ceil_div(p.L, S::QUERIES) * p.parts, heads = p.B * p.H, items = blocks * heads;
  if (items > INT32_MAX - p.multiprocessors)
    throw std::invalid_argument("more blocks of queries than persistent blocks can number");
  x.items = static_cast<int>(items), x.blocks = static_cast<int>(blocks);
  x.resident = static_cast<int>(std::min(items, std::max<int64_t>(1, p.multiprocessors)));
  const int64_t of_head = (p.M + p.L) * p.D * 2 * ITEM;
  x.section = static_cast<int>(std::min(heads, std::max<int64_t>(1, SECTION_BYTES / of_head)));
  return x;
}

template <class S>
void launch_prefill(const Problem& p, void* stream) {
  if constexpr (PERSISTENT) {
    const auto kernel = persistent_forward_kernel<S>;
    const PersistentProblem call = make_persistent_problem<S>(p);
    TXL_LAUNCH(kernel, dim3(static_cast<unsigned>(call.resident), 1, 1), S::THREADS, PERSISTENT_SHARED_BYTES<S>, stream,
               call);
  } else {
    const auto kernel = forward_kernel<S>;
    const PrefillProblem call = make_prefill_problem(p);
    TXL_LAUNCH(kernel, grid_of(p, ceil_div(p.L, S::QUERIES) * p.parts), S::THREADS, S::SHARED_BYTES, stream, call);
  }
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

template <class S>
void load_forward() {
  if constexpr (PERSISTENT) {
    static_assert(PERSISTENT_SHARED_BYTES<S> <= MAX_SHARED);
    allow_shared(persistent_forward_kernel<S>, PERSISTENT_SHARED_BYTES<S>);
  } else {
    allow_shared(forward_kernel<S>, S::SHARED_BYTES);
  }
}

template <class T>
void load_prefill_as(const Problem& p) {
  load_kernel(merge_kernel_of<T>());
  if (p.has_q_pos && p.D <= 64) return load_forward<ForwardQPos64<T>>();
  if (p.has_q_pos) return load_forward<ForwardQPos128<T>>();
  if (p.D <= 64) return load_forward<Forward64<T>>();
  return load_forward<Forward128<T>>();
}

}  // namespace txl_cuda
