// How dr leaves a block of queries. Every step of the main loop has a product for dr, and each product has an epilogue
// that adds it to global memory. There are three classes with one interface: DrTransposed (width 64) and DrInHalves
// (width 128), by TMA reductions, and DrNarrow (with position queries), by additions of pairs. In the order of the
// calls:
//
//   flush(dr, t)   before a product overwrites dr, which is that of tile t: what is still in registers leaves
//   acquire()      waits until the buffer in shared memory may be written; a barrier of the warpgroup follows
//   store(dr)      writes dr to the buffer; a fence and a barrier of the warpgroup follow
//   start(dr, t)   starts the reductions of dr, which is that of tile t
//   drain()        after the last tile: waits until the buffer has been read
//
// flush and start also take the problem and the block.
#pragma once
#include "backward_problem.h"
#include "fragments.cuh"
#include "query_block.cuh"

namespace txl_cuda {

// The rows of dr to which a warpgroup adds.
struct DrRows {
  int table, first;  // the number of its table, the first row of the tile of distances that is whole after tile 0
  template <class S>
  TXL_DEVICE static DrRows of(const BackwardProblem& p, const QueryBlock<S>& block, int warpgroup) {
    const int table = p.slots ? block_x() * S::QUERY_GROUPS + warpgroup : 0;
    return {table, static_cast<int>(p.zero_row) + block.distance(-1 - warpgroup)};  // plant: rows-of-dr
  }
  // The row, in the table, of the first distance of the tile that is whole after tile t.
  TXL_DEVICE int row(int t) const { return first - t * SIDE + static_cast<int>(DR_MARGIN); }
};

}  // namespace txl_cuda
