// The decode kernels' instances for one element type, by width of a row and number of queries, and their launches.
#pragma once
#include "../launch.cuh"
#include "part.cuh"

namespace txl_cuda {

template <class S>
void launch_decode(const DecodeProblem& p, void* stream) {
  const auto part = part_kernel<S>;
  const auto merge = merge_kernel<typename S::T>;
  const auto grid = [&](int64_t y, int64_t z) {
    return dim3(static_cast<unsigned>(p.B), static_cast<unsigned>(y), static_cast<unsigned>(z));
  };
  const int floats = layout(S::Q, S::WIDTH, static_cast<int>(p.part_keys)).floats;
  TXL_LAUNCH(part, grid(p.Hkv * p.group_blocks, p.parts), THREADS, sizeof(float) * floats, stream, p);
  check_launch();
  if (p.parts == 1) return;
  TXL_LAUNCH(merge, grid(p.H, p.L), THREADS, sizeof(float) * THREADS * 4, stream, static_cast<const Problem&>(p));
  check_launch();
}

template <class S>
void load_decode_kernels() {
  load_kernel(part_kernel<S>);
  load_kernel(merge_kernel<typename S::T>);
}

template <class T, int LANES, int CHUNKS, class Use>
void with_queries(const DecodeProblem& p, const Use& use) {
  if (p.with_terms && p.heads * p.L <= 4) return use(Shape<T, LANES, CHUNKS, 4, true, true>());
  if (p.with_terms) return use(Shape<T, LANES, CHUNKS, MAX_DECODE_QUERIES, true, true>());
  if (p.L == 1) return use(Shape<T, LANES, CHUNKS, 1, true>());
  if (p.L <= 4) return use(Shape<T, LANES, CHUNKS, 4, true>());
  return use(Shape<T, LANES, CHUNKS, MAX_DECODE_QUERIES, true>());
}

// Calls use(Shape()) with the instance for a call. A row is read by a power of two of lanes, 16 bytes each, or by a
// warp with two loads for each lane. Rows that are not aligned are rare, so all such calls use one instance.
// `max_part_keys` in decode_launch.cu repeats these choices.
template <class T, class Use>
void with_shape(const DecodeProblem& p, const Use& use) {
  constexpr int E = 16 / sizeof(T), WIDEST = MAX_WIDTH / E / WARP;
  if (!p.aligned && p.with_terms) return use(Shape<T, WARP, WIDEST, MAX_DECODE_QUERIES, false, true>());
  if (!p.aligned) return use(Shape<T, WARP, WIDEST, MAX_DECODE_QUERIES, false>());
  if (p.D <= 64) return with_queries<T, 64 / E, 1>(p, use);
  if (p.D <= 128) return with_queries<T, 128 / E, 1>(p, use);
  return with_queries<T, WARP, WIDEST>(p, use);
}

template <class T>
void forward_decode_as(const DecodeProblem& p, void* stream) {
  with_shape<T>(p, [&](auto shape) { launch_decode<decltype(shape)>(p, stream); });
}

template <class T>
void load_decode_as(const DecodeProblem& p) {
  with_shape<T>(p, [](auto shape) { load_decode_kernels<decltype(shape)>(); });
}

}  // namespace txl_cuda
