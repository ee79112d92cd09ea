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

// Decode sums a score in another order than backward does: of scores of size s, exp(score - lse) is
// off by about s * 2^-23. Above this size out and lse are computed anew, by tiles.
constexpr float LARGE_LSE = 64;

static bool beyond_decode(const Problem& p) {
  if (!decode_fits(p)) return false;
  for (int64_t row = 0; row < p.B * p.H * p.L; ++row)
    if (p.lse[row] > LARGE_LSE || (p.lse[row] < -LARGE_LSE && p.lse[row] > -INF)) return true;
  return false;
}

// A call with out and lse that backward's scores belong to.
template <class T>
struct Consistent {
  const bool anew;
  Buffer out, lse;
  Problem p;

  explicit Consistent(const Problem& given)
      : anew(beyond_decode(given)),
        out(anew ? given.B * given.H * given.L * given.D : 0),
        lse(anew ? given.B * given.H * given.L : 0),
        p(given) {
    if (!anew) return;
    p.out = {out.data, p.H * p.L * p.D, p.L * p.D, p.D};
    p.lse = lse.data;
    run_tiles<T>(p);
  }
};

template <class T>
static void run_backward(const Problem& given, const Gradients& g) {
  const Consistent<T> consistent(given);
  const Problem& p = consistent.p;
  const BackwardPlan z(p);
  const InUse in_use(p);
  const int64_t BH = p.B * p.H, D = p.D, Dp = z.Dp, blocks = div_up(p.L, BLOCK_L);
  const int64_t per_thread = floats_of<BackwardScratch>(D, z);
  Buffer scratch(p.threads * per_thread), items(BH * z.chunks * z.entry()), deltas(BH * p.L),
      hull_memory(p.B * blocks * sizeof(Range) / sizeof(float)), live_memory(p.B * z.chunks);
  Range* hulls = reinterpret_cast<Range*>(hull_memory.data);
  for (int64_t x = 0; x < p.B * blocks; ++x) {
    const int64_t i0 = x % blocks * BLOCK_L;
    hulls[x] = BlockRanges<BLOCK_L>(p, x / blocks, i0, min_of(BLOCK_L, p.L - i0), {0, p.M + p.L}).all;
  }
  // Whether a chunk's keys are seen: else it left nothing.
  int32_t* live = reinterpret_cast<int32_t*>(live_memory.data);
  for (int64_t x = 0; x < p.B * z.chunks; ++x)
    live[x] = sees_any(hulls + x / z.chunks * blocks, blocks, x % z.chunks * z.chunk, (x % z.chunks + 1) * z.chunk);
  parallel_for(p.threads, BH * blocks, [&](int64_t x, int) {
    const int64_t bh = x / blocks, i0 = x % blocks * BLOCK_L;
    for (int64_t i = i0; i < min_of(i0 + BLOCK_L, p.L); ++i) deltas.data[bh * p.L + i] = delta_of<T>(p, g, bh, i);
  });
  parallel_for(p.threads, BH * z.chunks, [&](int64_t item, int thread) {
    Arena arena(scratch.data + thread * per_thread);
    [[maybe_unused]] const Unit unit;
    BackwardScratch s(arena, D, z);
    const int64_t bh = item / z.chunks, chunk = item % z.chunks;
    backward_chunk<T>(p, g, z, in_use, hulls, live[bh / p.H * z.chunks + chunk], deltas.data, bh, chunk, s,
                      items.data + item * z.entry());
  });

  // What the items left: dq over the chunks; dr, du, dw over batch rows and chunks.
  auto left = [&](int64_t b, int64_t h, int64_t c) {
    return live[b * z.chunks + c] ? items.data + ((b * p.H + h) * z.chunks + c) * z.entry() : nullptr;
  };
  const int64_t table_tiles = div_up(p.T, BLOCK_S), of_heads = p.H * (table_tiles + 1);
  parallel_for(p.threads, BH * blocks + of_heads, [&](int64_t x, int thread) {
    float* sum = scratch.data + thread * per_thread;
    if (x < BH * blocks) {
      const int64_t bh = x / blocks, i0 = x % blocks * BLOCK_L;
      for (int64_t i = i0; i < min_of(i0 + BLOCK_L, p.L); ++i)
        add_up([&](int64_t c) { return left(bh / p.H, bh % p.H, c); }, z.chunks, i * Dp, p.scale, z, D, sum,
               const_cast<T*>(row_of<T>(g.dq, bh / p.H, bh % p.H, i)));
      return;
    }
    const int64_t h = (x - BH * blocks) / (table_tiles + 1), tile = (x - BH * blocks) % (table_tiles + 1);
    auto of_head = [&](int64_t n) { return left(n / z.chunks, h, n % z.chunks); };
    if (tile == table_tiles) {
      add_up(of_head, p.B * z.chunks, z.biases(), p.scale, z, D, sum, const_cast<T*>(row_of<T>(g.du, h, 0, 0)));
      add_up(of_head, p.B * z.chunks, z.biases() + Dp, p.scale, z, D, sum, const_cast<T*>(row_of<T>(g.dw, h, 0, 0)));
      return;
    }
    for (int64_t t = tile * BLOCK_S; t < min_of((tile + 1) * BLOCK_S, p.T); ++t) {
      const int64_t rho = p.M + rho_origin(p) - (t - p.zero_row);
      auto with_rho = [&](int64_t n) {  // the item, moved to where its row for rho is the first of dr
        const int64_t row = rho - z.first_rho(p, n % z.chunks);
        const float* item = row >= 0 && row < z.rhos ? of_head(n) : nullptr;
        return item ? item + row * Dp : nullptr;
      };
      add_up(with_rho, p.B * z.chunks, z.dr(), 1.f, z, D, sum, const_cast<T*>(row_of<T>(g.dr, h, t, 0)));
    }
  });
}
