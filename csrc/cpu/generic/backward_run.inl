// Backward as a whole: what each query subtracts, the items, and the sums of what they leave.

// sum_i dout_i out_i - dlse of each query: what every dS of its row subtracts.
template <class T>
static float delta_of(const Problem& p, const Gradients& g, int64_t bh, int64_t i) {
  const int64_t b = bh / p.H, h = bh % p.H;
  if (!visible(p, b, i).any()) return 0.f;
  const T *out = row_of<T>(p.out, b, h, i), *dout = row_of<T>(g.dout, b, h, i);
  vf sum = {};
  float tail = 0;
  int64_t d = 0;
  for (; d + LANES <= p.D; d += LANES) sum += load(out + d) * load(dout + d);
  for (; d < p.D; ++d) tail += to_float(out[d]) * to_float(dout[d]);
  return sum_lanes(sum) + tail - (g.dlse ? g.dlse[bh * p.L + i] : 0.f);
}

// Adds up the row at `offset` of several items, item(n) for n < count (null: not there), times a
// factor, into `out`.
template <class T, class Item>
TXL_INLINE void add_up(const Item& item, int64_t count, int64_t offset, float factor, const BackwardPlan& z, int64_t D,
                       float* sum, T* out) {
  memset(sum, 0, sizeof(float) * z.Dp);
  for (int64_t n = 0; n < count; ++n)
    if (const float* from = item(n))
      for (int64_t d = 0; d < z.Dp; d += LANES) store(sum + d, load(sum + d) + load(from + offset + d));
  write_row(out, sum, factor, D);
}

// Which chunks of keys each batch row sees, and which keys each block of its queries.
struct Seen {
  int64_t blocks;
  Buffer hull_memory, live_memory;
  Range* hulls;   // [B][blocks]
  int32_t* live;  // [B][chunks]

  Seen(const Problem& p, const BackwardPlan& z)
      : blocks(div_up(p.L, BLOCK_L)),
        hull_memory(p.B * blocks * sizeof(Range) / sizeof(float)),
        live_memory(p.B * z.chunks),
        hulls(reinterpret_cast<Range*>(hull_memory.data)),
        live(reinterpret_cast<int32_t*>(live_memory.data)) {
    for (int64_t x = 0; x < p.B * blocks; ++x) {
      const int64_t i0 = x % blocks * BLOCK_L;
      hulls[x] = BlockRanges<BLOCK_L>(p, x / blocks, i0, min_of(BLOCK_L, p.L - i0), {0, p.M + p.L}).all;
    }
    for (int64_t x = 0; x < p.B * z.chunks; ++x)
      live[x] = sees_any(hulls + x / z.chunks * blocks, blocks, x % z.chunks * z.chunk, (x % z.chunks + 1) * z.chunk);
  }
};

// What the items left: dq over the chunks, if there are several; dr, du, dw over groups and chunks.
template <class T>
static void add_up_items(const Problem& p, const Gradients& g, const BackwardPlan& z, const Seen& seen,
                         const float* dq_parts, const float* items, float* scratch, int64_t per_thread) {
  const int64_t D = p.D, Dp = z.Dp, queries = z.chunks > 1 && g.dq.data ? p.B * p.H * seen.blocks : 0;
  const int64_t table_tiles = z.dr ? div_up(p.T, BLOCK_S) : 0, of_heads = p.H * (table_tiles + 1),
                parts = z.groups * z.chunks;
  auto of_head = [&](int64_t h, int64_t n) {
    const int64_t first = n / z.chunks * z.group, chunk = n % z.chunks;
    bool live = false;
    for (int64_t b = first; b < min_of(first + z.group, p.B); ++b) live |= seen.live[b * z.chunks + chunk] != 0;
    return live ? items + ((n / z.chunks * p.H + h) * z.chunks + chunk) * z.item_floats() : nullptr;
  };
  parallel_for(p.threads, queries + of_heads, [&](int64_t x, int thread) {
    float* sum = scratch + thread * per_thread;
    if (x < queries) {
      const int64_t bh = x / seen.blocks, i0 = x % seen.blocks * BLOCK_L;
      auto part = [&](int64_t c) {
        return seen.live[bh / p.H * z.chunks + c] ? dq_parts + (bh * z.chunks + c) * z.dq_floats() : nullptr;
      };
      for (int64_t i = i0; i < min_of(i0 + BLOCK_L, p.L); ++i)
        add_up(part, z.chunks, i * Dp, p.scale, z, D, sum, const_cast<T*>(row_of<T>(g.dq, bh / p.H, bh % p.H, i)));
      return;
    }
    const int64_t h = (x - queries) / (table_tiles + 1), tile = (x - queries) % (table_tiles + 1);
    if (tile == table_tiles) {
      auto item = [&](int64_t n) { return of_head(h, n); };
      const int64_t du = z.rhos * Dp, dw = du + Dp;
      if (g.du.data) add_up(item, parts, du, p.scale, z, D, sum, const_cast<T*>(row_of<T>(g.du, h, 0, 0)));
      if (g.dw.data) add_up(item, parts, dw, p.scale, z, D, sum, const_cast<T*>(row_of<T>(g.dw, h, 0, 0)));
      return;
    }
    for (int64_t t = tile * BLOCK_S; t < min_of((tile + 1) * BLOCK_S, p.T); ++t) {
      const int64_t rho = p.M + rho_origin(p) - (t - p.zero_row);
      auto with_rho = [&](int64_t n) {
        const int64_t low = n % z.chunks * z.chunk, row = rho - z.first_rho(p, low);
        const Range met = z.met(p, low, min_of(low + z.chunk, p.M + p.L));
        const float* item = row >= met.low && row < met.high ? of_head(h, n) : nullptr;
        return item ? item + row * Dp : nullptr;
      };
      add_up(with_rho, parts, 0, 1.f, z, D, sum, const_cast<T*>(row_of<T>(g.dr, h, t, 0)));
    }
  });
}

template <class T>
static void run_backward(const Problem& p, const Gradients& g) {
  const BackwardPlan z(p, g);
  const InUse in_use(p);
  const Seen seen(p, z);
  const int64_t S = p.M + p.L, Dp = z.Dp, BH = p.B * p.H;
  const bool few = decode_fits(p);
  const int64_t per_thread = max_of(few ? floats_of<FewScratch>(p, z) : floats_of<BackwardScratch>(p.D, z), Dp);
  Buffer scratch(p.threads * per_thread), items(z.items(p) * z.item_floats()), deltas(BH * p.L),
      dq_parts(z.chunks > 1 ? BH * z.chunks * z.dq_floats() : 0);
  parallel_for(p.threads, BH * seen.blocks, [&](int64_t x, int) {
    const int64_t bh = x / seen.blocks, i0 = x % seen.blocks * BLOCK_L;
    for (int64_t i = i0; i < min_of(i0 + BLOCK_L, p.L); ++i) deltas.data[bh * p.L + i] = delta_of<T>(p, g, bh, i);
  });

  // Batch row by batch row of an item; part(at, sums) does one, of an item that sees its keys or not.
  auto run_item = [&](int64_t item, float* own_dq, const auto& start, const auto& part, const auto& finish) {
    const int64_t chunk = item % z.chunks, h = item / z.chunks % p.H, b0 = item / z.chunks / p.H * z.group;
    const int64_t b1 = min_of(b0 + z.group, p.B);
    float* const left = items.data + item * z.item_floats();
    bool any = false;
    for (int64_t b = b0; b < b1; ++b) any |= seen.live[b * z.chunks + chunk] != 0;
    if (any && z.dr) {
      const Range met = z.met(p, chunk * z.chunk, min_of((chunk + 1) * z.chunk, S));
      memset(left + met.low * Dp, 0, sizeof(float) * (met.high - met.low) * Dp);
      start();
    }
    if (any) memset(left + z.rhos * Dp, 0, sizeof(float) * 2 * Dp);
    for (int64_t b = b0; b < b1; ++b) {
      const Part at{b, h, chunk * z.chunk, min_of((chunk + 1) * z.chunk, S)};
      const Sums sums(z, own_dq ? own_dq : dq_parts.data + (at.bh(p) * z.chunks + chunk) * z.dq_floats(), left);
      if (seen.live[b * z.chunks + chunk] || own_dq) memset(sums.dq, 0, sizeof(float) * z.dq_floats());
      part(at, sums);
      if (own_dq && g.dq.data)
        for (int64_t i = 0; i < p.L; ++i)
          write_row(const_cast<T*>(row_of<T>(g.dq, b, h, i)), sums.dq + i * Dp, p.scale, p.D);
    }
    if (any && z.dr) finish(left);
  };
  parallel_for(p.threads, z.items(p), [&](int64_t item, int thread) {
    Arena arena(scratch.data + thread * per_thread);
    if (few) {
      FewScratch s(arena, p, z);
      run_item(
          item, s.dq, [] {}, [&](const Part& at, const Sums& sums) { few_part<T>(p, g, z, deltas.data, at, s, sums); },
          [](float*) {});
      return;
    }
    [[maybe_unused]] const Unit unit;
    BackwardScratch s(arena, p.D, z);
    s.weights.start(min_of(BLOCK_L, round_up(p.L, MR)));
    run_item(
        item, s.dq, [&] { s.keys.start_item(); },
        [&](const Part& at, const Sums& sums) {
          backward_part<T>(p, g, z, in_use, seen.hulls + at.b * seen.blocks, deltas.data, at, s, sums);
        },
        [&](float* left) { s.keys.finish_item(left); });
  });
  add_up_items<T>(p, g, z, seen, dq_parts.data, items.data, scratch.data, per_thread);
}
