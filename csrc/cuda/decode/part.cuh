// Decode: attention of up to 16 queries over one part of the keys, limited by reading k, v and r once.
//
// A block has one (b, h), one part of the keys and all queries of the segment; with TERMS all query heads of a head of
// keys, up to 16 queries together. It issues the loads of its first rows of k, r and v together, then computes scores
// in shared memory (content terms by row of k, then positional terms by row of r), weights, and the weighted sum of
// values. The host neither waits nor allocates.
#pragma once
#include "scores.cuh"
#include "values.cuh"

namespace txl_cuda {

template <class S>
TXL_KERNEL void part_kernel(const DecodeProblem p) {
  TXL_SHARED(shared);
  const Block<S> block(p, shared);
  const Hull& hull = block.hull;
  const int low = hull.low, high = hull.high, first = low & ~3;  // weights are read four at a time
  const KeyRows<S> k(p, p.k_mem, p.k, block.b, block.heads.keys, block.first_key);
  const KeyRows<S> v(p, p.v_mem, p.v, block.b, block.heads.keys, block.first_key);
  TableRows<S> r(block);
  Tile<S> k_tile, v_tile;
  FirstRows<S> r_first;
  fetch<S>(k_tile, block.D, low, low, high, k);
  fetch_positions(r, r_first, block);
  fetch<S>(v_tile, block.D, first, low, high, v);
  if constexpr (S::TERMS)
    add_biases_of_terms(block);
  else
    add_biases(block);
  barrier();  // plant: barrier-missed-by-a-thread

  products<S>(block.D, block.queries, shared + block.at.content, k_tile, low, high, k,
              [&](int n, int q, float x) { block.scores(q)[n] = S::TERMS ? x * p.scale * LOG2_E : x; });
  barrier();
  add_positions(r, r_first, block);
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
