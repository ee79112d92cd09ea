// The scores of a block of queries against a tile of keys: the tables r and r_bias, both products, the cap, dropout.
#pragma once
#include "rows.h"

namespace txl::TXL_ISA {
namespace {

// The tables r and r_bias, in reverse. A key and a query meet at the coordinate
// rho = L - 1 - i + j + const, and both are packed by rho: for one query consecutive keys are
// consecutive rho, so the relative shift is an offset.

// L - 1 + const: a multiple of NR, less 1, so that blocks start at multiples of NR; and large enough
// for the rows that pad the last block of queries to have rho >= 0.
TXL_INLINE int64_t rho_origin(const Problem& p) { return round_up(p.L, NR) + BLOCK_L - 1; }
TXL_INLINE int64_t rho_of(const Problem& p, int64_t i, int64_t j) { return rho_origin(p) - i + j; }
TXL_INLINE int64_t distance_of(const Problem& p, int64_t rho) { return p.M + rho_origin(p) - rho; }

// From the first rho of the tables at which some query meets a key to past the last; {0, 0} if there is none.
TXL_INLINE Range rhos_met(const Problem& p, const InUse& in_use) {
  const int64_t zero = p.M + rho_origin(p);
  const Range met = {max_of(in_use.met.low, -p.zero_row), min_of(in_use.met.high, p.T - p.zero_row)};
  return met.any() ? Range{zero - met.high + 1, zero - met.low + 1} : Range{0, 0};
}

// The row of the tables for rho; -1 where they have none, or no query meets it.
TXL_INLINE int64_t rho_row(const Problem& p, const InUse& in_use, int64_t rho) {
  const int64_t distance = distance_of(p, rho), row = p.zero_row + distance;
  return row >= 0 && row < p.T && in_use.distance(distance) ? row : -1;
}

// position_scale * r_bias[row] of a head.
template <class T>
TXL_INLINE float bias_of(const Problem& p, int64_t h, int64_t row) {
  return to_float(*row_of<T>(p.r_bias, h, row, 0)) * p.position_scale;
}

// The part [first, end) of the reversed tables that is at hand, multiples of NR; r in both layouts, or
// panels alone; r_bias times its factor. Upwards it grows: rows that are needed are packed, rows behind are
// dropped when the room runs out. Downwards it starts anew.
struct Table {
  int64_t capacity;
  Packed *panels, *rows;  // null without r
  float* bias;            // null without r_bias
  int64_t first = 0, end = 0;
  Range met{0, 0};  // rhos at which some query meets a key

  // row_elements: 0 for panels alone.
  Table(Arena& a, int64_t room, const Problem& p, int64_t row_elements)
      : capacity(room),
        panels(p.r.data ? a.take<Packed>(room * deep(p.Dr)) : nullptr),
        rows(p.r.data && row_elements ? a.take<Packed>(room * row_elements) : nullptr),
        bias(p.r_bias.data ? a.take(room) : nullptr) {}

  void forget() { first = end = 0; }

  // Rows of room for windows of `count` rows: twice that, so that moving the window to the front is
  // rare.
  static int64_t room(int64_t count) { return 2 * round_up(count + 2 * NR, NR); }

  // Has rows [from, to) at hand, but for those further from what is met than a strip reads.
  template <class T>
  void cover(const Problem& p, const InUse& in_use, int64_t h, int64_t from, int64_t to, int64_t Drp) {
    met = rhos_met(p, in_use);
    from = max_of(from, max_of(met.low - MR - NR - DEPTH, 0)) / NR * NR;
    to = min_of(round_up(to, NR), round_up(met.high + MR + STEP + DEPTH, NR) + NR);
    if (from >= to) return;
    if (from >= end || from < first) first = end = from;
    if (to - first > capacity) {
      if (panels) memmove(panels, panels + (from - first) * deep(p.Dr), sizeof(Packed) * (end - from) * deep(p.Dr));
      if (bias) memmove(bias, bias + (from - first), sizeof(float) * (end - from));
      if (rows) memmove(rows, rows + (from - first) * Drp, sizeof(Packed) * (end - from) * Drp);
      first = from;
    }
    if (to <= end) return;
    auto row = [&](int64_t rho) {
      const int64_t at = rho_row(p, in_use, rho);
      return at < 0 ? nullptr : row_of<T>(p.r, h, at, 0);
    };
    if (panels)
      pack<T>(row, end, to - end, p.Dr, Drp, panels + (end - first) * deep(p.Dr),
              rows ? rows + (end - first) * Drp : nullptr);
    for (int64_t rho = end; bias && rho < to; ++rho) {
      const int64_t at = rho_row(p, in_use, rho);
      bias[rho - first] = at < 0 ? 0.f : bias_of<T>(p, h, at);
    }
    end = to;
  }
};

// The scores of a strip of MR queries against a tile of keys.

// The ranges of N queries from i0 on, cut to the keys of `part`; the union of each strip's and of
// all.
template <int64_t N>
struct BlockRanges {
  Range row[N], strip[N / MR], all{INT64_MAX, 0};

  BlockRanges(const Problem& p, int64_t b, int64_t i0, int64_t count, Range part) {
    for (int64_t i = 0; i < round_up(count, MR); ++i) {
      row[i] = i < count ? visible(p, b, i0 + i) : Range{0, 0};
      row[i] = {max_of(row[i].low, part.low), min_of(row[i].high, part.high)};
      Range& s = strip[i / MR];
      if (i % MR == 0) s = {INT64_MAX, 0};
      if (row[i].any()) s = {min_of(s.low, row[i].low), max_of(s.high, row[i].high)};
    }
    for (int64_t x = 0; x < div_up(count, MR); ++x)
      all = {min_of(all.low, strip[x].low), max_of(all.high, strip[x].high)};
  }
};

// Batch rows that share an item, which is of a group of heads: those of small calls, as many as leave so many items.
// Large ones have items of their own, for machines of many cores.
constexpr int64_t SMALL_ITEM = 1 << 22;  // multiplications, 8 a pair

TXL_INLINE int64_t batch_rows_of_item(const Problem& p, int64_t items) {
  const int64_t each = 8 * group_of(p) * max_of(p.L, 1) * max_of(p.M + p.L, 1) * max_of(p.D, p.Dv);
  return clamp(min_of(p.B * p.Hkv / items, SMALL_ITEM / each), 1, max_of(p.B, 1));
}

// The part of a range inside the tile that starts at key j0, relative to j0; low >= high if none.
TXL_INLINE Range within(const Range& r, int64_t j0) {
  return {clamp(r.low - j0, 0, BLOCK_S), clamp(r.high - j0, 0, BLOCK_S)};
}

// Columns of a strip's positional products: a tile, MR - 1 more, and what alignment to panels adds
// at both ends.
constexpr int64_t POSITION_LD = BLOCK_S + 2 * NR;

// The positional part of a strip's scores: row(x)[n] for row x and key n of the tile.
struct Positions {
  const float* first;
  int64_t step;
  const float* row(int64_t x) const { return first + x * step; }
};

alignas(64) constexpr float NO_POSITIONS[BLOCK_S] = {};

// content[MR][BLOCK_S] and, as position[MR][POSITION_LD] skewed by one a row, what positions add to it, of the strip
// whose first query is i, for the keys j0 + n with from <= n < to, from a multiple of NR. Without r one row of biases
// serves all. Where all pairs are outside the tables there are no positions. k_panels: of the tile; Dp, Drp: the
// strides of qu and qw.
static Positions strip_scores(const Problem& p, int64_t Dp, int64_t Drp, const Packed* qu, const Packed* qw, int64_t i,
                              int64_t j0, int64_t from, int64_t to, const Packed* k_panels, const Table& table,
                              float* content, float* position) {
  const int64_t D = deep(p.D), Dr = deep(p.Dr);
  const int64_t rho = rho_of(p, i + MR - 1, j0 + from), shift = rho % NR,
                first = rho - shift;  // of the last row, first key
  times_panels(qu, Dp, k_panels + from * D, D, div_up(to - from, NR), content + from, BLOCK_S);
  const int64_t columns = shift + MR - 1 + to - from;
  const int64_t low = max_of(table.met.low - first, 0) / NR * NR;  // columns that no query meets are left out
  const int64_t high = min_of(columns, table.met.high - first);
  if (p.zero_outside && low >= high) return {NO_POSITIONS, 0};
  const float* const bias = table.bias ? table.bias + (first - table.first) : nullptr;
  const int64_t left = shift + MR - 1 - from;
  if (!table.panels) {
    if (!p.zero_outside || (low == 0 && high == columns)) return {bias + left, -1};
    for (int64_t c = 0; c < columns; ++c) position[c] = c >= low && c < high ? bias[c] : 0.f;
    return {position + left, -1};
  }
  const int64_t past = low + round_up(high - low, NR);
  times_panels(qw, Drp, table.panels + (first + low - table.first) * Dr, Dr, (past - low) / NR, position + low,
               POSITION_LD);
  if (bias)
    for (int64_t x = 0; x < MR; ++x)
      for (int64_t c = low; c < high; c += LANES)
        store(position + x * POSITION_LD + c, load(position + x * POSITION_LD + c) + load(bias + c));
  for (int64_t x = 0; p.zero_outside && x < MR; ++x) {
    memset(position + x * POSITION_LD, 0, sizeof(float) * low);
    if (past < columns) memset(position + x * POSITION_LD + past, 0, sizeof(float) * (columns - past));
  }
  return {position + left, POSITION_LD - 1};
}

// The cap on scores: x -> cap * tanh(x / cap); slope: what a gradient is multiplied by on its way back.
struct Cap {
  float cap, inverse;
  explicit Cap(const Problem& p) : cap(p.softcap), inverse(p.softcap ? 1 / p.softcap : 0.f) {}
  vf operator()(vf x) const { return tanh_of(x * inverse) * cap; }
  vf operator()(vf x, vf& slope) const {
    const vf tanh = tanh_of(x * inverse);
    slope = 1.f - tanh * tanh;
    return tanh * cap;
  }
};

// Philox-4x32-7 (Salmon et al. 2011): entry (b, h, i, j) is the i % 8-th 16 bits, lowest first, of the
// block with counter (j, i / 8, b * H + h, 0) under the key seed. The mask is a function of these alone.

constexpr int PHILOX_ROUNDS = 7;
constexpr int64_t DROPOUT_ROWS = 8;  // queries that share a block

typedef uint64_t vw __attribute__((vector_size(4 * TXL_LANES)));

// Products of the even lanes of x, read as 64-bit lanes, with a 32-bit number.
TXL_INLINE vw times_even(vw x, uint32_t by) {
#if defined(__x86_64__) && TXL_LANES == 8 && !defined(__clang__)
  // GCC forms a full 64-bit product otherwise.
  typedef int v8si __attribute__((vector_size(32)));
  return (vw)__builtin_ia32_pmuludq256((v8si)x, (v8si)(vu{} + by));
#else
  return (x & 0xFFFFFFFFull) * static_cast<uint64_t>(by);
#endif
}

// x * by, the low and the high halves.
TXL_INLINE void times_wide(vu x, uint32_t by, vu& low, vu& high) {
  const vw even = times_even((vw)x, by), odd = times_even((vw)x >> 32, by);
  low = (vu)((even & 0xFFFFFFFFull) | (odd << 32));
  high = (vu)((even >> 32) | (odd & ~0xFFFFFFFFull));
}

// The blocks of keys j .. j + LANES - 1.
TXL_INLINE void philox_blocks(uint32_t j, uint32_t group, uint32_t bh, uint64_t seed, vu out[4]) {
  vu c0, c1 = vu{} + group, c2 = vu{} + bh, c3 = {};
  for (int z = 0; z < LANES; ++z) c0[z] = j + static_cast<uint32_t>(z);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    vu low0, high0, low2, high2;
    times_wide(c0, 0xD2511F53u, low0, high0);
    times_wide(c2, 0xCD9E8D57u, low2, high2);
    c0 = high2 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low2;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// factor[row * BLOCK_S + n] = 0 if entry (bh, i0 + row, j0 + n) is dropped, else 1 / (1 - p), for
// the keys that some query of the row's group sees; i0 is a multiple of DROPOUT_ROWS. `ranges`: of
// the `count` rows.
static void dropout_factors(const Problem& p, const Range* ranges, int64_t count, int64_t bh, int64_t i0, int64_t j0,
                            float* factor) {
  for (int64_t group = 0; group < count; group += DROPOUT_ROWS) {
    const int64_t rows = min_of(DROPOUT_ROWS, count - group);
    int64_t from = BLOCK_S, to = 0;
    for (int64_t i = group; i < group + rows; ++i) {
      const Range seen = within(ranges[i], j0);
      if (seen.any()) from = min_of(from, seen.low), to = max_of(to, seen.high);
    }
    for (int64_t n = from / LANES * LANES; n < to; n += LANES) {
      vu word[4];
      philox_blocks(static_cast<uint32_t>(j0 + n), static_cast<uint32_t>((i0 + group) / DROPOUT_ROWS),
                    static_cast<uint32_t>(bh), p.seed, word);
      for (int64_t z = 0; z < rows; ++z) {
        const vu bits = z % 2 ? word[z / 2] >> 16 : word[z / 2] & 0xFFFF;
        store(factor + (group + z) * BLOCK_S + n, bits < p.drop_below ? vf{} : splat(p.keep_scale));
      }
    }
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
