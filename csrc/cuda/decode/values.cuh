// The weighted sum of values, and the results of a part.
#pragma once
#include "../merge.cuh"
#include "block.cuh"

namespace txl_cuda {

// Clears rows that no query sees, which lie between the queries' intervals and may hold NaN.
template <class S>
TXL_DEVICE void clear_hidden_rows(const Block<S>& block, int row, float (&x)[ROWS][S::PER_LANE]) {
  TXL_UNROLL
  for (int z = 0; z < ROWS; ++z) {
    bool seen = false;
    for (int i = 0; i < block.queries; ++i) seen |= row + z >= block.from(i) && row + z < block.to(i);
    TXL_UNROLL
    for (int d = 0; d < S::PER_LANE; ++d) x[z][d] = seen ? x[z][d] : 0.f;
  }
}

// Adds this thread's share of the weighted sums of values to total. `tile` is the first tile, from row `first` on,
// whose loads have been issued.
template <class S>
TXL_DEVICE void add_values(const Block<S>& block, const KeyRows<S>& v, Tile<S>& tile, int first,
                           float (&total)[S::Q][S::PER_LANE]) {
  const int low = block.hull.low, high = block.hull.high;
  const bool gaps = S::Q > 1 && (block.p.start.data || block.p.end.data);
  for (int n = first; n < high; n += S::STEP) {
    float x[ROWS][S::PER_LANE];
    widen<S>(tile, x);
    fetch<S>(tile, block.D, n + S::STEP, low, high, v);
    const int row = n + first_row<S>();
    if (row >= block.part_keys) continue;
    if (gaps) clear_hidden_rows<S>(block, row, x);
    TXL_UNROLL
    for (int q = 0; q < S::Q; ++q) {
      if (q % S::QUERIES_AT_ONCE == 0 && q >= block.queries) break;
      const Float4 weight = load_float4(block.scores(q) + row);
      TXL_UNROLL
      for (int z = 0; z < ROWS; ++z) TXL_UNROLL
      for (int d = 0; d < S::PER_LANE; ++d) total[q][d] += weight.x[z] * x[z][d];
    }
  }
}

// Reduces total over threads into [Q][WIDTH] at the start of shared memory, which overwrites the queries: groups of a
// warp by shuffles, then warps one after another, in a fixed order.
template <class S>
TXL_DEVICE void reduce_over_block(const Block<S>& block, float (&total)[S::Q][S::PER_LANE]) {
  const int warp = thread() / WARP;
  TXL_ROLLED
  for (int turn = 0; turn < WARPS; ++turn) {
    TXL_UNROLL
    for (int q = 0; q < S::Q; ++q) {
      if (q >= block.queries) break;
      TXL_UNROLL
      for (int d = 0; d < S::PER_LANE; ++d) {
        if (turn == 0)
          // plant: values-sum-steps
          for (int step = S::LANES; step < WARP; step *= 2) total[q][d] += shuffle_xor(total[q][d], step);
        float* const to = block.shared + q * S::WIDTH + column<S>(d / S::E) + d % S::E;
        if (warp == turn && thread() % WARP < S::LANES) *to = turn ? *to + total[q][d] : total[q][d];
      }
    }
    barrier();
  }
}

// Writes the results of reduce_over_block to the outputs, or to the workspace if there are several parts.
template <class S>
TXL_DEVICE void write(const Block<S>& block) {
  using T = typename S::T;
  const DecodeProblem& p = block.p;
  TXL_ROLLED
  for (int n = 0; n < block.queries; ++n) {
    float max = -INFINITY, sum = 0;
    for (int warp = 0; warp < WARPS; ++warp) {
      max = fmaxf(max, block.shared[block.at.maxima + warp * S::Q + n]);
      sum += block.shared[block.at.sums + warp * S::Q + n];
    }
    const int i = block.query(n), h = block.head(n);
    const int64_t x = block.bh(n) * (S::TERMS ? p.L : block.queries) + i;
    float denominator = sum;
    if (S::TERMS && p.parts == 1) denominator += sink_weight(p, block.b, h, i, max);  // plant: sink-of-one-part
    TXL_ROLLED
    for (int d = thread(); d < block.D; d += THREADS) {
      const float value = block.shared[n * S::WIDTH + d];
      if (p.parts > 1) {
        p.partial[(x * p.parts + block.part) * block.D + d] = value;
      } else {
        T* const out = const_cast<T*>(row_of<T>(p.out, block.b, h, i));
        put(out + d, sum == 0 ? empty_output(p, block.b, i) : value / denominator);
      }
    }
    if (thread() != 0) continue;
    if (p.parts > 1) {
      part_sums(p, x, block.part)[0] = max, part_sums(p, x, block.part)[1] = sum;
    } else if (p.lse) {
      p.lse[x] = log_sum_exp(p, block.b, i, max, sum);
    }
  }
}

}  // namespace txl_cuda
