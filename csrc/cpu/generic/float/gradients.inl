// Backward's weights of a block of queries against a tile of keys, and what the keys get from them.

// Where a row's P and dS go, from key 0 of the tile on.
struct WeightRow {
  float *p, *skewed;
  void put(int64_t n, const vf* weight, const vf* gradient) const {
    store_weights(p + n, weight);
    store_weights(skewed + n, gradient);
  }
};

// P [BLOCK_L][BLOCK_S] and dS. With a row stride one shorter the skewed dS reads as [query][key].
struct Weights {
  static constexpr int64_t KEY_LD = SKEW_LD - 1;
  float *p, *skew;
  int64_t written = 0;  // keys of a tile that were ever written

  explicit Weights(Arena& a) : p(a.take(BLOCK_L * BLOCK_S)), skew(a.take(BLOCK_L * SKEW_LD)) {}

  void start(int64_t rows) { memset(skew, 0, sizeof(float) * rows * SKEW_LD); }
  // Where zeros must begin to end, for a block that sees keys below `high`: behind the last group of keys
  // that is read.
  int64_t reach(int64_t high) {
    written = max_of(written, min_of(round_up(high + MR, NR), BLOCK_S));
    return written;
  }
  WeightRow row(int64_t i) const { return {p + i * BLOCK_S, skew + i * SKEW_LD + BLOCK_L - 1 - i}; }
  const float* by_key(int64_t i) const { return skew + BLOCK_L - 1 + i * KEY_LD; }
  // What is not seen must read as zero.
  void clear(int64_t i, int64_t from, int64_t to) {
    memset(row(i).p + from, 0, sizeof(float) * (to - from));
    memset(row(i).skewed + from, 0, sizeof(float) * (to - from));
  }
};

// dk and dv of a tile [BLOCK_S][Dp].
struct KeyGradients {
  int64_t Dp;
  bool wants_dk = false, wants_dv = false;
  float *dk, *dv;

  KeyGradients(Arena& a, int64_t padded, int64_t) : Dp(padded), dk(a.take(BLOCK_S * Dp)), dv(a.take(BLOCK_S * Dp)) {}

  void start_item() {}
  void start_tile(bool with_dk, bool with_dv, int64_t keys) {
    wants_dk = with_dk, wants_dv = with_dv;
    keys = min_of(keys + MR, BLOCK_S);  // the last group of keys
    if (wants_dk) memset(dk, 0, sizeof(float) * keys * Dp);
    if (wants_dv) memset(dv, 0, sizeof(float) * keys * Dp);
  }

  // From a block whose weights are complete in `rows` rows, for keys [from, to); dr: of the item, row
  // `rho` belonging to column 0; null if it is not wanted.
  void add(const Weights& w, const float* qu, const float* qw, const float* dout, int64_t rows, int64_t from,
           int64_t to, float* dr, int64_t rho) {
    // MR divides BLOCK_S, so groups of MR stay inside the tile.
    for (int64_t n = from / MR * MR; n < to; n += MR) {
      if (wants_dv) add_transposed_times_rows(w.p + n, BLOCK_S, dout, rows, Dp, dv + n * Dp);
      if (wants_dk) add_transposed_times_rows(w.by_key(0) + n, Weights::KEY_LD, qu, rows, Dp, dk + n * Dp);
    }
    if (!dr) return;
    for (int64_t c = from / MR * MR; c < to + BLOCK_L - 1; c += MR) {
      const int64_t first = max_of(0, BLOCK_L - 1 - (c + MR - 1) + from);  // rows with a column of this group
      const int64_t last = min_of(rows, BLOCK_L - 1 - c + to);
      if (first < last)
        add_transposed_times_rows(w.skew + first * SKEW_LD + c, SKEW_LD, qw + first * Dp, last - first, Dp,
                                  dr + (rho + c) * Dp);
    }
  }

  void finish_tile(int64_t) {}
  void finish_item(float*) {}
};
