// A warpgroup's queries, and the keys that they see.
#pragma once
#include "../visible.cuh"
#include "prefill_problem.h"
#include "tile.cuh"

namespace txl_cuda {

// Tiles of 64 keys: the memory's last ends where the segment's first begins. Keys are counted from the
// first tile's first row on, which may lie before the memory.
struct Keys {
  int memory_tiles, before;  // before: rows of the first tile that do not exist
  TXL_DEVICE explicit Keys(const Problem& p)
      : memory_tiles(static_cast<int>((p.M + SIDE - 1) / SIDE)), before(memory_tiles * SIDE - static_cast<int>(p.M)) {}
};

// Keys [low, high) of the query of each of the block's first QUERIES threads, to shared memory; empty:
// low > high.
template <int QUERIES>
TXL_DEVICE void find_seen(const Problem& p, const Keys& keys, int64_t b, int first, int* seen) {
  const int x = thread();
  if (x >= QUERIES) return;
  const bool is_one = first + x < p.L;
  const Seen own = is_one ? visible(p, b, first + x) : Seen{0, 0, false};
  const bool any = own.low < own.high;
  seen[x] = any ? static_cast<int>(own.low) + keys.before : 1 << 30;
  seen[QUERIES + x] = any ? static_cast<int>(own.high) + keys.before : 0;
}

// Tiles that some of queries [first, first + COUNT) of the block see; none: from > to.
struct Tiles {
  int from, to;
};
template <int QUERIES, int COUNT>
TXL_DEVICE Tiles tiles_of(const int* seen, int first) {
  int low = 1 << 30, high = 0;
  TXL_UNROLL
  for (int n = 0; n < COUNT; n += WARP) {
    const int x = first + n + thread() % WARP, to = seen[QUERIES + x], from = seen[x];
    low = from < low ? from : low, high = to > high ? to : high;
  }
  low = min_of_warp(low), high = max_of_warp(high);
  return {low / SIDE, (high + SIDE - 1) / SIDE};
}

TXL_DEVICE uint64_t or_of_warp(uint64_t bits) {
  return uint64_t{or_of_warp(static_cast<uint32_t>(bits >> 32))} << 32 | or_of_warp(static_cast<uint32_t>(bits));
}

// Bits of 64 rows that some of QUERIES queries see: interval(x, low, high) gives query x's. By a warp.
template <int QUERIES, class Interval>
TXL_DEVICE uint64_t seen_rows(const Interval& interval) {
  uint64_t bits = 0;
  TXL_UNROLL
  for (int n = 0; n < QUERIES; n += WARP) {
    int low, high;
    interval(n + thread() % WARP, low, high);
    const uint64_t from = low <= 0 ? ~uint64_t{0} : low >= SIDE ? 0 : ~uint64_t{0} << low;
    const uint64_t to = high >= SIDE ? ~uint64_t{0} : high <= 0 ? 0 : ~(~uint64_t{0} << high);
    bits |= from & to;
  }
  return or_of_warp(bits);
}

// Two elements of a register.
template <class T>
TXL_DEVICE void unpack(T, uint32_t x, float (&to)[2]) {
  to[0] = to_float(T{static_cast<uint16_t>(x)}), to[1] = to_float(T{static_cast<uint16_t>(x >> 16)});
}
TXL_DEVICE uint32_t pack(Bf16, float low, float high) { return pack_bf16(low, high); }
TXL_DEVICE uint32_t pack(F16, float low, float high) { return pack_f16(low, high); }

// Scores count in base 2; their scale goes into the queries before they are rounded.
TXL_DEVICE float scale_of(const Problem& p) { return p.scale * 1.4426950408889634f; }

// Row and column of this thread's n-th word of a left factor in registers.
TXL_DEVICE int operand_row(int n) { return accumulator_row(thread() % WARPGROUP / WARP) + 8 * (n % 2); }
TXL_DEVICE int operand_column(int n) { return n / 4 * 16 + n / 2 % 2 * 8 + accumulator_column(); }

// This thread's places of rows `first` .. + 63 of `count` as a left factor in registers; 0 beyond, and
// beyond D. All loads are issued before any is used.
template <class T, int WIDTH>
TXL_DEVICE void load_rows(const Problem& p, const View& rows, int64_t b, int64_t h, int first, int64_t count,
                          uint32_t (&a)[WIDTH / 4]) {
  TXL_UNROLL
  for (int lower = 0; lower < 2; ++lower) {
    const int i = first + operand_row(lower);
    const bool is_row = i >= 0 && i < count;
    const T* const row = row_of<T>(rows, b, h, is_row ? i : 0);
    TXL_UNROLL
    for (int n = lower; n < WIDTH / 4; n += 2)
      // plant: rows-beyond-queries
      a[n] = load_word(row + operand_column(n), is_row && operand_column(n) < static_cast<int>(p.D));
  }
}
// A bias [H, D]: the words that meet words 2 n and 2 n + 1 of a row's.
template <class T, int WIDTH>
TXL_DEVICE void load_bias(const Problem& p, const View& bias, int64_t h, uint32_t (&a)[WIDTH / 8]) {
  const T* const row = static_cast<const T*>(bias.data) + h * bias.s0;
  TXL_UNROLL
  for (int n = 0; n < WIDTH / 8; ++n)
    a[n] = load_word(row + operand_column(2 * n), operand_column(2 * n) < static_cast<int>(p.D));
}
// Queries plus a bias, scaled.
template <class T, int WIDTH>
TXL_DEVICE void add_bias(const Problem& p, const uint32_t (&queries)[WIDTH / 4], const uint32_t (&bias)[WIDTH / 8],
                         uint32_t (&a)[WIDTH / 4]) {
  TXL_UNROLL
  for (int n = 0; n < WIDTH / 4; ++n) {
    float q[2], u[2];
    unpack(T(), queries[n], q), unpack(T(), bias[n / 2], u);
    a[n] = pack(T(), scale_of(p) * (q[0] + u[0]), scale_of(p) * (q[1] + u[1]));
  }
}
// Queries `first` .. + 63 plus w for positions, plus u for content.
template <class T, int WIDTH>
TXL_DEVICE void load_queries(const Problem& p, int64_t b, int64_t h, int first, uint32_t (&position)[WIDTH / 4],
                             uint32_t (&content)[WIDTH / 4]) {
  uint32_t u[WIDTH / 8], w[WIDTH / 8];
  load_rows<T, WIDTH>(p, p.q, b, h, first, p.L, content);
  load_bias<T, WIDTH>(p, p.u, h, u), load_bias<T, WIDTH>(p, p.w, h, w);
  add_bias<T, WIDTH>(p, content, w, position), add_bias<T, WIDTH>(p, content, u, content);
}

// A left factor from registers to its tile in shared memory.
template <int WIDTH>
TXL_DEVICE void store_operand(const uint32_t (&a)[WIDTH / 4], uint32_t tile) {
  TXL_UNROLL
  for (int n = 0; n < WIDTH / 4; ++n) store_shared(tile + swizzled_offset(operand_row(n), operand_column(n)), a[n]);
}
// A tile of 64 x 64 transposed, as a left factor in registers: row d has column d of the tile.
TXL_DEVICE void load_operand_transposed(uint32_t tile, uint32_t (&a)[16]) {
  TXL_UNROLL
  for (int n = 0; n < 16; ++n) {
    const int d = operand_row(n), pair = d / 2 * 2, shift = d % 2 * 16;  // plant: transposed-column
    const uint32_t low = float_to_bits(load_shared(tile + swizzled_offset(operand_column(n), pair))) >> shift;
    const uint32_t high = float_to_bits(load_shared(tile + swizzled_offset(operand_column(n) + 1, pair))) >> shift;
    a[n] = (low & 0xFFFF) | high << 16;
  }
}

}  // namespace txl_cuda
