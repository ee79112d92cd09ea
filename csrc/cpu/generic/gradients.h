// Backward's weights of a block of queries against a tile of keys, and what the keys get from them.
#pragma once
#include "backward_plan.h"

namespace txl::TXL_ISA {
namespace {

// dS of a block of queries against a tile of keys, kept unskewed: row i of the block starts at column
// BLOCK_L - 1 - i, so a column is one rho. The margins are zero and stay so.
constexpr int64_t UNSKEWED_LD = BLOCK_S + BLOCK_L;

#ifndef TXL_PAIRS
// Where a row's P and dS go, from key 0 of the tile on.
struct WeightRow {
  float *p, *unskewed;
  void put(int64_t n, const vf* weight, const vf* gradient) const {
    store_weights(p + n, weight);
    store_weights(unskewed + n, gradient);
  }
};

// P [BLOCK_L][BLOCK_S] and dS. With a row stride one shorter the unskewed dS reads as [query][key].
struct Weights {
  static constexpr int64_t KEY_LD = UNSKEWED_LD - 1;
  float *p, *unskewed;
  int64_t written = 0;  // keys of a tile that were ever written

  explicit Weights(Arena& a) : p(a.take(BLOCK_L * BLOCK_S)), unskewed(a.take(BLOCK_L * UNSKEWED_LD)) {}

  void start(int64_t rows) { memset(unskewed, 0, sizeof(float) * rows * UNSKEWED_LD); }
  // Where zeros must begin to end, for a block that sees keys below `high`: behind the last group of keys
  // that is read.
  int64_t reach(int64_t high) {
    written = max_of(written, min_of(round_up(high + MR, NR), BLOCK_S));
    return written;
  }
  WeightRow row(int64_t i, bool = true) const {
    return {p + i * BLOCK_S, unskewed + (i * UNSKEWED_LD + BLOCK_L - 1 - i)};
  }
  float* by_key(int64_t i) const { return unskewed + BLOCK_L - 1 + i * KEY_LD; }
  // What is not seen must read as zero.
  void clear(int64_t i, int64_t from, int64_t to) {
    memset(row(i).p + from, 0, sizeof(float) * (to - from));
    memset(row(i).unskewed + from, 0, sizeof(float) * (to - from));
  }
};

// dk [BLOCK_S][Dp] and dv [BLOCK_S][Dvp] of a tile.
struct KeyGradients {
  int64_t Dp, Drp, Dvp;
  bool wants_dk = false, wants_dv = false;
  float *dk, *dv;

  KeyGradients(Arena& a, const BackwardPlan& plan)
      : Dp(plan.Dp), Drp(plan.Drp), Dvp(plan.Dvp), dk(a.take(BLOCK_S * Dp)), dv(a.take(BLOCK_S * Dvp)) {}

  void start_item() {}
  void start_tile(bool with_dk, bool with_dv, int64_t keys) {
    wants_dk = with_dk, wants_dv = with_dv;
    keys = min_of(keys + MR, BLOCK_S);  // the last group of keys
    if (wants_dk) memset(dk, 0, sizeof(float) * keys * Dp);
    if (wants_dv) memset(dv, 0, sizeof(float) * keys * Dvp);
  }

  // From a block whose weights are complete in `rows` rows, for keys [from, to).
  void add(const Weights& w, const float* qu, const float* dout, int64_t rows, int64_t from, int64_t to) {
    // MR divides BLOCK_S, so groups of MR stay inside the tile.
    for (int64_t n = from / MR * MR; n < to; n += MR) {
      if (wants_dv) add_transposed_times_rows(w.p + n, BLOCK_S, dout, rows, Dvp, dv + n * Dvp);
      if (wants_dk) add_transposed_times_rows(w.by_key(0) + n, Weights::KEY_LD, qu, rows, Dp, dk + n * Dp);
    }
  }

  // The same of the table, for the unskewed `columns`; dr: of the item and the group's head `head`, row `rho` belonging
  // to column 0.
  void add_to_table(const Weights& w, const float* qw, int64_t rows, int64_t from, int64_t to, Range columns, int64_t,
                    float* dr, int64_t rho) {
    for (int64_t c = columns.low / MR * MR; c < columns.high; c += MR) {
      const int64_t first = max_of(0, BLOCK_L - 1 - (c + MR - 1) + from);  // rows with a column of this group
      const int64_t last = min_of(rows, BLOCK_L - 1 - c + to);
      if (first < last)
        add_transposed_times_rows(w.unskewed + first * UNSKEWED_LD + c, UNSKEWED_LD, qw + first * Drp, last - first,
                                  Drp, dr + (rho + c) * Drp);
    }
  }

  void finish_tile(int64_t) {}
  void finish_item(int64_t, float*) {}
};

#else
// Where a row's P and dS go, from key 0 of the tile on.
struct WeightRow {
  bf16 *p, *by_key, *unskewed;
  void put(int64_t n, const vf* weight, const vf* gradient) const {
    store_weights(p + n, weight);
    store_weights(by_key + n, gradient);
    if (unskewed) store_weights(unskewed + n, gradient);
  }
};

// P [BLOCK_L][BLOCK_S], dS the same and unskewed.
struct Weights {
  static constexpr int64_t KEY_LD = BLOCK_S;
  bf16 *p, *ds, *unskewed;
  int64_t written = 0;  // keys of a tile that were ever written

  explicit Weights(Arena& a)
      : p(a.take<bf16>(BLOCK_L * BLOCK_S)),
        ds(a.take<bf16>(BLOCK_L * BLOCK_S)),
        unskewed(a.take<bf16>(BLOCK_L * UNSKEWED_LD)) {}

  void start(int64_t rows) { memset(unskewed, 0, sizeof(bf16) * rows * UNSKEWED_LD); }
  // Where zeros must begin to end, for a block that sees keys below `high`.
  int64_t reach(int64_t high) {
    written = max_of(written, round_up(high, STEP > NR ? STEP : NR));
    return written;
  }
  // unskew: whether the row is read unskewed, too.
  WeightRow row(int64_t i, bool unskew = true) const {
    return {p + i * BLOCK_S, ds + i * BLOCK_S, unskew ? unskewed + (i * UNSKEWED_LD + BLOCK_L - 1 - i) : nullptr};
  }
  const bf16* by_key(int64_t i) const { return ds + i * BLOCK_S; }
  // What is not seen must read as zero.
  void clear(int64_t i, int64_t from, int64_t to) {
    const WeightRow at = row(i);
    bf16* const all[] = {at.p, at.by_key, at.unskewed};
    for (bf16* x : all) memset(x + from, 0, sizeof(bf16) * (to - from));
  }
};

// [rows / 2][columns][2]: rows of stride ld in pairs, columns [from, to), multiples of LANES.
static void pair_rows(const bf16* rows, int64_t ld, int64_t count, int64_t from, int64_t to, bf16* pairs) {
  for (int64_t i = 0; i < count; i += 2, rows += 2 * ld, pairs += 2 * ld)
    for (int64_t n = from; n < to; n += LANES) store_words(pairs + 2 * n, paired(rows + n, rows + ld + n));
}

// [width][BLOCK_L] of [count][width], width a multiple of NR; rows up to a whole vector are read.
static void transpose_rows(const bf16* rows, int64_t width, int64_t count, bf16* columns) {
  static_assert(BLOCK_L % (2 * LANES) == 0, "queries in whole vectors of pairs");
  for (int64_t i = 0; i < count; i += 2 * LANES)
    for (int64_t d = 0; d < width; d += LANES) {
      vf x[LANES];
      const bf16* from = rows + i * width + d;
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) x[z] = (vf)paired(from + 2 * z * width, from + (2 * z + 1) * width);
      transpose(x);
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) store_words(columns + (d + z) * BLOCK_L + i, (vu)x[z]);
    }
}

// dk and dv of a tile and dr of an item are added up transposed, [Dp (dv: Dvp, dr: Drp)][keys or rhos]: so that pairs
// of queries lie side by side in what multiplies the weights, and weights need no transposition.
struct KeyGradients {
  int64_t Dp, Drp, Dvp, rhos, dr_ld, heads;
  bool wants_dk = false, wants_dv = false;
  float *dk, *dv;                  // [BLOCK_S][Dp or Dvp], of a finished tile
  float *dk_columns, *dv_columns;  // [Dp or Dvp][BLOCK_S]
  float* dr_columns;               // [heads][Drp][dr_ld]
  bf16 *p_pairs, *ds_pairs, *unskewed_pairs, *qu_columns, *qw_columns, *dout_columns;

  KeyGradients(Arena& a, const BackwardPlan& plan)
      : Dp(plan.Dp),
        Drp(plan.Drp),
        Dvp(plan.Dvp),
        rhos(plan.dr_rows()),
        dr_ld(round_up(rhos, 2 * NR) + NR),  // rows far apart in the cache's sets
        heads(plan.heads),
        dk(a.take(BLOCK_S * Dp)),
        dv(a.take(BLOCK_S * Dvp)),
        dk_columns(a.take(BLOCK_S * Dp)),
        dv_columns(a.take(BLOCK_S * Dvp)),
        dr_columns(a.take(rhos ? heads * dr_ld * Drp : 0)),
        p_pairs(a.take<bf16>(BLOCK_L * BLOCK_S)),
        ds_pairs(a.take<bf16>(BLOCK_L * BLOCK_S)),
        unskewed_pairs(a.take<bf16>(BLOCK_L * UNSKEWED_LD)),
        qu_columns(a.take<bf16>(BLOCK_L * Dp)),
        qw_columns(a.take<bf16>(BLOCK_L * Drp)),
        dout_columns(a.take<bf16>(BLOCK_L * Dvp)) {}

  void start_item() { memset(dr_columns, 0, sizeof(float) * heads * dr_ld * Drp); }
  void start_tile(bool with_dk, bool with_dv, int64_t keys) {
    wants_dk = with_dk, wants_dv = with_dv;
    for (int64_t d = 0; wants_dk && d < Dp; ++d) memset(dk_columns + d * BLOCK_S, 0, sizeof(float) * keys);
    for (int64_t d = 0; wants_dv && d < Dvp; ++d) memset(dv_columns + d * BLOCK_S, 0, sizeof(float) * keys);
  }

  // From a block whose weights are complete in `rows` rows, for keys [from, to).
  void add(const Weights& w, const bf16* qu, const bf16* dout, int64_t rows, int64_t from, int64_t to) {
    from = from / NR * NR, to = round_up(to, NR);
    if (wants_dv) {
      pair_rows(w.p, BLOCK_S, rows, from, to, p_pairs);
      transpose_rows(dout, Dvp, rows, dout_columns);
      add_columns(Dvp, dout_columns, p_pairs, BLOCK_S, 0, rows, from, to, dv_columns, BLOCK_S);
    }
    if (wants_dk) {
      pair_rows(w.ds, BLOCK_S, rows, from, to, ds_pairs);
      transpose_rows(qu, Dp, rows, qu_columns);
      add_columns(Dp, qu_columns, ds_pairs, BLOCK_S, 0, rows, from, to, dk_columns, BLOCK_S);
    }
  }

  // The same of the table, for the unskewed `columns`; `rho`: the row of dr, of the group's head `head`, that belongs
  // to column 0.
  void add_to_table(const Weights& w, const bf16* qw, int64_t rows, int64_t from, int64_t to, Range columns,
                    int64_t head, float*, int64_t rho) {
    float* const dr = dr_columns + head * Drp * dr_ld;
    from = from / NR * NR, to = round_up(to, NR);
    columns = {columns.low / NR * NR, min_of(round_up(columns.high, NR), UNSKEWED_LD)};
    pair_rows(w.unskewed, UNSKEWED_LD, rows, columns.low, columns.high, unskewed_pairs);
    transpose_rows(qw, Drp, rows, qw_columns);
    for (int64_t c = columns.low; c < columns.high; c += NR) {
      const int64_t first =
          max_of(0, BLOCK_L - 1 - (c + NR - 1) + from) / DEPTH * DEPTH;  // rows with a column of these
      const int64_t last = min_of(rows, round_up(BLOCK_L - 1 - c + to, DEPTH));
      if (first < last)
        add_columns(Drp, qw_columns, unskewed_pairs, UNSKEWED_LD, first, last, c, c + NR, dr + rho, dr_ld);
    }
  }

  void finish_tile(int64_t keys) {
    if (wants_dk) transpose_back(Dp, dk_columns, BLOCK_S, keys, dk);
    if (wants_dv) transpose_back(Dvp, dv_columns, BLOCK_S, keys, dv);
  }
  void finish_item(int64_t head, float* dr) { transpose_back(Drp, dr_columns + head * Drp * dr_ld, dr_ld, rhos, dr); }

 private:
  // sums[d][n] += sum over the queries [first, last) of x[d][i] * weights[i][n], for d < width and n in [from, to).
  void add_columns(int64_t width, const bf16* x, const bf16* pairs, int64_t ld, int64_t first, int64_t last,
                   int64_t from, int64_t to, float* sums, int64_t sums_ld) {
    for (int64_t n = from; n < to; n += NR)
      for (int64_t d = 0; d < width; d += MR)
        micro<true>(x + d * BLOCK_L + first, BLOCK_L, pairs + first * ld + 2 * n, ld, last - first,
                    sums + d * sums_ld + n, sums_ld);
  }

  // rows[n][width] of columns[width][ld], n < count.
  void transpose_back(int64_t width, const float* columns, int64_t ld, int64_t count, float* rows) {
    for (int64_t n = 0; n < count; n += LANES)
      for (int64_t d = 0; d < width; d += LANES) transpose(columns + d * ld + n, ld, rows + n * width + d, width);
  }
};

#endif

// sums[c] += the sum of `rows` rows of an unskewed tile, for its `columns`.
static void add_unskewed(const Weights& w, int64_t rows, Range columns, float* sums) {
  for (int64_t c = columns.low / LANES * LANES; c < columns.high; c += LANES) {
    vf sum = load(sums + c);
    for (int64_t i = 0; i < rows; ++i) sum += load(w.unskewed + i * UNSKEWED_LD + c);
    store(sums + c, sum);
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
