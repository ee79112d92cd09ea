// Decode: attention of up to 16 queries over one part of the keys, limited by reading k, v and r once.
//
// A block has one (b, h), one part of the keys and all queries of the segment. It issues the loads of its first rows of
// k, r and v together, then computes scores in shared memory (content terms by row of k, then positional terms by row
// of r), weights, and the weighted sum of values. The host neither waits nor allocates.
#pragma once
#include "scores.cuh"
#include "values.cuh"

namespace txl_cuda {

template <class S>
TXL_KERNEL void part_kernel(const DecodeProblem p) {
  TXL_SHARED(shared);
  using T = typename S::T;
  const Block<S> block(p, shared);
  const Hull& hull = block.hull;
  const int low = hull.low, high = hull.high, first = low & ~3;  // weights are read four at a time
  const KeyRows<S> k(p, p.k_mem, p.k, block.b, block.h, block.first_key);
  const KeyRows<S> v(p, p.v_mem, p.v, block.b, block.h, block.first_key);
  const T* const r_row = row_of<T>(p.r, block.h, p.zero_row + p.M - block.first_key, 0);
  const auto r = [&](int n) { return r_row + n * p.r.s1; };
  Tile<S> k_tile, r_tile, v_tile;
  fetch<S>(k_tile, block.D, low, low, high, k);
  fetch<S>(r_tile, block.D, hull.r_low, hull.r_low, hull.r_high, r);
  fetch<S>(v_tile, block.D, first, low, high, v);
  add_biases(block);
  barrier();  // plant: barrier-missed-by-a-thread

  products<S>(p, shared + block.at.content, k_tile, low, high, k,
              [&](int n, int q, float x) { block.scores(q)[n] = x; });
  barrier();
  products<S>(p, shared + block.at.position, r_tile, hull.r_low, hull.r_high, r, [&](int n, int q, float x) {
    if (q - n >= low && q - n < high) block.scores(q)[q - n] += x;  // this row's distance from query q
  });
  barrier();
  find_row_maxima(block);
  barrier();
  exponentiate(block);
  barrier();

  float total[S::Q][S::PER_LANE] = {};
  add_values<S>(block, v, v_tile, first, total);
  reduce_over_block<S>(block, total);
  write(block);
}

}  // namespace txl_cuda
