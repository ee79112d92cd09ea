// P and dS of a block of queries against a tile of keys, and the gradients of keys, values and r that they yield.
#pragma once
#include "backward_plan.h"

namespace txl::TXL_ISA {
namespace {

// The row stride of unskewed dS: row i of a block starts at column BLOCK_L - 1 - i, so that a column is one rho. The
// margins on both sides are always zero.
constexpr int64_t UNSKEWED_LD = BLOCK_S + BLOCK_L;

#ifndef TXL_BF16_DOT
// Destinations of a row of P and dS, from key 0 of the tile on.
struct WeightRow {
  float *p, *unskewed;
  void put(int64_t n, const vf* weight, const vf* gradient) const {
    store_weights(p + n, weight);
    store_weights(unskewed + n, gradient);
  }
};

// P [BLOCK_L][BLOCK_S] and unskewed dS [BLOCK_L][UNSKEWED_LD], which with a row stride of one less is [query][key].
struct Weights {
  static constexpr int64_t KEY_LD = UNSKEWED_LD - 1;
  float *p, *unskewed;
  int64_t written = 0;  // keys of a tile that any block has written

  explicit Weights(Arena& a) : p(a.allocate(BLOCK_L * BLOCK_S)), unskewed(a.allocate(BLOCK_L * UNSKEWED_LD)) {}

  void clear_margins(int64_t rows) { memset(unskewed, 0, sizeof(float) * rows * UNSKEWED_LD); }
  // Returns the end of the keys that products of a block read and that must be zero where they are not written. The
  // block sees keys below `high`.
  int64_t end_of_keys(int64_t high) {
    written = max_of(written, min_of(round_up(high + MR, NR), BLOCK_S));
    return written;
  }
  WeightRow row(int64_t i, bool = true) const {
    return {p + i * BLOCK_S, unskewed + (i * UNSKEWED_LD + BLOCK_L - 1 - i)};
  }
  float* by_key(int64_t i) const { return unskewed + BLOCK_L - 1 + i * KEY_LD; }
  // Sets P and dS of row i to zero for the keys [from, to).
  void clear(int64_t i, int64_t from, int64_t to) {
    memset(row(i).p + from, 0, sizeof(float) * (to - from));
    memset(row(i).unskewed + from, 0, sizeof(float) * (to - from));
  }
};

// dk [BLOCK_S][Dp] and dv [BLOCK_S][Dvp] of a tile of keys.
struct KeyGradients {
  int64_t Dp, Drp, Dvp;
  bool wants_dk = false, wants_dv = false;
  float *dk, *dv;

  KeyGradients(Arena& a, const BackwardPlan& plan)
      : Dp(plan.Dp), Drp(plan.Drp), Dvp(plan.Dvp), dk(a.allocate(BLOCK_S * Dp)), dv(a.allocate(BLOCK_S * Dvp)) {}

  void start_item() {}
  void start_tile(bool with_dk, bool with_dv, int64_t keys) {
    wants_dk = with_dk, wants_dv = with_dv;
    keys = min_of(keys + MR, BLOCK_S);  // to the end of the last MR keys
    if (wants_dk) memset(dk, 0, sizeof(float) * keys * Dp);
    if (wants_dv) memset(dv, 0, sizeof(float) * keys * Dvp);
  }

  // Adds the gradients of the keys [from, to) from a block of `rows` queries.
  void add(const Weights& w, const float* qu, const float* dout, int64_t rows, int64_t from, int64_t to) {
    // MR divides BLOCK_S, so the last MR keys lie in the tile.
    for (int64_t n = from / MR * MR; n < to; n += MR) {
      if (wants_dv) gemm_add_transposed_rows(w.p + n, BLOCK_S, dout, rows, Dvp, dv + n * Dvp);
      if (wants_dk) gemm_add_transposed_rows(w.by_key(0) + n, Weights::KEY_LD, qu, rows, Dp, dk + n * Dp);
    }
  }

  // Adds the gradient of r from a block, for the unskewed `columns`. Row `rho` of dr, the sum of the item, belongs to
  // column 0.
  void add_to_table(const Weights& w, const float* qw, int64_t rows, int64_t from, int64_t to, Range columns, int64_t,
                    float* dr, int64_t rho) {
    for (int64_t c = columns.low / MR * MR; c < columns.high; c += MR) {
      const int64_t first = max_of(0, BLOCK_L - 1 - (c + MR - 1) + from);  // rows that have one of these columns
      const int64_t last = min_of(rows, BLOCK_L - 1 - c + to);
      if (first < last)
        gemm_add_transposed_rows(w.unskewed + first * UNSKEWED_LD + c, UNSKEWED_LD, qw + first * Drp, last - first, Drp,
                                 dr + (rho + c) * Drp);
    }
  }

  void finish_tile(int64_t) {}
  void finish_item(int64_t, float*) {}
};

#else
// Destinations of a row of P and dS, from key 0 of the tile on.
struct WeightRow {
  bf16 *p, *by_key, *unskewed;
  void put(int64_t n, const vf* weight, const vf* gradient) const {
    store_weights(p + n, weight);
    store_weights(by_key + n, gradient);
    if (unskewed) store_weights(unskewed + n, gradient);
  }
};

// P and dS [BLOCK_L][BLOCK_S], and unskewed dS [BLOCK_L][UNSKEWED_LD].
struct Weights {
  static constexpr int64_t KEY_LD = BLOCK_S;
  bf16 *p, *ds, *unskewed;
  int64_t written = 0;  // keys of a tile that any block has written

  explicit Weights(Arena& a)
      : p(a.allocate<bf16>(BLOCK_L * BLOCK_S)),
        ds(a.allocate<bf16>(BLOCK_L * BLOCK_S)),
        unskewed(a.allocate<bf16>(BLOCK_L * UNSKEWED_LD)) {}

  void clear_margins(int64_t rows) { memset(unskewed, 0, sizeof(bf16) * rows * UNSKEWED_LD); }
  // Returns the end of the keys that products of a block read and that must be zero where they are not written. The
  // block sees keys below `high`.
  int64_t end_of_keys(int64_t high) {
    written = max_of(written, round_up(high, KEY_STEP > NR ? KEY_STEP : NR));
    return written;
  }
  // unskew: whether dS is written unskewed, too.
  WeightRow row(int64_t i, bool unskew = true) const {
    return {p + i * BLOCK_S, ds + i * BLOCK_S, unskew ? unskewed + (i * UNSKEWED_LD + BLOCK_L - 1 - i) : nullptr};
  }
  const bf16* by_key(int64_t i) const { return ds + i * BLOCK_S; }
  // Sets P and dS of row i to zero for the keys [from, to).
  void clear(int64_t i, int64_t from, int64_t to) {
    const WeightRow at = row(i);
    bf16* const all[] = {at.p, at.by_key, at.unskewed};
    for (bf16* x : all) memset(x + from, 0, sizeof(bf16) * (to - from));
  }
};

// Interleaves pairs of rows: [count][ld] -> [count / 2][ld][2], for the columns [from, to), multiples of LANES.
static void interleave_rows(const bf16* rows, int64_t ld, int64_t count, int64_t from, int64_t to, bf16* pairs) {
  for (int64_t i = 0; i < count; i += 2, rows += 2 * ld, pairs += 2 * ld)
    for (int64_t n = from; n < to; n += LANES) store_words(pairs + 2 * n, interleave_bf16(rows + n, rows + ld + n));
}

// Transposes [count][width] to [width][BLOCK_L], width a multiple of NR. `count` is rounded up to 2 * LANES rows, which
// are read.
static void transpose_rows(const bf16* rows, int64_t width, int64_t count, bf16* columns) {
  static_assert(BLOCK_L % (2 * LANES) == 0, "a block is a whole number of vectors of pairs");
  for (int64_t i = 0; i < count; i += 2 * LANES)
    for (int64_t d = 0; d < width; d += LANES) {
      vf x[LANES];
      const bf16* from = rows + i * width + d;
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) x[z] = (vf)interleave_bf16(from + 2 * z * width, from + (2 * z + 1) * width);
      transpose(x);
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) store_words(columns + (d + z) * BLOCK_L + i, (vu)x[z]);
    }
}

// dk and dv of a tile of keys and dr of an item are accumulated transposed, [Dp (dv: Dvp, dr: Drp)][keys or rhos]. P
// and dS are then the right factor, whose rows are interleaved, and need no transposition.
struct KeyGradients {
  int64_t Dp, Drp, Dvp, rhos, dr_ld, heads;
  bool wants_dk = false, wants_dv = false;
  float *dk, *dv;                  // [BLOCK_S][Dp or Dvp], when a tile is finished
  float *dk_columns, *dv_columns;  // [Dp or Dvp][BLOCK_S]
  float* dr_columns;               // [heads][Drp][dr_ld]
  bf16 *p_pairs, *ds_pairs, *unskewed_pairs, *qu_columns, *qw_columns, *dout_columns;

  KeyGradients(Arena& a, const BackwardPlan& plan)
      : Dp(plan.Dp),
        Drp(plan.Drp),
        Dvp(plan.Dvp),
        rhos(plan.dr_rows()),
        dr_ld(round_up(rhos, 2 * NR) + NR),  // rows do not share cache sets
        heads(plan.heads),
        dk(a.allocate(BLOCK_S * Dp)),
        dv(a.allocate(BLOCK_S * Dvp)),
        dk_columns(a.allocate(BLOCK_S * Dp)),
        dv_columns(a.allocate(BLOCK_S * Dvp)),
        dr_columns(a.allocate(rhos ? heads * dr_ld * Drp : 0)),
        p_pairs(a.allocate<bf16>(BLOCK_L * BLOCK_S)),
        ds_pairs(a.allocate<bf16>(BLOCK_L * BLOCK_S)),
        unskewed_pairs(a.allocate<bf16>(BLOCK_L * UNSKEWED_LD)),
        qu_columns(a.allocate<bf16>(BLOCK_L * Dp)),
        qw_columns(a.allocate<bf16>(BLOCK_L * Drp)),
        dout_columns(a.allocate<bf16>(BLOCK_L * Dvp)) {}

  void start_item() { memset(dr_columns, 0, sizeof(float) * heads * dr_ld * Drp); }
  void start_tile(bool with_dk, bool with_dv, int64_t keys) {
    wants_dk = with_dk, wants_dv = with_dv;
    for (int64_t d = 0; wants_dk && d < Dp; ++d) memset(dk_columns + d * BLOCK_S, 0, sizeof(float) * keys);
    for (int64_t d = 0; wants_dv && d < Dvp; ++d) memset(dv_columns + d * BLOCK_S, 0, sizeof(float) * keys);
  }

  // Adds the gradients of the keys [from, to) from a block of `rows` queries.
  void add(const Weights& w, const bf16* qu, const bf16* dout, int64_t rows, int64_t from, int64_t to) {
    from = from / NR * NR, to = round_up(to, NR);
    if (wants_dv) {
      interleave_rows(w.p, BLOCK_S, rows, from, to, p_pairs);
      transpose_rows(dout, Dvp, rows, dout_columns);
      gemm_add_columns(Dvp, dout_columns, p_pairs, BLOCK_S, 0, rows, from, to, dv_columns, BLOCK_S);
    }
    if (wants_dk) {
      interleave_rows(w.ds, BLOCK_S, rows, from, to, ds_pairs);
      transpose_rows(qu, Dp, rows, qu_columns);
      gemm_add_columns(Dp, qu_columns, ds_pairs, BLOCK_S, 0, rows, from, to, dk_columns, BLOCK_S);
    }
  }

  // Adds the gradient of r from a block of head `head` of the item, for the unskewed `columns`. Row `rho` of dr belongs
  // to column 0.
  void add_to_table(const Weights& w, const bf16* qw, int64_t rows, int64_t from, int64_t to, Range columns,
                    int64_t head, float*, int64_t rho) {
    float* const dr = dr_columns + head * Drp * dr_ld;
    from = from / NR * NR, to = round_up(to, NR);
    columns = {columns.low / NR * NR, min_of(round_up(columns.high, NR), UNSKEWED_LD)};
    interleave_rows(w.unskewed, UNSKEWED_LD, rows, columns.low, columns.high, unskewed_pairs);
    transpose_rows(qw, Drp, rows, qw_columns);
    for (int64_t c = columns.low; c < columns.high; c += NR) {
      const int64_t first =
          max_of(0, BLOCK_L - 1 - (c + NR - 1) + from) / DEPTH * DEPTH;  // rows that have one of these columns
      const int64_t last = min_of(rows, round_up(BLOCK_L - 1 - c + to, DEPTH));
      if (first < last)
        gemm_add_columns(Drp, qw_columns, unskewed_pairs, UNSKEWED_LD, first, last, c, c + NR, dr + rho, dr_ld);
    }
  }

  void finish_tile(int64_t keys) {
    if (wants_dk) transpose_back(Dp, dk_columns, BLOCK_S, keys, dk);
    if (wants_dv) transpose_back(Dvp, dv_columns, BLOCK_S, keys, dv);
  }
  void finish_item(int64_t head, float* dr) { transpose_back(Drp, dr_columns + head * Drp * dr_ld, dr_ld, rhos, dr); }

 private:
  // sums[d][n] += the sum over queries i in [first, last) of x[d][i] * weights[i][n], for d < width and n in [from,
  // to).
  void gemm_add_columns(int64_t width, const bf16* x, const bf16* pairs, int64_t ld, int64_t first, int64_t last,
                        int64_t from, int64_t to, float* sums, int64_t sums_ld) {
    for (int64_t n = from; n < to; n += NR)
      for (int64_t d = 0; d < width; d += MR)
        microkernel<true>(x + d * BLOCK_L + first, BLOCK_L, pairs + first * ld + 2 * n, ld, last - first,
                          sums + d * sums_ld + n, sums_ld);
  }

  // rows[n][d] = columns[d][n] for n < count, d < width.
  void transpose_back(int64_t width, const float* columns, int64_t ld, int64_t count, float* rows) {
    for (int64_t n = 0; n < count; n += LANES)
      for (int64_t d = 0; d < width; d += LANES) transpose(columns + d * ld + n, ld, rows + n * width + d, width);
  }
};

#endif

// Adds the sum of `rows` rows of unskewed dS to sums, for its `columns`.
static void add_unskewed(const Weights& w, int64_t rows, Range columns, float* sums) {
  for (int64_t c = columns.low / LANES * LANES; c < columns.high; c += LANES) {
    vf sum = load(sums + c);
    for (int64_t i = 0; i < rows; ++i) sum += load(w.unskewed + i * UNSKEWED_LD + c);
    store(sums + c, sum);
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
