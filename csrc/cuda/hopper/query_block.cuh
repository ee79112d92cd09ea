// A block of queries, in forward and in the gradients of queries: warpgroup w has queries 64 w .. + 63, and all
// warpgroups go through the same tiles of keys.
//
// The scores of tile t need two tiles of 64 distances, one of which came with tile t - 1 (skew.cuh). The one that is
// new for warpgroup w at tile t is tile t - w of r: tile j of r serves warpgroup w at tile j + w of the keys, and is
// loaded once.
#pragma once
#include "config.cuh"
#include "key_bounds.cuh"

namespace txl_cuda {

// A block of queries and its part of the keys.
template <class S>
struct QueryBlock {
  const PrefillProblem& p;
  char* shared;
  KeyTiles key_tiles;
  int b, h, part, first_query;
  int first_tile, tiles;  // of the part: its first tile, and their number
  StageBarriers<S::STAGES> k;
  StageBarriers<S::V_STAGES> v;
  StageBarriers<S::R_STAGES> r;
  int* key_bounds;  // [2][QUERIES], see find_key_bounds

  // number: of the block of queries and of its part of the keys. Where attention is causal, the
  // last queries see the largest number of keys: they begin first. By all threads.
  TXL_DEVICE QueryBlock(const PrefillProblem& problem, char* memory, int batch_row, uint32_t number)
      : p(problem),
        shared(memory),
        key_tiles(problem),
        b(batch_row),
        h(block_y()),
        part(static_cast<int>(number % static_cast<uint32_t>(p.parts))) {
    const int blocks = (static_cast<int>(p.L) + S::QUERIES - 1) / S::QUERIES;
    first_query = (blocks - 1 - static_cast<int>(number / static_cast<uint32_t>(p.parts))) * S::QUERIES;
    k.barriers = reinterpret_cast<Barrier*>(shared + S::barriers);
    v.barriers = k.barriers + k.BARRIERS, r.barriers = v.barriers + v.BARRIERS;
    key_bounds = reinterpret_cast<int*>(shared + S::key_bounds);
    prefetch_descriptors();
    if (thread() == 0) init_barriers();
    find_key_bounds<S::QUERIES>(p, key_tiles, b, first_query, key_bounds);
    barrier();
    find_tiles();
  }

  // Finds the part's tiles from key_bounds. By a warp.
  TXL_DEVICE void find_tiles() {
    const auto parts = static_cast<uint32_t>(p.parts);
    const TileRange range = tiles_of<S::QUERIES, S::QUERIES>(key_bounds, 0);
    const int count = range.end > range.begin ? range.end - range.begin : 0;
    const int part_tiles = static_cast<int>((static_cast<uint32_t>(count) + parts - 1) / parts);
    first_tile = range.begin + part * part_tiles;
    tiles = part * part_tiles >= count               ? 0
            : count - part * part_tiles < part_tiles ? count - part * part_tiles
                                                     : part_tiles;
  }
  TXL_DEVICE void prefetch_descriptors() const {
    if (thread() != S::GROUPS * WARPGROUP) return;
    for (const RowsMap* rows : {&p.k_rows, &p.v_rows}) prefetch_tma_descriptor(rows->map);
    if (p.T) prefetch_tma_descriptor(p.r_rows.map);
    if (p.M) prefetch_tma_descriptor(p.k_mem_rows.map), prefetch_tma_descriptor(p.v_mem_rows.map);
  }
  TXL_DEVICE void init_barriers() const {
    constexpr int CONSUMERS = S::GROUPS * WARPGROUP_WARPS;
    k.init(CONSUMERS), v.init(CONSUMERS), r.init(CONSUMERS);  // plant: empty-arrivals
    fence_barrier_init();
  }

  // The tiles of the part that some query of a warpgroup sees; none: begin and end are `tiles`.
  TXL_DEVICE TileRange tiles_of_warpgroup(int warpgroup) const {
    TileRange range = tiles_of<S::QUERIES, SIDE>(key_bounds, warpgroup * SIDE);
    range.begin = range.begin > first_tile ? range.begin - first_tile : 0;
    range.end = range.end < first_tile + tiles ? range.end - first_tile : tiles;
    return range.begin < range.end ? range : TileRange{tiles, tiles};
  }

  // The tiles of r that the block loads. With position queries those of distances within the table, one before and two
  // after.
  TXL_DEVICE TileRange tiles_of_r() const {
    if constexpr (!S::HAS_Q_POS) return {-S::QUERY_GROUPS, tiles + 1};
    const int row = static_cast<int>(p.zero_row) + distance(0);  // of tile 0; tile j begins 64 j rows before
    const int begin = floor_tiles(row - static_cast<int>(p.T));
    const int end = floor_tiles(row + SIDE - 1) + 3;  // plant: tiles-of-the-table
    const TileRange range = {begin > -S::QUERY_GROUPS ? begin : -S::QUERY_GROUPS, end <= tiles ? end : tiles + 1};
    return range.begin < range.end && p.T ? range : TileRange{tiles, tiles};
  }
  // The tiles of keys of `range` that have position scores for a warpgroup, for which it uses tiles of r from
  // number begin - 1 - warpgroup on; none: begin and end are range.end.
  TXL_DEVICE TileRange position_tiles(const TileRange& range, const TileRange& r_tiles, int warpgroup) const {
    const int begin = r_tiles.begin + 1 + warpgroup, end = r_tiles.end - 1 + warpgroup;
    const TileRange tiles_in_both = {begin > range.begin ? begin : range.begin, end < range.end ? end : range.end};
    return tiles_in_both.begin < tiles_in_both.end ? tiles_in_both : TileRange{range.end, range.end};
  }

  TXL_DEVICE int64_t bh() const { return b * p.H + h; }
  // The head of keys and values.
  TXL_DEVICE int kv_head() const {
    if constexpr (!S::HAS_Q_POS) return h;
    return h / (static_cast<int>(p.H) / static_cast<int>(p.Hkv));  // plant: head-of-keys
  }
  // The index of the first key of the part's tile t.
  TXL_DEVICE int first_key(int t) const { return (first_tile + t) * SIDE - key_tiles.padding; }
  // The keys of the part's tile t that query x of the block sees: [low, high), counted from the tile's first.
  TXL_DEVICE int key_low(int x, int t) const { return key_bounds[x] - (first_tile + t) * SIDE; }
  TXL_DEVICE int key_high(int x, int t) const { return key_bounds[S::QUERIES + x] - (first_tile + t) * SIDE; }
  // The rows of the part's tile t of keys that some query sees, one bit a row.
  TXL_DEVICE uint64_t visible_keys(int t) const {
    return visible_rows<S::QUERIES>([&](int x, int& low, int& high) { low = key_low(x, t), high = key_high(x, t); });
  }
  // The same for r's tile j, whose row c is the distance of query x to key x + 64 - c of tile j.
  TXL_DEVICE uint64_t visible_distances(int j) const {
    return visible_rows<S::QUERIES>([&](int x, int& low, int& high) {
      const int last = x + 1 + SIDE + (first_tile + j) * SIDE;
      low = last - key_bounds[S::QUERIES + x], high = last - key_bounds[x];
    });
  }
  // The distance of row 0 of r's tile j.
  TXL_DEVICE int distance(int j) const { return static_cast<int>(p.M) + first_query - first_key(j) - SIDE; }
  // The address of a byte of shared memory.
  TXL_DEVICE uint32_t address(int at) const { return shared_address(shared) + static_cast<uint32_t>(at); }
};

// A warpgroup's place among the block's tiles of r, where it uses some of them. next: the tile of keys with which the
// next of them comes.
struct RTileCursor {
  TileRange r_tiles;
  int warpgroup, next;

  // Releases unused, by skip_r(), the tiles of r that come before tile `end` of the keys.
  template <class SkipR>
  TXL_DEVICE void skip(int end, const SkipR& skip_r) {
    TXL_ROLLED
    for (; next < end; ++next)  // plant: skipped-tiles-of-r
      if (next - warpgroup >= r_tiles.begin && next - warpgroup < r_tiles.end) skip_r();
  }
};

// The producer: loads all tiles in the order in which they are used. Those of r begin QUERY_GROUPS before the first of
// k. By one thread.
template <class S>
TXL_DEVICE void load_tiles(const QueryBlock<S>& block) {
  const PrefillProblem& p = block.p;
  Producer<S::STAGES> k(block.k.empty());
  Producer<S::V_STAGES> v(block.v.empty());
  Producer<S::R_STAGES> r(block.r.empty());
  const int head = block.kv_head();
  const auto load_r = [&](int j) {
    const int stage = r.producer_acquire(), row = static_cast<int>(p.zero_row) + block.distance(j);
    load_tile_of_r<S>(block.shared, S::r + stage * S::R_TILE_BYTES, block.r.full(stage), p.r_rows, row, block.h);
  };
  const auto load_keys = [&](auto& producer, int to, const auto& barriers, const RowsMap& memory,
                             const RowsMap& segment, int t) {
    const int stage = producer.producer_acquire(), row = block.first_key(t);
    const bool is_memory = block.first_tile + t < block.key_tiles.memory_tiles;
    load_tile<S>(block.shared, to + stage * S::TILE_BYTES, barriers.full(stage), is_memory ? memory : segment,
                 is_memory ? row : row - static_cast<int>(p.M), head, block.b);
  };
  const TileRange r_tiles = block.tiles_of_r();
  const auto is_loaded = [&](int j) { return !S::HAS_Q_POS || (j >= r_tiles.begin && j < r_tiles.end); };
  TXL_ROLLED
  for (int j = -S::QUERY_GROUPS; j <= 0; ++j)  // plant: first-tiles-of-r
    if (is_loaded(j)) load_r(j);
  TXL_ROLLED
  for (int t = 0; t < block.tiles; ++t) {
    load_keys(k, S::k, block.k, p.k_mem_rows, p.k_rows, t);
    if (is_loaded(t + 1)) load_r(t + 1);
    load_keys(v, S::v, block.v, p.v_mem_rows, p.v_rows, t);
  }
}

}  // namespace txl_cuda
