// Queries, scores and weights in shared memory.
#pragma once
#include "../philox.cuh"
#include "block.cuh"

namespace txl_cuda {

// Writes the queries with each bias, 0 beyond L and D.
template <class S>
TXL_DEVICE void add_biases(const Block<S>& block) {
  using T = typename S::T;
  const DecodeProblem& p = block.p;
  TXL_ROLLED
  for (int x = thread(); x < block.padded_L * S::WIDTH; x += THREADS) {
    const int i = x / S::WIDTH, d = x % S::WIDTH, to = i * S::WIDTH + query_offset<S>(d);
    const bool inside = i < block.L && d < block.D;
    const float q = inside ? to_float(row_of<T>(p.q, block.b, block.h, i)[d]) : 0.f;
    block.shared[block.at.content + to] = inside ? q + to_float(row_of<T>(p.u, block.h, 0, 0)[d]) : 0.f;
    block.shared[block.at.position + to] = inside ? q + to_float(row_of<T>(p.w, block.h, 0, 0)[d]) : 0.f;
  }
}

TXL_DEVICE float log2_scale(const DecodeProblem& p) { return p.scale * 1.4426950408889634f; }  // scale * log2 e

// Writes the maximum score of each query in each warp.
template <class S>
TXL_DEVICE void find_row_maxima(const Block<S>& block) {
  const float factor = log2_scale(block.p);
  TXL_ROLLED
  for (int i = 0; i < block.L; ++i) {
    float max = -INFINITY;
    TXL_ROLLED
    for (int n = block.from(i) + thread(); n < block.to(i); n += THREADS) max = fmaxf(max, block.scores(i)[n] * factor);
    for (int step = WARP / 2; step; step /= 2) max = fmaxf(max, shuffle_xor(max, step));
    if (thread() % WARP == 0) block.shared[block.at.maxima + thread() / WARP * S::Q + i] = max;
  }
}

// Turns scores into weights relative to the part's maximum, one query after another, each by all threads. Writes the
// sum of weights of each warp.
template <class S>
TXL_DEVICE void exponentiate(const Block<S>& block) {
  const DecodeProblem& p = block.p;
  const float factor = log2_scale(p);
  TXL_ROLLED
  for (int i = 0; i < block.padded_L; ++i) {
    float max = -INFINITY, sum = 0;
    for (int n = 0; n < WARPS; ++n) max = fmaxf(max, block.shared[block.at.maxima + n * S::Q + i]);
    TXL_ROLLED
    for (int n = thread(); n < block.part_keys; n += THREADS) {
      float* const entry = block.scores(i) + n;
      const float weight = n >= block.from(i) && n < block.to(i) ? exp2_weight(*entry * factor, max) : 0.f;
      sum += weight;
      const bool drops = p.drop_below && weight != 0;
      *entry = drops ? weight * dropout_factor(p, block.bh(), i, block.first_key + n) : weight;
    }
    // plant: weights-sum-partner
    for (int step = WARP / 2; step; step /= 2) sum += shuffle_xor(sum, step);
    if (thread() % WARP == 0) block.shared[block.at.sums + thread() / WARP * S::Q + i] = sum;
  }
}

}  // namespace txl_cuda
