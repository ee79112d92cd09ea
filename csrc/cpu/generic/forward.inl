// Forward: a block of queries walks the tiles of keys it can see with an online softmax (Milakov and Gimelshein 2018).

// score -> exp(score - maximum) in place for one row over [low, high) of a tile; zeros elsewhere in [from, to), which
// are multiples of LANES. Returns the sum; raises the running maximum and tells the factor for what came before.
static float softmax_row(float* score, const float* position, int64_t low, int64_t high, int64_t from, int64_t to,
                         float& maximum, float& rescale) {
  vf top = splat(-INF);
  const bool whole = low == from && high == to;
  for (int64_t n = from; n < to; n += LANES) {
    vf x = load(score + n) + load(position + n);
    if (!whole) x = lanes_within(n, low, high) ? x : splat(-INF);
    store(score + n, x);
    top = max_of(x, top);
  }
  const float tile_max = max_lane(top);
  const float raised = tile_max > maximum ? tile_max : maximum;
  rescale = exp_of(maximum - raised);
  maximum = raised;
  vf sum = {};
  const vf shift = splat(raised);
  for (int64_t n = from; n < to; n += LANES) {
    const vf e = exp_of(load(score + n) - shift);
    store(score + n, e);
    sum += e;
  }
  return sum_lanes(sum);
}

// One thread's working memory.
struct ForwardScratch {
  float *qu, *qw, *out, *content, *position, *factor;
  Carry* carry;

  static int64_t floats(int64_t Dp) {
    return round_up(3 * BLOCK_L * Dp + MR * (BLOCK_S + POSITION_LD) + BLOCK_L * BLOCK_S + CARRY_FLOATS, 16);
  }
  ForwardScratch(float* at, int64_t Dp)
      : qu(at),
        qw(qu + BLOCK_L * Dp),
        out(qw + BLOCK_L * Dp),
        content(out + BLOCK_L * Dp),
        position(content + MR * BLOCK_S),
        factor(position + MR * POSITION_LD),
        carry(reinterpret_cast<Carry*>(factor + BLOCK_L * BLOCK_S)) {}
};

template <class T>
static void forward_block(const Problem& p, const Sizes& z, const Packed& packed, int64_t bh, int64_t i0,
                          float* scratch) {
  const int64_t b = bh / p.H, h = bh % p.H, D = p.D, Dp = z.Dp, rows = min_of(BLOCK_L, p.L - i0);
  ForwardScratch s(scratch, Dp);
  pack_queries<T>(p, b, h, i0, Dp, s.qu, s.qw);
  const BlockRanges ranges(p, b, i0);
  float maximum[BLOCK_L], total[BLOCK_L];
  for (int64_t i = 0; i < BLOCK_L; ++i) maximum[i] = -INF, total[i] = 0;
  for (int64_t x = 0; x < BLOCK_L / MR; ++x) s.carry[x].next_tile = -1;
  memset(s.out, 0, sizeof(float) * BLOCK_L * Dp);

  for (int64_t j0 = ranges.all.low / BLOCK_S * BLOCK_S; j0 < ranges.all.high; j0 += BLOCK_S) {
    const float* k_panels = packed.k_panels + (bh * z.keys + j0) * D;
    const float* v_rows = packed.v_rows + (bh * z.keys + j0) * Dp;
    if (p.drop_below) dropout_factors(p, ranges, bh, i0, j0, s.factor);
    for (int64_t i = 0; i < rows; i += MR) {
      const Range seen = within(ranges.strip[i / MR], j0);
      if (!seen.any()) continue;
      const int64_t from = seen.low / LANES * LANES, to = round_up(seen.high, LANES);
      const int64_t shift = strip_scores(p, Dp, s.qu + i * Dp, s.qw + i * Dp, i0 + i, j0, to, k_panels,
                                         packed.r_panels + h * z.rhos * D, s.carry[i / MR], s.content, s.position);
      for (int64_t x = 0; x < MR; ++x) {
        float* row = s.content + x * BLOCK_S;
        const Range own = within(ranges.row[i + x], j0);
        if (!own.any()) {
          memset(row + from, 0, sizeof(float) * (to - from));
          continue;
        }
        float rescale;
        const float sum = softmax_row(row, s.position + x * POSITION_LD + shift + MR - 1 - x, own.low, own.high, from,
                                      to, maximum[i + x], rescale);
        total[i + x] = total[i + x] * rescale + sum;
        if (rescale != 1.f)
          for (int64_t d = 0; d < Dp; d += LANES)
            store(s.out + (i + x) * Dp + d, load(s.out + (i + x) * Dp + d) * rescale);
        if (p.drop_below)
          for (int64_t n = own.low; n < own.high; ++n) row[n] *= s.factor[(i + x) * BLOCK_S + n];
      }
      add_times_rows(s.content + from, BLOCK_S, v_rows + from * Dp, to - from, Dp, s.out + i * Dp);
    }
  }

  for (int64_t i = 0; i < rows; ++i) {
    const bool empty = !ranges.row[i].any();
    T* out = const_cast<T*>(row_of<T>(p.out, b, h, i0 + i));
    for (int64_t d = 0; d < D; ++d) put(out + d, empty ? 0.f : s.out[i * Dp + d] / total[i]);
    p.lse[bh * p.L + i0 + i] = empty ? -INF : maximum[i] + log_of(total[i]);
  }
}

template <class T>
static void run_forward(const Problem& p) {
  if (decode_fits(p)) return run_decode<T>(p);
  const Sizes z(p);
  const int64_t BH = p.B * p.H, blocks = div_up(p.L, BLOCK_L), per_thread = ForwardScratch::floats(z.Dp);
  Buffer k(BH * z.keys * p.D), v(BH * z.keys * z.Dp), r(p.H * z.rhos * p.D), scratch(p.threads * per_thread);
  Packed packed;
  packed.k_panels = k.data, packed.v_rows = v.data, packed.r_panels = r.data;
  pack_all<T>(p, z, packed);
  parallel_for(p.threads, BH * blocks, [&](int64_t item, int thread) {
    // Longest first: a causal block late in the segment sees the most keys.
    const int64_t block = blocks - 1 - item / BH;
    forward_block<T>(p, z, packed, item % BH, block * BLOCK_L, scratch.data + thread * per_thread);
  });
}
