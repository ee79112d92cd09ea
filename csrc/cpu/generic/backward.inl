// Backward: scores are recomputed from lse, and each tile's recomputation serves dq, dk, dv and dr
// at once: 8 products of width D a visible pair, none wasted. An item is one (b, h) and one chunk
// of its keys; it finishes dk and dv of its keys, tile by tile, while its dq and dr are partial
// sums, added up afterwards in a fixed order. How many chunks is a function of shapes, so threads
// change no bit.

constexpr int64_t BACKWARD_ITEMS = 32;  // chunks of keys are made until there are as many items
constexpr int64_t MAX_CHUNKS = 16;      // each has a dq of its own
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
    rhos = p.ahead ? chunk + p.L : min_of(chunk + p.L, S);
    rhos = round_up(rhos + 2 * BLOCK_L + 3 * NR, NR);  // blocks stand out at both ends
  }
  int64_t first_rho(const Problem& p, int64_t c) const {
    return rho_of(p, p.L - 1 + BLOCK_L - 1, c * chunk) / NR * NR;
  }
  int64_t dr() const { return rows * Dp; }
  int64_t biases() const { return (rows + rhos) * Dp; }
  int64_t entry() const { return (rows + rhos + 2) * Dp; }
};

// One thread's working memory.
struct BackwardScratch {
  Cell *k_panels, *k_rows, *v_panels, *qu, *qw, *dout;
  float *content, *position, *dp, *factor, *step;
  Weights weights;
  KeyGradients keys;
  Table table;

  BackwardScratch(Arena& a, int64_t D, const BackwardPlan& z)
      : k_panels(a.take<Cell>(BLOCK_S * deep(D))),
        k_rows(a.take<Cell>(BLOCK_S * z.Dp)),
        v_panels(a.take<Cell>(BLOCK_S * deep(D))),
        qu(a.take<Cell>(BLOCK_L * z.Dp)),
        qw(a.take<Cell>(BLOCK_L * z.Dp)),
        dout(a.take<Cell>(BLOCK_L * z.Dp)),
        content(a.take(MR * BLOCK_S)),
        position(a.take(MR * POSITION_LD)),
        dp(a.take(MR * BLOCK_S)),
        factor(a.take(BLOCK_L * BLOCK_S)),
        step(a.take(MR * z.Dp)),
        weights(a),
        keys(a, z.Dp, z.rhos),
        table(a, Table::room(BLOCK_S + BLOCK_L), D, z.Dp) {}
};

// One row over [from, to) of a tile: p (with dropout) and dS, both zero outside [low, high). WHOLE:
// low is from and high is to.
template <bool WHOLE, bool DROP>
static void gradient_row(const float* score, const float* position, const float* dp, const float* factor, float lse,
                         float delta, int64_t low, int64_t high, int64_t from, int64_t to, const WeightRow& row) {
  for (int64_t n = from; n < to; n += WEIGHTS) {
    vf kept[WEIGHTS / LANES], gradient[WEIGHTS / LANES];
    TXL_UNROLL(2)
    for (int z = 0; z < WEIGHTS / LANES; ++z) {
      const int64_t at = n + z * LANES;
      const vf below = load(score + at) + load(position + at) - splat(lse);  // the largest score: NaN stays
      const vf e = weight_of(below > 0 ? vf{} : below);  // at most 1, however huge scores were rounded
      vf dropped = load(dp + at);
      kept[z] = e;
      if (DROP) dropped *= load(factor + at), kept[z] *= load(factor + at);
      gradient[z] = e * (dropped - splat(delta));
      if (!WHOLE) {  // a hidden pair may hold anything
        const vi seen = lanes_within(at, low, high);
        kept[z] = seen ? kept[z] : vf{};
        gradient[z] = seen ? gradient[z] : vf{};
      }
    }
    row.put(n, kept, gradient);
  }
}

// c[MR][width] += a[MR][n] . b[n][width], and the sum over the MR rows of what was added, to `sum`.
static void add_and_sum(const Cell* a, int64_t lda, const Cell* b, int64_t n, int64_t width, float* step, float* c,
                        float* sum) {
  memset(step, 0, sizeof(float) * MR * width);
  add_times_rows(a, lda, b, n, width, step);
  for (int64_t d = 0; d < width; d += LANES) {
    vf total = load(sum + d);
    TXL_UNROLL(8)
    for (int x = 0; x < MR; ++x) {
      const vf added = load(step + x * width + d);
      store(c + x * width + d, load(c + x * width + d) + added);
      total += added;
    }
    store(sum + d, total);
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
  const int64_t rho0 = rho_of(p, i0 + BLOCK_L - 1, j0);  // of column 0 of the skewed tile, a multiple of NR
  s.table.template cover<T>(p, in_use, h, rho0, rho_of(p, i0, j0 + BLOCK_S), Dp);
  if (p.drop_below) dropout_factors(p, ranges.row, rows, bh, i0, j0, s.factor);
  float *dq = item + i0 * Dp, *du = item + z.biases(), *dw = du + Dp;

  for (int64_t i = 0; i < rows; i += MR) {
    const Range seen = within(ranges.strip[i / MR], j0);
    if (!seen.any()) {
      for (int64_t x = i; x < i + MR; ++x) s.weights.clear(x, 0, BLOCK_S);
      continue;
    }
    const int64_t from = seen.low / NR * NR, to = round_up(seen.high, STEP);
    const int64_t offset = strip_scores(p, Dp, s.qu + i * Dp, s.qw + i * Dp, i0 + i, j0, from, to, s.k_panels, s.table,
                                        s.content, s.position);
    times_panels(s.dout + i * Dp, Dp, s.v_panels + from * deep(D), deep(D), div_up(to - from, NR), s.dp + from, BLOCK_S);
    for (int64_t x = 0; x < MR; ++x) {
      const Range own = within(ranges.row[i + x], j0);
      s.weights.clear(i + x, 0, from);
      s.weights.clear(i + x, to, BLOCK_S);
      if (!own.any()) {
        s.weights.clear(i + x, from, to);
        continue;
      }
      const int64_t row = bh * p.L + i0 + i + x;
      const bool whole = own.low == from && own.high == to;
      auto* const gradient = p.drop_below ? whole ? gradient_row<true, true> : gradient_row<false, true>
                                          : whole ? gradient_row<true, false> : gradient_row<false, false>;
      gradient(s.content + x * BLOCK_S, s.position + x * POSITION_LD + offset - x, s.dp + x * BLOCK_S,
               s.factor + (i + x) * BLOCK_S, p.lse[row], delta[row], own.low, own.high, from, to,
               s.weights.row(i + x));
    }
    const int64_t first = BLOCK_L - MR - i + from, column = first / DEPTH * DEPTH;  // of the strip's rho
    add_and_sum(s.weights.by_key(i) + from, Weights::KEY_LD, s.k_rows + from * Dp, to - from, Dp, s.step, dq + i * Dp,
                du);
    add_and_sum(s.weights.skew + i * SKEW_LD + column, SKEW_LD, s.table.rows + (rho0 + column - s.table.first) * Dp,
                round_up(first + MR - 1 + to - from, DEPTH) - column, Dp, s.step, dq + i * Dp, dw);
  }
  s.keys.add(s.weights, s.qu, s.qw, s.dout, rows, block.low, block.high, item + z.dr(),
             rho0 - z.first_rho(p, chunk));
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
  s.weights.start();
  if (live) s.keys.start_item();
  for (int64_t j0 = chunk * z.chunk; j0 < min_of((chunk + 1) * z.chunk, S); j0 += BLOCK_S) {
    const int64_t keys = min_of(BLOCK_S, S - j0), packed = round_up(keys, NR);
    s.keys.start_tile();
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
    s.keys.finish_tile();
    for (int64_t n = 0; n < keys; ++n) {
      write_row(const_cast<T*>(key_row<T>(p, g.dk_mem, g.dk, b, h, j0 + n)), s.keys.dk + n * Dp, 1.f, D);
      write_row(const_cast<T*>(key_row<T>(p, g.dv_mem, g.dv, b, h, j0 + n)), s.keys.dv + n * Dp, 1.f, D);
    }
  }
  if (live) s.keys.finish_item(item + z.dr());
}
