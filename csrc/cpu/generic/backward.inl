// Backward: scores are recomputed from lse, and each tile's recomputation serves dq, dk, dv and dr at once: 8 products
// of width D a visible pair, none wasted. An item is one (b, h) and one chunk of its queries; its dk, dv and dr are its
// own and are added up afterwards in a fixed order, so the same bits come out at any thread count.

constexpr int64_t CHUNK_ITEMS = 16;  // chunks are made until there are this many items; a function of shapes alone

// dS of a block is kept skewed: row i of the block starts at column BLOCK_L - 1 - i, so a column is one rho, and with
// a row stride one shorter the same memory reads as [query][key]. The margins are zero and stay so.
constexpr int64_t SKEW_LD = BLOCK_S + BLOCK_L;

struct BackwardScratch {
  float *qu, *qw, *dout, *dq, *position, *content, *dp, *p, *skew, *factor;
  Carry* carry;

  static int64_t floats(int64_t Dp) {
    return round_up((3 * BLOCK_L + 2 * BLOCK_L) * Dp + MR * (POSITION_LD + 2 * BLOCK_S) +
                        BLOCK_L * (2 * BLOCK_S + SKEW_LD) + CARRY_FLOATS,
                    16);
  }
  BackwardScratch(float* at, int64_t Dp)
      : qu(at),
        qw(qu + BLOCK_L * Dp),
        dout(qw + BLOCK_L * Dp),
        dq(dout + BLOCK_L * Dp),  // [2][BLOCK_L][Dp]: through content, through position
        position(dq + 2 * BLOCK_L * Dp),
        content(position + MR * POSITION_LD),
        dp(content + MR * BLOCK_S),
        p(dp + MR * BLOCK_S),
        skew(p + BLOCK_L * BLOCK_S),
        factor(skew + BLOCK_L * SKEW_LD),
        carry(reinterpret_cast<Carry*>(factor + BLOCK_L * BLOCK_S)) {}
};

// What an item adds up: dk, dv [keys][Dp], dr [rhos][Dp], du, dw [Dp].
struct Sums {
  float *dk, *dv, *dr, *du, *dw;
  static int64_t floats(const Sizes& z) { return (2 * z.keys + z.rhos + 2) * z.Dp; }
  Sums(float* at, const Sizes& z)
      : dk(at), dv(dk + z.keys * z.Dp), dr(dv + z.keys * z.Dp), du(dr + z.rhos * z.Dp), dw(du + z.Dp) {}
};

// One row over [from, to) of a tile: p (with dropout, into `p`) and dS (into `ds`); both zero outside [low, high).
static void gradient_row(const float* score, const float* position, const float* dp, const float* factor, float lse,
                         float delta, int64_t low, int64_t high, int64_t from, int64_t to, float* p, float* ds) {
  for (int64_t n = from; n < to; n += LANES) {
    vf e = exp_of(load(score + n) + load(position + n) - splat(lse));
    const vi seen = lanes_within(n, low, high);
    vf gradient = load(dp + n), kept = e;
    if (factor) gradient *= load(factor + n), kept *= load(factor + n);
    gradient = e * (gradient - splat(delta));
    // A hidden pair may hold anything.
    store(p + n, seen ? kept : vf{});
    store(ds + n, seen ? gradient : vf{});
  }
}

// What keys [from, to) of the tile at j0 get from a block whose p and skew are complete. rho0: of skew's column 0.
static void add_key_gradients(const BackwardScratch& s, int64_t Dp, int64_t j0, int64_t rho0, int64_t from, int64_t to,
                              const Sums& sums) {
  // MR divides BLOCK_S, so groups of MR stay inside the tile.
  for (int64_t n = from / MR * MR; n < to; n += MR) {
    add_transposed_times_rows(s.p + n, BLOCK_S, s.dout, BLOCK_L, Dp, sums.dv + (j0 + n) * Dp);
    add_transposed_times_rows(s.skew + BLOCK_L - 1 + n, SKEW_LD - 1, s.qu, BLOCK_L, Dp, sums.dk + (j0 + n) * Dp);
  }
  for (int64_t c = from / MR * MR; c < to + BLOCK_L - 1; c += MR) {
    const int64_t first = max_of(0, BLOCK_L - 1 - (c + MR - 1) + from);  // rows with a column of this group
    const int64_t last = min_of(BLOCK_L, BLOCK_L - 1 - c + to);
    if (first < last)
      add_transposed_times_rows(s.skew + first * SKEW_LD + c, SKEW_LD, s.qw + first * Dp, last - first, Dp,
                                sums.dr + (rho0 + c) * Dp);
  }
}

template <class T>
static void backward_block(const Problem& p, const Gradients& g, const Sizes& z, const Packed& packed, int64_t bh,
                           int64_t i0, float* scratch, const Sums& sums) {
  const int64_t b = bh / p.H, h = bh % p.H, D = p.D, Dp = z.Dp, rows = min_of(BLOCK_L, p.L - i0);
  BackwardScratch s(scratch, Dp);
  const BlockRanges ranges(p, b, i0);
  pack_queries<T>(p, b, h, i0, Dp, s.qu, s.qw);
  float delta[BLOCK_L] = {};
  for (int64_t i = 0; i < BLOCK_L; ++i) {
    const bool live = i < rows && ranges.row[i].any();
    pack_row<T>(live ? row_of<T>(g.dout, b, h, i0 + i) : nullptr, D, Dp, s.dout + i * Dp);
    if (!live) continue;
    const T* out = row_of<T>(p.out, b, h, i0 + i);
    for (int64_t d = 0; d < D; ++d) delta[i] += s.dout[i * Dp + d] * to_float(out[d]);
    if (g.dlse) delta[i] -= g.dlse[bh * p.L + i0 + i];
  }
  memset(s.dq, 0, sizeof(float) * 2 * BLOCK_L * Dp);
  memset(s.skew, 0, sizeof(float) * BLOCK_L * SKEW_LD);
  for (int64_t x = 0; x < BLOCK_L / MR; ++x) s.carry[x].next_tile = -1;
  float *dq_content = s.dq, *dq_position = s.dq + BLOCK_L * Dp;
  auto clear = [&](int64_t i, int64_t from, int64_t to) {  // of row i in p and skew: what is not seen must read as zero
    memset(s.p + i * BLOCK_S + from, 0, sizeof(float) * (to - from));
    memset(s.skew + i * SKEW_LD + BLOCK_L - 1 - i + from, 0, sizeof(float) * (to - from));
  };
  const float *r_panels = packed.r_panels + h * z.rhos * D, *r_rows = packed.r_rows + h * z.rhos * Dp;

  for (int64_t j0 = ranges.all.low / BLOCK_S * BLOCK_S; j0 < ranges.all.high; j0 += BLOCK_S) {
    const int64_t key = bh * z.keys + j0;
    const Range block = within(ranges.all, j0);
    const int64_t block_from = block.low / LANES * LANES, block_to = round_up(block.high, LANES);
    const int64_t rho0 = p.L - 1 - (i0 + BLOCK_L - 1) + j0 + RHO_FRONT;  // of column 0 of the skewed tile
    if (p.drop_below) dropout_factors(p, ranges, bh, i0, j0, s.factor);
    for (int64_t i = 0; i < BLOCK_L; i += MR) {
      const Range seen = within(ranges.strip[i / MR], j0);
      if (!seen.any()) {
        for (int64_t x = i; x < i + MR; ++x) clear(x, 0, BLOCK_S);
        continue;
      }
      const int64_t from = seen.low / LANES * LANES, to = round_up(seen.high, LANES);
      const int64_t shift = strip_scores(p, Dp, s.qu + i * Dp, s.qw + i * Dp, i0 + i, j0, to, packed.k_panels + key * D,
                                         r_panels, s.carry[i / MR], s.content, s.position);
      times_panels(s.dout + i * Dp, Dp, packed.v_panels + key * D, D, div_up(to, NR), s.dp, BLOCK_S);
      for (int64_t x = 0; x < MR; ++x) {
        const Range own = within(ranges.row[i + x], j0);
        clear(i + x, 0, from);
        clear(i + x, to, BLOCK_S);
        if (!own.any()) {
          clear(i + x, from, to);
          continue;
        }
        gradient_row(s.content + x * BLOCK_S, s.position + x * POSITION_LD + shift + MR - 1 - x, s.dp + x * BLOCK_S,
                     p.drop_below ? s.factor + (i + x) * BLOCK_S : nullptr, p.lse[bh * p.L + i0 + i + x], delta[i + x],
                     own.low, own.high, from, to, s.p + (i + x) * BLOCK_S,
                     s.skew + (i + x) * SKEW_LD + BLOCK_L - 1 - (i + x));
      }
      add_times_rows(s.skew + BLOCK_L - 1 + i * (SKEW_LD - 1) + from, SKEW_LD - 1, packed.k_rows + (key + from) * Dp,
                     to - from, Dp, dq_content + i * Dp);
      const int64_t column = BLOCK_L - 1 - (i + MR - 1) + from;
      add_times_rows(s.skew + i * SKEW_LD + column, SKEW_LD, r_rows + (rho0 + column) * Dp, to - from + MR - 1, Dp,
                     dq_position + i * Dp);
    }
    add_key_gradients(s, Dp, j0, rho0, block_from, block_to, sums);
  }

  for (int64_t i = 0; i < rows; ++i) {
    T* dq = const_cast<T*>(row_of<T>(g.dq, b, h, i0 + i));
    for (int64_t d = 0; d < D; ++d) {
      const float content = dq_content[i * Dp + d] * p.scale, position = dq_position[i * Dp + d] * p.scale;
      put(dq + d, content + position);
      sums.du[d] += content;
      sums.dw[d] += position;
    }
  }
}

// Adds up one row of the sums of a head's items, batch rows outside and chunks inside, into a gradient's row.
template <class T>
static void add_up(const float* first, int64_t batch, int64_t batch_step, int64_t chunks, int64_t chunk_step, int64_t D,
                   T* out) {
  for (int64_t d = 0; d < D; ++d) {
    float sum = 0;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t c = 0; c < chunks; ++c) sum += first[b * batch_step + c * chunk_step + d];
    put(out + d, sum);
  }
}

template <class T>
static void run_backward(const Problem& p, const Gradients& g) {
  const Sizes z(p);
  const int64_t BH = p.B * p.H, D = p.D, Dp = z.Dp, blocks = div_up(p.L, BLOCK_L);
  const int64_t chunks = BH ? clamp(div_up(CHUNK_ITEMS, BH), 1, max_of(blocks, 1)) : 1;
  const int64_t per_thread = BackwardScratch::floats(Dp), per_item = Sums::floats(z);
  Buffer k_panels(BH * z.keys * D), k_rows(BH * z.keys * Dp), v_panels(BH * z.keys * D), r_panels(p.H * z.rhos * D),
      r_rows(p.H * z.rhos * Dp), scratch(p.threads * per_thread), sums(BH * chunks * per_item);
  Packed packed;
  packed.k_panels = k_panels.data, packed.k_rows = k_rows.data, packed.v_panels = v_panels.data;
  packed.r_panels = r_panels.data, packed.r_rows = r_rows.data;
  pack_all<T>(p, z, packed);

  parallel_for(p.threads, BH * chunks, [&](int64_t item, int thread) {
    const int64_t bh = item / chunks, chunk = item % chunks;
    float* own = sums.data + item * per_item;
    memset(own, 0, sizeof(float) * per_item);
    for (int64_t x = chunk; x < blocks; x += chunks)  // interleaved: chunks of a causal segment cost the same
      backward_block<T>(p, g, z, packed, bh, x * BLOCK_L, scratch.data + thread * per_thread, Sums(own, z));
  });

  const int64_t key_items = BH * (z.keys / BLOCK_S), rho_tiles = div_up(p.T, BLOCK_S);
  parallel_for(p.threads, key_items + p.H * (rho_tiles + 1), [&](int64_t item, int) {
    if (item < key_items) {
      const int64_t bh = item / (z.keys / BLOCK_S), b = bh / p.H, h = bh % p.H;
      const int64_t j0 = item % (z.keys / BLOCK_S) * BLOCK_S;
      const Sums first(sums.data + bh * chunks * per_item, z);
      for (int64_t j = j0; j < min_of(j0 + BLOCK_S, z.S); ++j) {
        add_up(first.dk + j * Dp, 1, 0, chunks, per_item, D, const_cast<T*>(key_row<T>(p, g.dk_mem, g.dk, b, h, j)));
        add_up(first.dv + j * Dp, 1, 0, chunks, per_item, D, const_cast<T*>(key_row<T>(p, g.dv_mem, g.dv, b, h, j)));
      }
      return;
    }
    const int64_t h = (item - key_items) / (rho_tiles + 1), tile = (item - key_items) % (rho_tiles + 1);
    const Sums first(sums.data + h * chunks * per_item, z);
    auto over_batch = [&](const float* row, const T* out) {
      add_up(row, p.B, p.H * chunks * per_item, chunks, per_item, D, const_cast<T*>(out));
    };
    if (tile == rho_tiles) {
      over_batch(first.du, row_of<T>(g.du, h, 0, 0));
      over_batch(first.dw, row_of<T>(g.dw, h, 0, 0));
      return;
    }
    for (int64_t t = tile * BLOCK_S; t < min_of((tile + 1) * BLOCK_S, p.T); ++t) {
      const int64_t rho = z.S - 1 + RHO_FRONT - (t - p.zero_row);
      T* out = const_cast<T*>(row_of<T>(g.dr, h, t, 0));
      if (rho >= 0 && rho < z.rhos)
        over_batch(first.dr + rho * Dp, out);
      else
        for (int64_t d = 0; d < D; ++d) put(out + d, 0.f);  // a distance no key of this call is at
    }
  });
}
