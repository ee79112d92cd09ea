// Backward: scores are recomputed from lse, and each tile's recomputation serves dq, dk, dv and dr
// at once: 8 products of width D a visible pair, none wasted. An item is one (b, h) and one chunk
// of its keys; it finishes dk and dv of its keys, tile by tile, while its dq and dr are partial
// sums, added up afterwards in a fixed order. How many chunks is a function of shapes, so threads
// change no bit.

constexpr int64_t BLOCK_L = 48;         // queries of a block: a multiple of MR and of 4 (dropout)
constexpr int64_t BACKWARD_ITEMS = 32;  // chunks of keys are made until there are as many items
constexpr int64_t MAX_CHUNKS = 16;      // each has a dq of its own
static_assert(BLOCK_L <= RHO_FRONT, "rows that pad a block have rho >= 0");

// dS of a block is kept skewed: row i of the block starts at column BLOCK_L - 1 - i, so a column is
// one rho, and with a row stride one shorter the same memory reads as [query][key]. The margins are
// zero and stay so.
constexpr int64_t SKEW_LD = BLOCK_S + BLOCK_L;

// How the work is cut, and what an item adds up: dq [rows][Dp], dr [rhos][Dp] from first_rho on,
// du, dw [Dp].
struct BackwardPlan {
  int64_t Dp, chunk, chunks, rows, rhos;  // chunk: keys

  explicit BackwardPlan(const Problem& p) : Dp(round_up(p.D, NR)) {
    const int64_t S = p.M + p.L, tiles = div_up(S, BLOCK_S), BH = max_of(p.B * p.H, 1);
    chunks = clamp(div_up(BACKWARD_ITEMS, BH), 1, clamp(tiles, 1, MAX_CHUNKS));
    chunk = max_of(div_up(tiles, chunks), 1) * BLOCK_S;
    chunks = div_up(S, chunk);
    rows = round_up(p.L, MR);
    rhos = (p.ahead ? chunk + p.L : min_of(chunk + p.L, S)) + 2 * BLOCK_L + 2 * MR;  // blocks stand out at both ends
  }
  int64_t first_rho(const Problem& p, int64_t c) const { return rho_of(p, p.L - 1 + BLOCK_L - 1, c * chunk); }
  int64_t dr() const { return rows * Dp; }
  int64_t biases() const { return (rows + rhos) * Dp; }
  int64_t entry() const { return (rows + rhos + 2) * Dp; }
};

// One thread's working memory.
struct BackwardScratch {
  float *k_panels, *k_rows, *v_panels, *dk, *dv, *qu, *qw, *dout, *content, *position, *dp, *p, *skew, *factor, *step;
  Table table;

  BackwardScratch(Arena& a, int64_t D, int64_t Dp)
      : k_panels(a.take(BLOCK_S * D)),
        k_rows(a.take(BLOCK_S * Dp)),
        v_panels(a.take(BLOCK_S * D)),
        dk(a.take(BLOCK_S * Dp)),
        dv(a.take(BLOCK_S * Dp)),
        qu(a.take(BLOCK_L * Dp)),
        qw(a.take(BLOCK_L * Dp)),
        dout(a.take(BLOCK_L * Dp)),
        content(a.take(MR * BLOCK_S)),
        position(a.take(MR * POSITION_LD)),
        dp(a.take(MR * BLOCK_S)),
        p(a.take(BLOCK_L * BLOCK_S)),
        skew(a.take(BLOCK_L * SKEW_LD)),
        factor(a.take(BLOCK_L * BLOCK_S)),
        step(a.take(MR * Dp)),
        table(a, Table::room(BLOCK_S + BLOCK_L), D, Dp) {}
};

// One row over [from, to) of a tile: p (with dropout, into `p`) and dS (into `ds`); both zero
// outside [low, high).
static void gradient_row(const float* score, const float* position, const float* dp, const float* factor, float lse,
                         float delta, int64_t low, int64_t high, int64_t from, int64_t to, float* p, float* ds) {
  const bool whole = low == from && high == to;
  for (int64_t n = from; n < to; n += LANES) {
    const vf below = load(score + n) + load(position + n) - splat(lse);  // the largest score: NaN stays
    vf e = exp_of(below > 0 ? vf{} : below);  // a weight is at most 1, however huge scores were rounded
    vf gradient = load(dp + n), kept = e;
    if (factor) gradient *= load(factor + n), kept *= load(factor + n);
    gradient = e * (gradient - splat(delta));
    if (!whole) {  // a hidden pair may hold anything
      const vi seen = lanes_within(n, low, high);
      kept = seen ? kept : vf{};
      gradient = seen ? gradient : vf{};
    }
    store(p + n, kept);
    store(ds + n, gradient);
  }
}

// c[MR][width] += a[MR][n] . b[n][width], and the sum over the MR rows of what was added, to `sum`.
static void add_and_sum(const float* a, int64_t lda, const float* b, int64_t n, int64_t width, float* step, float* c,
                        float* sum) {
  memset(step, 0, sizeof(float) * MR * width);
  add_times_rows(a, lda, b, n, width, step);
  for (int64_t d = 0; d < width; d += LANES) {
    vf total = load(sum + d);
    TXL_UNROLL(6)
    for (int x = 0; x < MR; ++x) {
      const vf added = load(step + x * width + d);
      store(c + x * width + d, load(c + x * width + d) + added);
      total += added;
    }
    store(sum + d, total);
  }
}

// What keys [from, to) of a tile get from a block whose p and skew are complete in `rows` rows. dr:
// of skew's column 0.
static void add_key_gradients(const BackwardScratch& s, int64_t Dp, int64_t rows, int64_t from, int64_t to, float* dr) {
  // MR divides BLOCK_S, so groups of MR stay inside the tile.
  for (int64_t n = from / MR * MR; n < to; n += MR) {
    add_transposed_times_rows(s.p + n, BLOCK_S, s.dout, rows, Dp, s.dv + n * Dp);
    add_transposed_times_rows(s.skew + BLOCK_L - 1 + n, SKEW_LD - 1, s.qu, rows, Dp, s.dk + n * Dp);
  }
  for (int64_t c = from / MR * MR; c < to + BLOCK_L - 1; c += MR) {
    const int64_t first = max_of(0, BLOCK_L - 1 - (c + MR - 1) + from);  // rows with a column of this group
    const int64_t last = min_of(rows, BLOCK_L - 1 - c + to);
    if (first < last)
      add_transposed_times_rows(s.skew + first * SKEW_LD + c, SKEW_LD, s.qw + first * Dp, last - first, Dp,
                                dr + c * Dp);
  }
}

// A block of queries from i0 on against the tile of keys at j0. item: what the item adds up.
template <class T>
static void backward_block(const Problem& p, const Gradients& g, const BackwardPlan& z, const InUse& in_use,
                           const float* delta, int64_t bh, int64_t chunk, int64_t j0,
                           const BlockRanges<BLOCK_L>& ranges, int64_t i0, BackwardScratch& s, float* item) {
  const int64_t b = bh / p.H, h = bh % p.H, D = p.D, Dp = z.Dp, rows = round_up(min_of(BLOCK_L, p.L - i0), MR);
  const Range block = within(ranges.all, j0);
  auto sees = [&](int64_t i) { return ranges.row[i].any(); };
  pack_queries<T>(p, b, h, i0, rows, sees, Dp, s.qu, s.qw);
  for (int64_t i = 0; i < rows; ++i)
    pack_row<T>(sees(i) ? row_of<T>(g.dout, b, h, i0 + i) : nullptr, D, Dp, s.dout + i * Dp);
  const int64_t rho0 = rho_of(p, i0 + BLOCK_L - 1, j0);  // of column 0 of the skewed tile
  s.table.template cover<T>(p, in_use, h, rho0, rho_of(p, i0, j0 + BLOCK_S), Dp);
  if (p.drop_below) dropout_factors(p, ranges.row, rows, bh, i0, j0, s.factor);
  auto clear = [&](int64_t i, int64_t from, int64_t to) {  // of row i in p and skew: what is not seen must read as zero
    memset(s.p + i * BLOCK_S + from, 0, sizeof(float) * (to - from));
    memset(s.skew + i * SKEW_LD + BLOCK_L - 1 - i + from, 0, sizeof(float) * (to - from));
  };
  float *dq = item + i0 * Dp, *du = item + z.biases(), *dw = du + Dp;

  for (int64_t i = 0; i < rows; i += MR) {
    const Range seen = within(ranges.strip[i / MR], j0);
    if (!seen.any()) {
      for (int64_t x = i; x < i + MR; ++x) clear(x, 0, BLOCK_S);
      continue;
    }
    const int64_t from = seen.low / NR * NR, to = round_up(seen.high, LANES);
    const int64_t offset = strip_scores(p, Dp, s.qu + i * Dp, s.qw + i * Dp, i0 + i, j0, from, to, s.k_panels, s.table,
                                        s.content, s.position);
    times_panels(s.dout + i * Dp, Dp, s.v_panels + from * D, D, div_up(to - from, NR), s.dp + from, BLOCK_S);
    for (int64_t x = 0; x < MR; ++x) {
      const Range own = within(ranges.row[i + x], j0);
      clear(i + x, 0, from);
      clear(i + x, to, BLOCK_S);
      if (!own.any()) {
        clear(i + x, from, to);
        continue;
      }
      const int64_t row = bh * p.L + i0 + i + x;
      gradient_row(s.content + x * BLOCK_S, s.position + x * POSITION_LD + offset - x, s.dp + x * BLOCK_S,
                   p.drop_below ? s.factor + (i + x) * BLOCK_S : nullptr, p.lse[row], delta[row], own.low, own.high,
                   from, to, s.p + (i + x) * BLOCK_S, s.skew + (i + x) * SKEW_LD + BLOCK_L - 1 - (i + x));
    }
    const int64_t column = BLOCK_L - 1 - (i + MR - 1) + from;
    add_and_sum(s.skew + BLOCK_L - 1 + i * (SKEW_LD - 1) + from, SKEW_LD - 1, s.k_rows + from * Dp, to - from, Dp,
                s.step, dq + i * Dp, du);
    add_and_sum(s.skew + i * SKEW_LD + column, SKEW_LD, s.table.rows + (rho0 + column - s.table.first) * Dp,
                to - from + MR - 1, Dp, s.step, dq + i * Dp, dw);
  }
  add_key_gradients(s, Dp, rows, block.low, block.high, item + z.dr() + (rho0 - z.first_rho(p, chunk)) * Dp);
}

// Whether some block sees a key of [low, high).
static bool sees_any(const Range* hulls, int64_t blocks, int64_t low, int64_t high) {
  for (int64_t x = 0; x < blocks; ++x)
    if (max_of(hulls[x].low, low) < min_of(hulls[x].high, high)) return true;
  return false;
}

// dk and dv of the keys of a chunk, and the item's partial sums of dq, dr, du and dw. hulls: the
// keys each block sees.
template <class T>
static void backward_chunk(const Problem& p, const Gradients& g, const BackwardPlan& z, const InUse& in_use,
                           const Range* hulls, bool live, const float* delta, int64_t bh, int64_t chunk,
                           BackwardScratch& s, float* item) {
  const int64_t b = bh / p.H, h = bh % p.H, D = p.D, Dp = z.Dp, S = p.M + p.L, blocks = div_up(p.L, BLOCK_L);
  const Range* const seen = hulls + b * blocks;
  if (live) memset(item, 0, sizeof(float) * z.entry());
  memset(s.skew, 0, sizeof(float) * BLOCK_L * SKEW_LD);
  for (int64_t j0 = chunk * z.chunk; j0 < min_of((chunk + 1) * z.chunk, S); j0 += BLOCK_S) {
    const int64_t keys = min_of(BLOCK_S, S - j0), packed = round_up(keys, NR);
    memset(s.dk, 0, sizeof(float) * BLOCK_S * Dp);
    memset(s.dv, 0, sizeof(float) * BLOCK_S * Dp);
    const bool met = sees_any(seen, blocks, j0, j0 + keys);
    if (met) {
      pack_keys<T>(p, in_use, p.k_mem, p.k, b, h, j0, packed, Dp, s.k_panels, s.k_rows);
      pack_keys<T>(p, in_use, p.v_mem, p.v, b, h, j0, packed, Dp, s.v_panels, nullptr);
    }
    s.table.first = s.table.end = 0;
    for (int64_t block = met ? blocks - 1 : -1; block >= 0; --block) {  // downwards: so the table moves upwards
      if (!within(seen[block], j0).any()) continue;
      const int64_t i0 = block * BLOCK_L;
      const BlockRanges<BLOCK_L> ranges(p, b, i0, min_of(BLOCK_L, p.L - i0), {j0, j0 + BLOCK_S});
      if (ranges.all.any()) backward_block<T>(p, g, z, in_use, delta, bh, chunk, j0, ranges, i0, s, item);
    }
    for (int64_t n = 0; n < keys; ++n) {
      write_row(const_cast<T*>(key_row<T>(p, g.dk_mem, g.dk, b, h, j0 + n)), s.dk + n * Dp, 1.f, D);
      write_row(const_cast<T*>(key_row<T>(p, g.dv_mem, g.dv, b, h, j0 + n)), s.dv + n * Dp, 1.f, D);
    }
  }
}
