// A block of queries, in forward and in the gradients of queries: warpgroup w has queries 64 w
// .. + 63, all walk the tiles of keys together.
//
// Scores of tile t need two blocks of 64 distances; for warpgroup w block t - w is new there, the other
// came with the tile before (skew.cuh). So r's tile j serves warpgroup w at tile j + w, and is loaded once.
#pragma once
#include "config.cuh"
#include "loads.cuh"

namespace txl_cuda {

// A block of queries and its part of the keys.
template <class S>
struct QueryBlock {
  const PrefillProblem& p;
  char* shared;
  Keys keys;
  int b, h = block_y(), part, first;  // first query
  int tile, tiles;                    // the part's first tile, and how many
  PipelineBarriers<S::STAGES> k;
  PipelineBarriers<S::V_STAGES> v;
  PipelineBarriers<S::R_STAGES> r;
  int* seen;

  // number: of the block of queries of batch row b and its part of the keys.
  TXL_DEVICE QueryBlock(const PrefillProblem& problem, char* memory, int batch_row, int number)
      : p(problem), shared(memory), keys(problem), b(batch_row) {
    // The last queries see the most keys where attention is causal: they begin first.
    const int parts = static_cast<int>(p.parts), blocks = (static_cast<int>(p.L) + S::QUERIES - 1) / S::QUERIES;
    part = number % parts, first = (blocks - 1 - number / parts) * S::QUERIES;
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared + S::barriers);
    k.first = barriers, v.first = k.first + k.BARRIERS, r.first = v.first + v.BARRIERS;
    seen = reinterpret_cast<int*>(shared + S::seen);
    if (thread() == S::GROUPS * WARPGROUP) {
      for (const RowsMap* rows : {&p.k_rows, &p.v_rows, &p.r_rows}) prefetch_tma_descriptor(rows->map);
      if (p.M) prefetch_tma_descriptor(p.k_mem_rows.map), prefetch_tma_descriptor(p.v_mem_rows.map);
    }
    if (thread() == 0) {
      // plant: empty-arrivals
      k.init(S::GROUPS * WARPGROUP_WARPS), v.init(S::GROUPS * WARPGROUP_WARPS), r.init(S::GROUPS * WARPGROUP_WARPS);
      fence_barrier_init();
    }
    find_seen<S::QUERIES>(p, keys, b, first, seen);
    barrier();
    const Tiles all = tiles_of<S::QUERIES, S::QUERIES>(seen, 0);
    const int count = all.to > all.from ? all.to - all.from : 0, each = (count + parts - 1) / parts;
    tile = all.from + part * each;
    tiles = part * each >= count ? 0 : count - part * each < each ? count - part * each : each;
  }

  // The tiles of the part that some of a warpgroup's queries see; none: both are `tiles`.
  TXL_DEVICE Tiles tiles_of_group(int group) const {
    Tiles own = tiles_of<S::QUERIES, SIDE>(seen, group * SIDE);
    own.from = own.from > tile ? own.from - tile : 0;
    own.to = own.to < tile + tiles ? own.to - tile : tiles;
    return own.from < own.to ? own : Tiles{tiles, tiles};
  }

  TXL_DEVICE int64_t bh() const { return b * p.H + h; }
  // Number of the first key of the part's tile t.
  TXL_DEVICE int first_key(int t) const { return (tile + t) * SIDE - keys.before; }
  // Keys of the part's tile t that some query sees.
  TXL_DEVICE uint64_t seen_keys(int t) const {
    return seen_rows<S::QUERIES>([&](int x, int& low, int& high) {
      low = seen[x] - (tile + t) * SIDE, high = seen[S::QUERIES + x] - (tile + t) * SIDE;
    });
  }
  // The same of rows of r's tile j: its row c is the distance of query x to key x + 64 - c of tile j.
  TXL_DEVICE uint64_t seen_distances(int j) const {
    return seen_rows<S::QUERIES>([&](int x, int& low, int& high) {
      const int last = x + 1 + SIDE + (tile + j) * SIDE;
      low = last - seen[S::QUERIES + x], high = last - seen[x];
    });
  }
  // The distance of row 0 of tile j.
  TXL_DEVICE int distance(int j) const { return static_cast<int>(p.M) + first - first_key(j) - SIDE; }
  TXL_DEVICE uint32_t address(int at) const { return shared_address(shared) + static_cast<uint32_t>(at); }
};

// All tiles, in the order in which they are used; by one thread. r's begin GROUPS before the first of k.
template <class S>
TXL_DEVICE void load_tiles(const QueryBlock<S>& block) {
  const PrefillProblem& p = block.p;
  Producer<S::STAGES> k(block.k.empty());
  Producer<S::V_STAGES> v(block.v.empty());
  Producer<S::R_STAGES> r(block.r.empty());
  const auto load_r = [&](int j) {
    const int n = r.producer_acquire(), row = static_cast<int>(p.zero_row) + block.distance(j);
    load_tile<S>(block.shared, S::r + n * S::TILE_BYTES, block.r.full(n), p.r_rows, row, block.h, 0);
  };
  const auto load = [&](auto& to, int at, const auto& stages, const RowsMap& memory, const RowsMap& segment, int t) {
    const int n = to.producer_acquire(), row = block.first_key(t);
    const bool is_memory = block.tile + t < block.keys.memory_tiles;
    load_tile<S>(block.shared, at + n * S::TILE_BYTES, stages.full(n), is_memory ? memory : segment,
                 is_memory ? row : row - static_cast<int>(p.M), block.h, block.b);
  };
  TXL_ROLLED
  for (int j = -S::GROUPS; j <= 0; ++j) load_r(j);  // plant: first-tiles-of-r
  TXL_ROLLED
  for (int t = 0; t < block.tiles; ++t) {
    load(k, S::k, block.k, p.k_mem_rows, p.k_rows, t);
    load_r(t + 1);
    load(v, S::v, block.v, p.v_mem_rows, p.v_rows, t);
  }
}

}  // namespace txl_cuda
