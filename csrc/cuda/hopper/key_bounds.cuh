// Which keys the queries of a block see: bounds of each query, tiles of a warpgroup, rows of a tile.
#pragma once
#include "../visible.cuh"
#include "tile.cuh"

namespace txl_cuda {

// Tiles of 64 keys. The memory's last tile ends where the segment's first begins, so the first tile may begin before
// the memory: its first `padding` rows do not exist. Positions of keys in tiles are counted from its first row.
struct KeyTiles {
  int memory_tiles, padding;
  TXL_DEVICE explicit KeyTiles(const Problem& p)
      : memory_tiles(static_cast<int>((p.M + SIDE - 1) / SIDE)), padding(memory_tiles * SIDE - static_cast<int>(p.M)) {}
};

constexpr int INVALID_BOUNDS = -1;

// Writes bounds [2][QUERIES] to shared memory: query x of the block sees the keys [bounds[x], bounds[QUERIES + x]);
// low > high: none, with a high of INVALID_BOUNDS where those given are out of range. By the block's first QUERIES
// threads.
template <int QUERIES>
TXL_DEVICE void find_key_bounds(const Problem& p, const KeyTiles& tiles, int64_t b, int first_query, int* bounds) {
  const int x = thread();
  if (x >= QUERIES) return;
  const bool exists = first_query + x < p.L;
  const Seen seen = exists ? visible(p, b, first_query + x) : Seen{0, 0, false};
  const bool any = seen.low < seen.high;
  bounds[x] = any ? static_cast<int>(seen.low) + tiles.padding : 1 << 30;
  bounds[QUERIES + x] = any ? static_cast<int>(seen.high) + tiles.padding : seen.invalid ? INVALID_BOUNDS : 0;
}

// x / 64, rounded down.
TXL_DEVICE int floor_tiles(int x) { return x >> 6; }

// Tiles [begin, end).
struct TileRange {
  int begin, end;
};
// The tiles that some of queries [first, first + COUNT) of the block see; none: begin > end. By a warp.
template <int QUERIES, int COUNT>
TXL_DEVICE TileRange tiles_of(const int* bounds, int first) {
  int low = 1 << 30, high = 0;
  TXL_UNROLL
  for (int n = 0; n < COUNT; n += WARP) {
    const int x = first + n + thread() % WARP, query_high = bounds[QUERIES + x], query_low = bounds[x];
    low = query_low < low ? query_low : low, high = query_high > high ? query_high : high;
  }
  low = min_of_warp(low), high = max_of_warp(high);
  return {low / SIDE, (high + SIDE - 1) / SIDE};
}

TXL_DEVICE uint64_t or_of_warp(uint64_t bits) {
  return uint64_t{or_of_warp(static_cast<uint32_t>(bits >> 32))} << 32 | or_of_warp(static_cast<uint32_t>(bits));
}

// The rows of a tile of 64 that some of QUERIES queries see, one bit a row. interval(x, low, high) sets the rows
// [low, high) of query x, which may lie outside of the tile. By a warp.
template <int QUERIES, class Interval>
TXL_DEVICE uint64_t visible_rows(const Interval& interval) {
  uint64_t bits = 0;
  TXL_UNROLL
  for (int n = 0; n < QUERIES; n += WARP) {
    int low, high;
    interval(n + thread() % WARP, low, high);
    const uint64_t from_low = low <= 0 ? ~uint64_t{0} : low >= SIDE ? 0 : ~uint64_t{0} << low;
    const uint64_t below_high = high >= SIDE ? ~uint64_t{0} : high <= 0 ? 0 : ~(~uint64_t{0} << high);
    bits |= from_low & below_high;
  }
  return or_of_warp(bits);
}

}  // namespace txl_cuda
