// Forward for a few queries: keys, values and r are read once where they lie, nothing is packed. The keys are split
// into parts that threads share; parts are merged by their log-sum-exp in order, so the thread count changes no bit.

constexpr int64_t DECODE_L = 4;       // above this, packing pays
constexpr int64_t DECODE_PART = 512;  // keys of a part

static bool decode_fits(const Problem& p) { return p.L <= DECODE_L && !p.drop_below; }

template <class T>
TXL_INLINE float dot(const float* a, const T* b, int64_t D) {
  vf sum0 = {}, sum1 = {};
  int64_t d = 0;
  for (; d + 2 * LANES <= D; d += 2 * LANES) {
    sum0 += load(a + d) * load(b + d);
    sum1 += load(a + d + LANES) * load(b + d + LANES);
  }
  float tail = 0;
  for (; d + LANES <= D; d += LANES) sum0 += load(a + d) * load(b + d);
  for (; d < D; ++d) tail += a[d] * to_float(b[d]);
  return sum_lanes(sum0 + sum1) + tail;
}

// out[D] = sum over n < count of weight[n] * values[n * stride]. D in chunks of four vectors of accumulators.
template <class T>
static void weighted_rows(const float* weight, const T* values, int64_t stride, int64_t count, int64_t D, float* out) {
  int64_t d = 0;
  for (; d + 4 * LANES <= D; d += 4 * LANES) {
    vf acc[4] = {};
    for (int64_t n = 0; n < count; ++n)
      for (int z = 0; z < 4; ++z) acc[z] += weight[n] * load(values + n * stride + d + z * LANES);
    for (int z = 0; z < 4; ++z) store(out + d + z * LANES, load(out + d + z * LANES) + acc[z]);
  }
  for (; d + LANES <= D; d += LANES) {
    vf acc = {};
    for (int64_t n = 0; n < count; ++n) acc += weight[n] * load(values + n * stride + d);
    store(out + d, load(out + d) + acc);
  }
  for (; d < D; ++d)
    for (int64_t n = 0; n < count; ++n) out[d] += weight[n] * to_float(values[n * stride + d]);
}

// A part of one query: out[D] (not yet divided), then its maximum and its sum.
template <class T>
static void decode_part(const Problem& p, int64_t bh, int64_t i, Range keys, const float* qu, const float* qw,
                        float* out) {
  const int64_t b = bh / p.H, h = bh % p.H, D = p.D;
  float score[DECODE_PART];
  float top = -INF;
  for (int64_t j = keys.low; j < keys.high; ++j) {
    const T* r = row_of<T>(p.r, h, p.zero_row + p.M + i - j, 0);
    const float x = dot(qu, key_row<T>(p, p.k_mem, p.k, b, h, j), D) + dot(qw, r, D);
    score[j - keys.low] = x;
    top = x > top ? x : top;
  }
  const int64_t n = keys.high - keys.low;
  for (int64_t x = n; x < round_up(n, LANES); ++x) score[x] = -INF;
  vf sum = {};
  for (int64_t x = 0; x < n; x += LANES) {
    const vf e = exp_of(load(score + x) - splat(top));
    store(score + x, e);
    sum += e;
  }
  for (int64_t d = 0; d < D; ++d) out[d] = 0;
  const int64_t in_memory = clamp(p.M - keys.low, 0, n);
  if (in_memory) weighted_rows(score, row_of<T>(p.v_mem, b, h, keys.low), p.v_mem.s2, in_memory, D, out);
  if (n > in_memory)
    weighted_rows(score + in_memory, row_of<T>(p.v, b, h, keys.low + in_memory - p.M), p.v.s2, n - in_memory, D, out);
  out[D] = top;
  out[D + 1] = sum_lanes(sum);
}

template <class T>
static void run_decode(const Problem& p) {
  const int64_t BH = p.B * p.H, D = p.D, queries = BH * p.L, parts = div_up(p.M + p.L, DECODE_PART), entry = D + 2;
  Buffer partial(queries * parts * entry), shifted(queries * 2 * D);
  for (int64_t x = 0; x < queries; ++x) {
    const int64_t bh = x / p.L, h = bh % p.H;
    const T *q = row_of<T>(p.q, bh / p.H, h, x % p.L), *u = row_of<T>(p.u, h, 0, 0), *w = row_of<T>(p.w, h, 0, 0);
    for (int64_t d = 0; d < D; ++d) {
      shifted.data[2 * x * D + d] = (to_float(q[d]) + to_float(u[d])) * p.scale;
      shifted.data[(2 * x + 1) * D + d] = (to_float(q[d]) + to_float(w[d])) * p.scale;
    }
  }
  auto part_of = [&](Range seen, int64_t part) -> Range {
    return {max_of(seen.low, part * DECODE_PART), min_of(seen.high, (part + 1) * DECODE_PART)};
  };
  // An item is one (b, h) and part: its keys stay in cache for all the queries.
  parallel_for(p.threads, BH * parts, [&](int64_t item, int) {
    const int64_t bh = item / parts, part = item % parts;
    for (int64_t i = 0; i < p.L; ++i) {
      const Range keys = part_of(visible(p, bh / p.H, i), part);
      if (!keys.any()) continue;
      const float* qu = shifted.data + 2 * (bh * p.L + i) * D;
      decode_part<T>(p, bh, i, keys, qu, qu + D, partial.data + ((bh * p.L + i) * parts + part) * entry);
    }
  });
  for (int64_t x = 0; x < queries; ++x) {
    const int64_t bh = x / p.L, i = x % p.L;
    const Range seen = visible(p, bh / p.H, i);
    T* out = const_cast<T*>(row_of<T>(p.out, bh / p.H, bh % p.H, i));
    float* into = shifted.data + 2 * x * D;  // this query's q + u has served
    float top = -INF, total = 0;
    for (int64_t d = 0; d < D; ++d) into[d] = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const Range keys = part_of(seen, part);
      if (!keys.any()) continue;
      const float* from = partial.data + (x * parts + part) * entry;
      const float raised = from[D] > top ? from[D] : top;
      const float old_factor = exp_of(top - raised), new_factor = exp_of(from[D] - raised);
      for (int64_t d = 0; d < D; ++d) into[d] = into[d] * old_factor + from[d] * new_factor;
      total = total * old_factor + from[D + 1] * new_factor;
      top = raised;
    }
    const bool empty = !seen.any();
    for (int64_t d = 0; d < D; ++d) put(out + d, empty ? 0.f : into[d] / total);
    p.lse[x] = empty ? -INF : top + log_of(total);
  }
}
