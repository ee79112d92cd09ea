// Merges the parts of one query, block (b, h, i), always in the same order.
#pragma once
#include "element.cuh"
#include "visible.cuh"

namespace txl_cuda {

// The maximum of scores and the sum of weights of a part of query x = (b * H + h) * L + i. They are stored after the
// weighted sums of values, partial[x, part, :].
TXL_DEVICE float* part_sums(const Problem& p, int64_t x, int64_t part) {
  return p.partial + p.B * p.H * p.L * p.parts * p.D + (x * p.parts + part) * 2;
}

// The weight of a query's sink, relative to the maximum score times log2 e; 0 without a sink. It joins the sum of
// weights at the last division alone, so lse leaves it out.
TXL_DEVICE float sink_weight(const Problem& p, int64_t b, int64_t h, int64_t i, float max) {
  constexpr float LOG2_E = 1.4426950408889634f;
  return p.sink.data ? exp2f(*row_of<float>(p.sink, b, h, i) * LOG2_E - max) : 0.f;
}

// shared: of merge_kernel.
template <class T>
TXL_DEVICE void merge_parts(const Problem& p, float* shared) {
  const int b = block_x(), h = block_y(), i = block_z();
  const int64_t x = (b * p.H + h) * p.L + i;
  const int D = static_cast<int>(p.D), parts = static_cast<int>(p.parts), lane = thread() % WARP;
  const float* const sums = part_sums(p, x, 0);
  float max = -INFINITY, sum = 0;  // the same in every warp
  for (int part = lane; part < parts; part += WARP)
    if (sums[2 * part + 1] != 0) max = fmaxf(max, sums[2 * part]);
  for (int step = WARP / 2; step; step /= 2) max = fmaxf(max, shuffle_xor(max, step));
  for (int part = lane; part < parts; part += WARP)
    if (sums[2 * part + 1] != 0) sum += sums[2 * part + 1] * exp2f(sums[2 * part] - max);
  // plant: merge-sum
  for (int step = WARP / 2; step; step /= 2) sum += shuffle_xor(sum, step);

  // Group g of D / 4 threads sums parts g, g + groups, .., each thread four elements.
  const int width = D / 4, groups = THREADS / width, group = thread() / width, d = thread() % width * 4;
  const float* const values = p.partial + x * parts * D + d;
  Float4 total = {};
  if (group < groups) {
    TXL_UNROLL_BY_4
    for (int part = group; part < parts; part += groups) {
      const Float4 value = load_float4(values + static_cast<int64_t>(part) * D);
      const float weight = sums[2 * part + 1] != 0 ? exp2f(sums[2 * part] - max) : 0.f;
      for (int e = 0; e < 4; ++e) total.x[e] += weight * value.x[e];
    }
    for (int e = 0; e < 4; ++e) shared[group * D + d + e] = total.x[e];
  }
  barrier();
  T* const out = const_cast<T*>(row_of<T>(p.out, b, h, i));
  const bool is_empty = sum == 0;
  if (thread() == 0 && p.lse) p.lse[x] = log_sum_exp(p, b, i, max, sum);
  sum += sink_weight(p, b, h, i, max);  // plant: merge-sink
  for (int n = thread(); n < D; n += THREADS) {
    float all = 0;
    for (int g = 0; g < groups; ++g) all += shared[g * D + n];
    put(out + n, is_empty ? empty_output(p, b, i) : all / sum);
  }
}

template <class T>
TXL_KERNEL void merge_kernel(const Problem p) {
  TXL_SHARED(shared);  // [groups][D]
  merge_parts<T>(p, shared);
}

}  // namespace txl_cuda
