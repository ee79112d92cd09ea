// Queries, scores and weights in shared memory.
#pragma once
#include "../philox.cuh"
#include "positions.cuh"

namespace txl_cuda {

// Writes the queries with each bias, 0 beyond their number and D.
template <class S>
TXL_DEVICE void add_biases(const Block<S>& block) {
  using T = typename S::T;
  const DecodeProblem& p = block.p;
  TXL_ROLLED
  for (int x = thread(); x < block.padded * S::WIDTH; x += THREADS) {
    const int n = x / S::WIDTH, d = x % S::WIDTH, to = n * S::WIDTH + query_offset<S>(d), h = block.head(n);
    const bool inside = n < block.queries && d < block.D;
    const float q = inside ? to_float(row_of<T>(p.q, block.b, h, block.query(n))[d]) : 0.f;
    block.shared[block.at.content + to] = inside ? q + to_float(row_of<T>(p.u, h, 0, 0)[d]) : 0.f;
    block.shared[block.at.position + to] = inside ? q + to_float(row_of<T>(p.w, h, 0, 0)[d]) : 0.f;
  }
}

// With TERMS: writes the queries with the content bias in the same way, and the position queries with theirs.
template <class S>
TXL_DEVICE void add_biases_of_terms(const Block<S>& block) {
  using T = typename S::T;
  // Elements of a thread whose loads are in flight together. They divide those of QUERIES_AT_ONCE queries.
  constexpr int AT_ONCE = S::WIDTH < THREADS ? 2 : 4;
  const DecodeProblem& p = block.p;
  TXL_ROLLED
  for (int first = thread(); first < block.padded * S::WIDTH; first += AT_ONCE * THREADS) {
    float content[AT_ONCE];
    TXL_UNROLL
    for (int m = 0; m < AT_ONCE; ++m) {
      // Loads have no condition: the compiler would wait for each before the next.
      const int x = first + m * THREADS, n = x / S::WIDTH, d = x % S::WIDTH;
      const bool inside = n < block.queries && d < block.D;
      const int row = inside ? n : 0, column = inside ? d : 0, h = block.head(row);
      const float q = to_float(row_of<T>(p.q, block.b, h, block.query(row))[column]);
      const float sum = q + to_float(row_of<T>(p.u, h, 0, 0)[column]);
      content[m] = inside ? sum : 0.f;
    }
    TXL_UNROLL
    for (int m = 0; m < AT_ONCE; ++m) {
      const int x = first + m * THREADS, to = x / S::WIDTH * S::WIDTH + query_offset<S>(x % S::WIDTH);
      block.shared[block.at.content + to] = content[m];
    }
  }
  add_position_bias(block);
}

// The factor that turns stored scores into exponents of 2. With TERMS scores are stored with their factors, since
// content and position have different ones.
template <class S>
TXL_DEVICE float exponent_factor(const DecodeProblem& p) {
  return S::TERMS ? 1.f : p.scale * LOG2_E;
}

// Writes the maximum score of each query in each warp.
template <class S>
TXL_DEVICE void find_row_maxima(const Block<S>& block) {
  const float factor = exponent_factor<S>(block.p);
  TXL_ROLLED
  for (int i = 0; i < block.queries; ++i) {
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
  const float factor = exponent_factor<S>(p);
  TXL_ROLLED
  for (int i = 0; i < block.padded; ++i) {
    float max = -INFINITY, sum = 0;
    for (int n = 0; n < WARPS; ++n) max = fmaxf(max, block.shared[block.at.maxima + n * S::Q + i]);
    TXL_ROLLED
    for (int n = thread(); n < block.part_keys; n += THREADS) {
      float* const entry = block.scores(i) + n;
      const float weight = n >= block.from(i) && n < block.to(i) ? exp2_weight(*entry * factor, max) : 0.f;
      sum += weight;
      const bool drops = p.drop_below && weight != 0;
      *entry = drops ? weight * dropout_factor(p, block.bh(i), block.query(i), block.first_key + n) : weight;
    }
    // plant: weights-sum-partner
    for (int step = WARP / 2; step; step /= 2) sum += shuffle_xor(sum, step);
    if (thread() % WARP == 0) block.shared[block.at.sums + thread() / WARP * S::Q + i] = sum;
  }
}

}  // namespace txl_cuda
