// The end of a block of queries in forward: out and lse, or what merge_kernel reads.
#pragma once
#include "../merge.cuh"
#include "query_block.cuh"
#include "softmax.cuh"

namespace txl_cuda {

// Of a warp, number `warp` of its consumer warpgroup.
template <class S>
struct ForwardEpilogue {
  using T = typename S::T;
  const QueryBlock<S>& block;
  int warpgroup, warp;

  // Writes out and lse; where keys are split, the weighted sums and their maximum and sum, for merge_kernel.
  TXL_DEVICE void write(const Softmax& softmax, const float (&acc_o)[S::WIDTH / 2]) const {
    const PrefillProblem& p = block.p;
    const int D = static_cast<int>(p.D), first = first_query() + accumulator_row(0);
    const float sums[2] = {softmax.sum(0), softmax.sum(1)};
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float sum = sums[h], max = softmax.max(h);
      const int i = first + 8 * h;
      if (i >= p.L) continue;
      if (p.parts > 1) {
        const int64_t x = block.bh() * p.L + i;
        float* const partial = p.partial + (x * p.parts + block.part) * p.D + accumulator_column();
        store_float_row<S::WIDTH>(partial, D, true, [&](int m) { return acc_o + 4 * m + 2 * h; });
        continue;
      }
      const float inverse_sum = 1 / (sum + weight_of_sink(i, max));
      // Without weights: 0 and -inf for a query that sees no key, NaN if all its scores are -inf or its bounds are
      // invalid.
      const int at = i - block.first_query, low = block.key_bounds[at], high = key_high(i);
      const float empty = low < high || high == INVALID_BOUNDS ? NAN : 0.f;
      T* const out = const_cast<T*>(row_of<T>(p.out, block.b, block.h, i)) + accumulator_column();
      store_row<S::WIDTH>(out, D, true, [&](int m) {
        const float* const o = acc_o + 4 * m + 2 * h;
        return sum == 0 ? pack(T(), empty, empty) : pack(T(), o[0] * inverse_sum, o[1] * inverse_sum);
      });
    }
    // Of the four lanes of a row one writes its statistics: the first for the first row, the second for the second.
    const int h = thread() % 4;
    if (h < 2 && first + 8 * h < p.L)
      write_sums(first + 8 * h, h ? sums[1] : sums[0], h ? softmax.max(1) : softmax.max(0));
  }

 private:
  // Writes lse of query i, or the maximum and sum of its part.
  TXL_DEVICE void write_sums(int i, float sum, float max) const {
    const PrefillProblem& p = block.p;
    const int64_t x = block.bh() * p.L + i;
    if (p.parts > 1) {
      float* const sums = part_sums(p, x, block.part);
      sums[0] = max, sums[1] = sum;
    } else if (p.lse) {
      p.lse[x] = sum != 0 ? log_sum_exp(p, block.b, i, max, sum) : key_high(i) == INVALID_BOUNDS ? NAN : -INFINITY;
    }
  }
  // The end of the keys that query i sees, as find_key_bounds wrote it.
  TXL_DEVICE int key_high(int i) const { return block.key_bounds[S::QUERIES + i - block.first_query]; }
  // Of the warp's 16 rows.
  TXL_DEVICE int first_query() const { return block.first_query + warpgroup * SIDE + warp * 16; }
  // The sink's weight beside those of keys, whose largest score is `max`.
  TXL_DEVICE float weight_of_sink(int i, float max) const {
    if constexpr (!S::HAS_Q_POS) return 0;
    const View& sink = block.p.sink;
    if (!block.p.has_sink || block.p.parts > 1) return 0;  // merge_kernel adds it to the sum of the parts
    return exp2f(row_of<float>(sink, block.b, block.h, 0)[i * sink.s2] * LOG2_E - max);
  }
};

// merge_kernel, begun while forward ends.
template <class T>
TXL_KERNEL void early_merge_kernel(const Problem p) {
  TXL_SHARED(shared);
  wait_on_dependent_grids();  // plant: early-merge
  merge_parts<T>(p, shared);
}

}  // namespace txl_cuda
