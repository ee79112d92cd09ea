// From queries to weights, in shared memory.
#pragma once
#include "../philox.cuh"
#include "block.cuh"

namespace txl_cuda {

// Queries with each bias, 0 beyond L and D.
template <class S>
TXL_DEVICE void add_biases(const Block<S>& block) {
  using T = typename S::T;
  const DecodeProblem& p = block.p;
  TXL_ROLLED
  for (int x = thread(); x < block.rounded * S::WIDTH; x += THREADS) {
    const int i = x / S::WIDTH, d = x % S::WIDTH, to = i * S::WIDTH + in_quarters<S>(d);
    const bool inside = i < block.L && d < block.D;
    const float q = inside ? to_float(row_of<T>(p.q, block.b, block.h, i)[d]) : 0.f;
    block.shared[block.at.content + to] = inside ? q + to_float(row_of<T>(p.u, block.h, 0, 0)[d]) : 0.f;
    block.shared[block.at.position + to] = inside ? q + to_float(row_of<T>(p.w, block.h, 0, 0)[d]) : 0.f;
  }
}

TXL_DEVICE float in_base_2(const DecodeProblem& p) { return p.scale * 1.4426950408889634f; }  // scale * log2 e

// Largest score of each query, by warp.
template <class S>
TXL_DEVICE void find_tops(const Block<S>& block) {
  const float factor = in_base_2(block.p);
  TXL_ROLLED
  for (int i = 0; i < block.L; ++i) {
    float top = -INFINITY;
    TXL_ROLLED
    for (int n = block.from(i) + thread(); n < block.to(i); n += THREADS) top = fmaxf(top, block.scores(i)[n] * factor);
    for (int step = WARP / 2; step; step /= 2) top = fmaxf(top, shuffle_xor(top, step));
    if (thread() % WARP == 0) block.shared[block.at.tops + thread() / WARP * S::Q + i] = top;
  }
}

// Scores become weights relative to the largest of the part, query by query; every thread helps
// with each. Sums by warp.
template <class S>
TXL_DEVICE void weigh(const Block<S>& block) {
  const DecodeProblem& p = block.p;
  const float factor = in_base_2(p);
  TXL_ROLLED
  for (int i = 0; i < block.rounded; ++i) {
    float top = -INFINITY, sum = 0;
    for (int n = 0; n < WARPS; ++n) top = fmaxf(top, block.shared[block.at.tops + n * S::Q + i]);
    TXL_ROLLED
    for (int n = thread(); n < block.part_keys; n += THREADS) {
      float* const entry = block.scores(i) + n;
      const float weight = n >= block.from(i) && n < block.to(i) ? weight_of(*entry * factor, top) : 0.f;
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
