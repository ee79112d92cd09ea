// The scores of a block of queries against a tile of keys: the tables r and r_bias, both products, softcap, dropout.
#pragma once
#include "rows.h"

namespace txl::TXL_ISA {
namespace {

// The tables r and r_bias are packed reversed, by the reverse distance rho = L - 1 - i + j + const of query i and key
// j. Consecutive keys of a query have consecutive rho, so the relative shift is an offset.

// L - 1 + const: one less than a multiple of NR, so that blocks start at multiples of NR; and large enough that the
// rows which pad the last block of queries have rho >= 0.
TXL_INLINE int64_t rho_origin(const Problem& p) { return round_up(p.L, NR) + BLOCK_L - 1; }
TXL_INLINE int64_t rho_of(const Problem& p, int64_t i, int64_t j) { return rho_origin(p) - i + j; }
TXL_INLINE int64_t distance_of(const Problem& p, int64_t rho) { return p.M + rho_origin(p) - rho; }

// The range of rho that have a row in the tables and at which some query sees a key; {0, 0} if there is none.
TXL_INLINE Range find_visible_rhos(const Problem& p, const VisibleRows& visible_rows) {
  const int64_t zero = p.M + rho_origin(p);  // rho of distance 0
  const Range distances = {max_of(visible_rows.distance_range.low, -p.zero_row),
                           min_of(visible_rows.distance_range.high, p.T - p.zero_row)};
  return distances.any() ? Range{zero - distances.high + 1, zero - distances.low + 1} : Range{0, 0};
}

// The row of the tables for rho; -1 if they have none, or no query sees a key at that distance.
TXL_INLINE int64_t rho_row(const Problem& p, const VisibleRows& visible_rows, int64_t rho) {
  const int64_t distance = distance_of(p, rho), row = p.zero_row + distance;
  return row >= 0 && row < p.T && visible_rows.has_distance(distance) ? row : -1;
}

// position_scale * r_bias[row] of a head.
template <class T>
TXL_INLINE float bias_of(const Problem& p, int64_t h, int64_t row) {
  return to_float(*row_of<T>(p.r_bias, h, row, 0)) * p.position_scale;
}

// A packed window [first, end) of the reversed tables, multiples of NR: r in both layouts, or as panels alone; r_bias
// times its factor. The window moves upwards: rows are packed at its end, and the first ones are dropped if it is full.
// Where earlier rows are needed, it starts anew.
struct TableWindow {
  int64_t capacity;
  Packed *panels, *rows;  // null without r
  float* bias;            // null without r_bias
  int64_t first = 0, end = 0;
  Range visible_rhos{0, 0};  // rhos at which some query sees a key

  // row_elements: 0 for panels alone.
  TableWindow(Arena& a, int64_t max_rows, const Problem& p, int64_t row_elements)
      : capacity(max_rows),
        panels(p.r.data ? a.allocate<Packed>(max_rows * padded_depth(p.Dr)) : nullptr),
        rows(p.r.data && row_elements ? a.allocate<Packed>(max_rows * row_elements) : nullptr),
        bias(p.r_bias.data ? a.allocate(max_rows) : nullptr) {}

  void reset() { first = end = 0; }

  // The capacity for windows of `count` rows: twice that, so that rows are rarely moved to the front.
  static int64_t capacity_for(int64_t count) { return 2 * round_up(count + 2 * NR, NR); }

  // Packs the rows of [from, to) that are not packed yet. Those further from the visible rhos than a strip reads are
  // left out.
  template <class T>
  void ensure_packed(const Problem& p, const VisibleRows& visible_rows, int64_t h, int64_t from, int64_t to,
                     int64_t Drp) {
    visible_rhos = find_visible_rhos(p, visible_rows);
    from = max_of(from, max_of(visible_rhos.low - MR - NR - DEPTH, 0)) / NR * NR;
    to = min_of(round_up(to, NR), round_up(visible_rhos.high + MR + KEY_STEP + DEPTH, NR) + NR);
    if (from >= to) return;
    if (from >= end || from < first) first = end = from;
    if (to - first > capacity) {
      if (panels)
        memmove(panels, panels + (from - first) * padded_depth(p.Dr),
                sizeof(Packed) * (end - from) * padded_depth(p.Dr));
      if (bias) memmove(bias, bias + (from - first), sizeof(float) * (end - from));
      if (rows) memmove(rows, rows + (from - first) * Drp, sizeof(Packed) * (end - from) * Drp);
      first = from;
    }
    if (to <= end) return;
    auto row = [&](int64_t rho) {
      const int64_t at = rho_row(p, visible_rows, rho);
      return at < 0 ? nullptr : row_of<T>(p.r, h, at, 0);
    };
    if (panels)
      pack<T>(row, end, to - end, p.Dr, Drp, panels + (end - first) * padded_depth(p.Dr),
              rows ? rows + (end - first) * Drp : nullptr);
    for (int64_t rho = end; bias && rho < to; ++rho) {
      const int64_t at = rho_row(p, visible_rows, rho);
      bias[rho - first] = at < 0 ? 0.f : bias_of<T>(p, h, at);
    }
    end = to;
  }
};

// The keys that each of up to N queries from i0 on sees among those of `part`; their hull for each strip (the MR
// queries of a microkernel call), and for all.
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

// The number of batch rows that share an item, which has one key-value head. Small batch rows share one while `items`
// items remain; large ones have one each, for machines of many cores.
constexpr int64_t SMALL_ITEM = 1 << 22;  // multiplications, 8 D for each pair

TXL_INLINE int64_t batch_rows_per_item(const Problem& p, int64_t items) {
  const int64_t each = 8 * group_size(p) * max_of(p.L, 1) * max_of(p.M + p.L, 1) * max_of(p.D, p.Dv);
  return clamp(min_of(p.B * p.Hkv / items, SMALL_ITEM / each), 1, max_of(p.B, 1));
}

// The part of a range that lies in the tile of keys from j0 on, relative to j0; low >= high if it is empty.
TXL_INLINE Range clip_to_tile(const Range& r, int64_t j0) {
  return {clamp(r.low - j0, 0, BLOCK_S), clamp(r.high - j0, 0, BLOCK_S)};
}

// The row stride of a strip's position scores: a tile, MR - 1 columns more, and up to a panel at both ends.
constexpr int64_t POSITION_LD = BLOCK_S + 2 * NR;

// The positional term of a strip's scores: row(x)[n] for row x and key n of the tile.
struct PositionScores {
  const float* first;
  int64_t stride;
  const float* row(int64_t x) const { return first + x * stride; }
};

alignas(64) constexpr float ZERO_POSITION_SCORES[BLOCK_S] = {};

// Computes the scores of the strip of `rows` queries from i on for the keys j0 + n, from <= n < to, `from` a multiple
// of COLUMN_STEP: the content term in content[MR][BLOCK_S], and returns the positional term, which lies in
// position[MR][POSITION_LD] skewed by one column for each row. Without r all rows share one row of biases; if all pairs
// are outside the tables, one of zeros. k_panels: the packed tile; Dp, Drp: the row strides of qu and qw.
static PositionScores strip_scores(const Problem& p, int64_t Dp, int64_t Drp, const Packed* qu, const Packed* qw,
                                   int64_t i, int64_t rows, int64_t j0, int64_t from, int64_t to,
                                   const Packed* k_panels, const TableWindow& table, float* content, float* position) {
  const int64_t D = padded_depth(p.D), Dr = padded_depth(p.Dr);
  const int64_t rho = rho_of(p, i + rows - 1, j0 + from), shift = rho % COLUMN_STEP,
                first = rho - shift;  // rho: of the last row and the first key
  gemm_panels(rows, qu, Dp, k_panels, D, from, round_up(to, COLUMN_STEP), content + from, BLOCK_S);
  const int64_t columns = shift + rows - 1 + to - from;
  // Columns without a visible pair are skipped.
  const int64_t low = max_of(table.visible_rhos.low - first, 0) / COLUMN_STEP * COLUMN_STEP;
  const int64_t high = min_of(columns, table.visible_rhos.high - first);
  if (p.zero_outside && low >= high) return {ZERO_POSITION_SCORES, 0};
  const float* const bias = table.bias ? table.bias + (first - table.first) : nullptr;
  const int64_t left = shift + rows - 1 - from;
  if (!table.panels) {
    if (!p.zero_outside || (low == 0 && high == columns)) return {bias + left, -1};
    for (int64_t c = 0; c < columns; ++c) position[c] = c >= low && c < high ? bias[c] : 0.f;
    return {position + left, -1};
  }
  const int64_t past = low + round_up(high - low, COLUMN_STEP), column = first - table.first;
  gemm_panels(rows, qw, Drp, table.panels, Dr, column + low, column + past, position + low, POSITION_LD);
  if (bias)
    for (int64_t x = 0; x < rows; ++x)
      for (int64_t c = low; c < high; c += LANES)
        store(position + x * POSITION_LD + c, load(position + x * POSITION_LD + c) + load(bias + c));
  for (int64_t x = 0; p.zero_outside && x < rows; ++x) {
    memset(position + x * POSITION_LD, 0, sizeof(float) * low);
    if (past < columns) memset(position + x * POSITION_LD + past, 0, sizeof(float) * (columns - past));
  }
  return {position + left, POSITION_LD - 1};
}

// The softcap on scores, x -> limit * tanh(x / limit), and its derivative. limit 0: none.
struct Softcap {
  float limit, inverse;
  explicit Softcap(const Problem& p) : limit(p.softcap), inverse(p.softcap ? 1 / p.softcap : 0.f) {}
  vf operator()(vf x) const { return tanh_of(x * inverse) * limit; }
  vf operator()(vf x, vf& derivative) const {
    const vf tanh = tanh_of(x * inverse);
    derivative = 1.f - tanh * tanh;
    return tanh * limit;
  }
};

// Dropout by Philox-4x32-7 (Salmon et al. 2011). The random bits of entry (b, h, i, j) are the 16-bit word i % 8,
// lowest first, of the block with counter (j, i / 8, b * H + h, 0) and the seed as key. So the mask depends on nothing
// else.

constexpr int PHILOX_ROUNDS = 7;
constexpr int64_t DROPOUT_ROWS = 8;  // consecutive queries share a Philox block

typedef uint64_t vw __attribute__((vector_size(4 * TXL_LANES)));

// The 64-bit products of the even 32-bit lanes of x with `by`.
TXL_INLINE vw mul_even_lanes(vw x, uint32_t by) {
#if defined(__x86_64__) && TXL_LANES == 8 && !defined(__clang__)
  // GCC would compute a full 64 x 64-bit product.
  typedef int v8si __attribute__((vector_size(32)));
  return (vw)__builtin_ia32_pmuludq256((v8si)x, (v8si)(vu{} + by));
#else
  return (x & 0xFFFFFFFFull) * static_cast<uint64_t>(by);
#endif
}

// The low and high halves of the products x * by.
TXL_INLINE void mulhilo(vu x, uint32_t by, vu& low, vu& high) {
  const vw even = mul_even_lanes((vw)x, by), odd = mul_even_lanes((vw)x >> 32, by);
  low = (vu)((even & 0xFFFFFFFFull) | (odd << 32));
  high = (vu)((even >> 32) | (odd & ~0xFFFFFFFFull));
}

// The Philox blocks of keys j .. j + LANES - 1.
TXL_INLINE void philox_blocks(uint32_t j, uint32_t group, uint32_t bh, uint64_t seed, vu out[4]) {
  vu c0, c1 = vu{} + group, c2 = vu{} + bh, c3 = {};
  for (int z = 0; z < LANES; ++z) c0[z] = j + static_cast<uint32_t>(z);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    vu low0, high0, low2, high2;
    mulhilo(c0, 0xD2511F53u, low0, high0);
    mulhilo(c2, 0xCD9E8D57u, low2, high2);
    c0 = high2 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low2;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// Sets factor[row * BLOCK_S + n] to 0 if entry (bh, i0 + row, j0 + n) is dropped, else to 1 / (1 - p), for the keys
// that some of the DROPOUT_ROWS queries of the row's Philox block sees. i0 is a multiple of DROPOUT_ROWS; ranges: the
// keys that each of the `count` rows sees.
static void dropout_factors(const Problem& p, const Range* ranges, int64_t count, int64_t bh, int64_t i0, int64_t j0,
                            float* factor) {
  for (int64_t group = 0; group < count; group += DROPOUT_ROWS) {
    const int64_t rows = min_of(DROPOUT_ROWS, count - group);
    int64_t from = BLOCK_S, to = 0;
    for (int64_t i = group; i < group + rows; ++i) {
      const Range seen = clip_to_tile(ranges[i], j0);
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
