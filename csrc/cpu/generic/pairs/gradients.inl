// Backward's weights of a block of queries against a tile of keys, and what the keys get from them.

// Where a row's P and dS go, from key 0 of the tile on.
struct WeightRow {
  bf16 *p, *by_key, *skewed;
  void put(int64_t n, const vf* weight, const vf* gradient) const {
    store_weights(p + n, weight);
    store_weights(by_key + n, gradient);
    store_weights(skewed + n, gradient);
  }
};

// P [BLOCK_L][BLOCK_S], dS the same and skewed.
struct Weights {
  static constexpr int64_t KEY_LD = BLOCK_S;
  bf16 *p, *ds, *skew;

  explicit Weights(Arena& a)
      : p(a.take<bf16>(BLOCK_L * BLOCK_S)), ds(a.take<bf16>(BLOCK_L * BLOCK_S)), skew(a.take<bf16>(BLOCK_L * SKEW_LD)) {}

  void start() { memset(skew, 0, sizeof(bf16) * BLOCK_L * SKEW_LD); }
  WeightRow row(int64_t i) const {
    return {p + i * BLOCK_S, ds + i * BLOCK_S, skew + i * SKEW_LD + BLOCK_L - 1 - i};
  }
  const bf16* by_key(int64_t i) const { return ds + i * BLOCK_S; }
  // What is not seen must read as zero.
  void clear(int64_t i, int64_t from, int64_t to) {
    const WeightRow at = row(i);
    bf16* const all[] = {at.p, at.by_key, at.skewed};
    for (bf16* x : all) memset(x + from, 0, sizeof(bf16) * (to - from));
  }
};

// [rows / 2][columns][2]: rows of stride ld in pairs, columns [from, to), multiples of LANES.
static void pair_rows(const bf16* rows, int64_t ld, int64_t count, int64_t from, int64_t to, bf16* pairs) {
  for (int64_t i = 0; i < count; i += 2, rows += 2 * ld, pairs += 2 * ld)
    for (int64_t n = from; n < to; n += LANES) store_words(pairs + 2 * n, paired(rows + n, rows + ld + n));
}

// [width][BLOCK_L] of [BLOCK_L][width], width a multiple of NR.
static void transpose_rows(const bf16* rows, int64_t width, bf16* columns) {
  static_assert(BLOCK_L % (2 * LANES) == 0, "queries in whole vectors of pairs");
  for (int64_t i = 0; i < BLOCK_L; i += 2 * LANES)
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

// dk and dv of a tile and dr of an item are added up transposed, [Dp][keys or rhos]: so that pairs of
// queries lie side by side in what multiplies the weights, and weights need no transposition.
struct KeyGradients {
  int64_t Dp, rhos, dr_ld;
  float *dk, *dv;               // [BLOCK_S][Dp], of a finished tile
  float *dk_columns, *dv_columns;  // [Dp][BLOCK_S]
  float* dr_columns;            // [Dp][dr_ld]
  bf16 *p_pairs, *ds_pairs, *skew_pairs, *qu_columns, *qw_columns, *dout_columns;

  KeyGradients(Arena& a, int64_t padded, int64_t rho_rows)
      : Dp(padded),
        rhos(rho_rows),
        dr_ld(round_up(rho_rows, 2 * NR) + NR),  // rows far apart in the cache's sets
        dk(a.take(BLOCK_S * Dp)),
        dv(a.take(BLOCK_S * Dp)),
        dk_columns(a.take(BLOCK_S * Dp)),
        dv_columns(a.take(BLOCK_S * Dp)),
        dr_columns(a.take(dr_ld * Dp)),
        p_pairs(a.take<bf16>(BLOCK_L * BLOCK_S)),
        ds_pairs(a.take<bf16>(BLOCK_L * BLOCK_S)),
        skew_pairs(a.take<bf16>(BLOCK_L * SKEW_LD)),
        qu_columns(a.take<bf16>(BLOCK_L * Dp)),
        qw_columns(a.take<bf16>(BLOCK_L * Dp)),
        dout_columns(a.take<bf16>(BLOCK_L * Dp)) {}

  void start_item() { memset(dr_columns, 0, sizeof(float) * dr_ld * Dp); }
  void start_tile() {
    memset(dk_columns, 0, sizeof(float) * BLOCK_S * Dp);
    memset(dv_columns, 0, sizeof(float) * BLOCK_S * Dp);
  }

  // From a block whose weights are complete in `rows` rows, for keys [from, to); `rho`: the item's row
  // of dr that belongs to column 0.
  void add(const Weights& w, const bf16* qu, const bf16* qw, const bf16* dout, int64_t rows, int64_t from, int64_t to,
           float*, int64_t rho) {
    from = from / NR * NR, to = round_up(to, NR);
    const int64_t end = min_of(round_up(to + BLOCK_L - 1, NR), SKEW_LD);
    pair_rows(w.p, BLOCK_S, rows, from, to, p_pairs);
    pair_rows(w.ds, BLOCK_S, rows, from, to, ds_pairs);
    pair_rows(w.skew, SKEW_LD, rows, from, end, skew_pairs);
    transpose_rows(qu, Dp, qu_columns);
    transpose_rows(qw, Dp, qw_columns);
    transpose_rows(dout, Dp, dout_columns);
    add_columns(dout_columns, p_pairs, BLOCK_S, 0, rows, from, to, dv_columns, BLOCK_S);
    add_columns(qu_columns, ds_pairs, BLOCK_S, 0, rows, from, to, dk_columns, BLOCK_S);
    for (int64_t c = from; c < end; c += NR) {
      const int64_t first = max_of(0, BLOCK_L - 1 - (c + NR - 1) + from) / DEPTH * DEPTH;  // rows with a column of these
      const int64_t last = min_of(rows, round_up(BLOCK_L - 1 - c + to, DEPTH));
      if (first < last) add_columns(qw_columns, skew_pairs, SKEW_LD, first, last, c, c + NR, dr_columns + rho, dr_ld);
    }
  }

  void finish_tile() {
    transpose_back(dk_columns, BLOCK_S, BLOCK_S, dk);
    transpose_back(dv_columns, BLOCK_S, BLOCK_S, dv);
  }
  void finish_item(float* dr) { transpose_back(dr_columns, dr_ld, rhos, dr); }

 private:
  // sums[d][n] += sum over the queries [first, last) of x[d][i] * weights[i][n], for n in [from, to).
  void add_columns(const bf16* x, const bf16* pairs, int64_t ld, int64_t first, int64_t last, int64_t from, int64_t to,
                   float* sums, int64_t sums_ld) {
    for (int64_t n = from; n < to; n += NR)
      for (int64_t d = 0; d < Dp; d += MR)
        micro<true>(x + d * BLOCK_L + first, BLOCK_L, pairs + first * ld + 2 * n, ld, last - first,
                    sums + d * sums_ld + n, sums_ld);
  }

  // rows[n][Dp] of columns[Dp][ld], n < count.
  void transpose_back(const float* columns, int64_t ld, int64_t count, float* rows) {
    for (int64_t n = 0; n < count; n += LANES)
      for (int64_t d = 0; d < Dp; d += LANES) transpose(columns + d * ld + n, ld, rows + n * Dp + d, Dp);
  }
};
