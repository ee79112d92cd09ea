// Backward by tiles: scores are recomputed from lse, and each tile's recomputation serves dq, dk, dv and
// dr at once: 8 products of width D a visible pair, none wasted.

// One thread's working memory.
struct BackwardScratch {
  Cell *k_panels, *k_rows, *v_panels, *qu, *qw, *dout;
  float *content, *position, *dp, *factor, *step, *dq;
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
        dq(z.chunks == 1 ? a.take(z.dq_floats()) : nullptr),
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

// A block of queries from i0 on against the tile of keys at j0.
template <class T>
static void backward_block(const Problem& p, const Gradients& g, const BackwardPlan& z, const InUse& in_use,
                           const float* delta, const Part& at, int64_t j0, const BlockRanges<BLOCK_L>& ranges,
                           int64_t i0, BackwardScratch& s, const Sums& sums) {
  const int64_t b = at.b, h = at.h, D = p.D, Dp = z.Dp, rows = round_up(min_of(BLOCK_L, p.L - i0), MR);
  const Range block = within(ranges.all, j0);
  const int64_t end = s.weights.reach(block.high);
  auto sees = [&](int64_t i) { return ranges.row[i].any(); };
  pack_queries<T>(p, b, h, i0, rows, sees, Dp, s.qu, s.qw);
  for (int64_t i = 0; i < rows; ++i)
    pack_row<T>(sees(i) ? row_of<T>(g.dout, b, h, i0 + i) : nullptr, D, Dp, s.dout + i * Dp);
  const int64_t rho0 = rho_of(p, i0 + BLOCK_L - 1, j0);  // of column 0 of the skewed tile, a multiple of NR
  s.table.template cover<T>(p, in_use, h, rho0, rho_of(p, i0, j0 + BLOCK_S), Dp);
  if (p.drop_below) dropout_factors(p, ranges.row, rows, at.bh(p), i0, j0, s.factor);

  for (int64_t i = 0; i < rows; i += MR) {
    const Range seen = within(ranges.strip[i / MR], j0);
    if (!seen.any()) {
      for (int64_t x = i; x < i + MR; ++x) s.weights.clear(x, 0, end);
      continue;
    }
    const int64_t from = seen.low / NR * NR, to = round_up(seen.high, STEP);
    const int64_t offset = strip_scores(p, Dp, s.qu + i * Dp, s.qw + i * Dp, i0 + i, j0, from, to, s.k_panels, s.table,
                                        s.content, s.position);
    times_panels(s.dout + i * Dp, Dp, s.v_panels + from * deep(D), deep(D), div_up(to - from, NR), s.dp + from,
                 BLOCK_S);
    for (int64_t x = 0; x < MR; ++x) {
      const Range own = within(ranges.row[i + x], j0);
      s.weights.clear(i + x, 0, from);
      s.weights.clear(i + x, to, end);
      if (!own.any()) {
        s.weights.clear(i + x, from, to);
        continue;
      }
      const int64_t row = at.bh(p) * p.L + i0 + i + x;
      const bool whole = own.low == from && own.high == to;
      auto* const gradient = p.drop_below ? whole ? gradient_row<true, true> : gradient_row<false, true>
                             : whole      ? gradient_row<true, false>
                                          : gradient_row<false, false>;
      gradient(s.content + x * BLOCK_S, s.position + x * POSITION_LD + offset - x, s.dp + x * BLOCK_S,
               s.factor + (i + x) * BLOCK_S, p.lse[row], delta[row], own.low, own.high, from, to, s.weights.row(i + x));
    }
    const int64_t first = BLOCK_L - MR - i + from, column = first / DEPTH * DEPTH;  // of the strip's rho
    float* dq = sums.dq + (i0 + i) * Dp;
    if (z.content)
      add_and_sum(s.weights.by_key(i) + from, Weights::KEY_LD, s.k_rows + from * Dp, to - from, Dp, s.step, dq,
                  sums.du);
    if (z.position)
      add_and_sum(s.weights.skew + i * SKEW_LD + column, SKEW_LD, s.table.rows + (rho0 + column - s.table.first) * Dp,
                  round_up(first + MR - 1 + to - from, DEPTH) - column, Dp, s.step, dq, sums.dw);
  }
  s.keys.add(s.weights, s.qu, s.qw, s.dout, rows, block.low, block.high, z.dr ? sums.dr : nullptr,
             rho0 - z.first_rho(p, at.low));
}

// Whether some block sees a key of [low, high).
static bool sees_any(const Range* hulls, int64_t blocks, int64_t low, int64_t high) {
  for (int64_t x = 0; x < blocks; ++x)
    if (max_of(hulls[x].low, low) < min_of(hulls[x].high, high)) return true;
  return false;
}

// dk and dv of a chunk's keys, and what its batch row adds to the sums. hulls: the keys each block of the
// batch row sees.
template <class T>
static void backward_part(const Problem& p, const Gradients& g, const BackwardPlan& z, const InUse& in_use,
                          const Range* hulls, const float* delta, const Part& at, BackwardScratch& s,
                          const Sums& sums) {
  const int64_t D = p.D, Dp = z.Dp, blocks = div_up(p.L, BLOCK_L);
  for (int64_t j0 = at.low; j0 < at.high; j0 += BLOCK_S) {
    const int64_t keys = min_of(BLOCK_S, at.high - j0), packed = round_up(keys, NR);
    const bool met = sees_any(hulls, blocks, j0, j0 + keys);
    const bool dk = wants_keys(p, g.dk_mem, g.dk, j0, j0 + keys), dv = wants_keys(p, g.dv_mem, g.dv, j0, j0 + keys);
    s.keys.start_tile(met && dk, met && dv, packed);
    if (met) {
      pack_keys<T>(p, in_use, p.k_mem, p.k, at.b, at.h, j0, packed, Dp, s.k_panels, s.k_rows);
      pack_keys<T>(p, in_use, p.v_mem, p.v, at.b, at.h, j0, packed, Dp, s.v_panels, nullptr);
    }
    for (int64_t block = met ? blocks - 1 : -1; block >= 0; --block) {  // downwards: so the table moves upwards
      if (!within(hulls[block], j0).any()) continue;
      const int64_t i0 = block * BLOCK_L;
      const BlockRanges<BLOCK_L> ranges(p, at.b, i0, min_of(BLOCK_L, p.L - i0), {j0, j0 + BLOCK_S});
      if (ranges.all.any()) backward_block<T>(p, g, z, in_use, delta, at, j0, ranges, i0, s, sums);
    }
    s.keys.finish_tile(packed);
    for (int64_t n = 0; n < keys; ++n) {
      T* const dk_row = key_gradient<T>(p, g.dk_mem, g.dk, at, j0 + n);
      T* const dv_row = key_gradient<T>(p, g.dv_mem, g.dv, at, j0 + n);
      if (dk_row) met ? write_row(dk_row, s.keys.dk + n * Dp, 1.f, D) : clear_row(dk_row, D);
      if (dv_row) met ? write_row(dv_row, s.keys.dv + n * Dp, 1.f, D) : clear_row(dv_row, D);
    }
  }
}
