// Backward for a few queries: keys, values and r are read where they lie and their gradients written
// there, nothing is packed. Scores are summed as decode does, so that lse belongs to them.

constexpr int64_t FEW_PART = 512;  // keys at a time: read three times, from the cache

struct FewScratch {
  float *dq, *p, *ds, *row;  // p, ds: [L][FEW_PART]
  Cell *qu, *qw;
  float *qu_wide, *qw_wide, *dout;  // [L][Dp]

  FewScratch(Arena& a, const Problem& call, const BackwardPlan& z)
      : dq(z.chunks == 1 ? a.take(z.dq_floats()) : nullptr),
        p(a.take(call.L * FEW_PART)),
        ds(a.take(call.L * FEW_PART)),
        row(a.take(z.Dp)),
        qu(a.take<Cell>(call.L * z.Dp)),
        qw(a.take<Cell>(call.L * z.Dp)),
        qu_wide(a.take(call.L * z.Dp)),
        qw_wide(a.take(call.L * z.Dp)),
        dout(a.take(call.L * z.Dp)) {}
};

// p and dS of query i for the keys from j0 on that it sees, relative to j0.
template <class T>
static void few_weights(const Problem& p, const Part& at, int64_t i, int64_t j0, Range keys, float lse, float delta,
                        const FewScratch& s, int64_t Dp) {
  float *weight = s.p + i * FEW_PART, *gradient = s.ds + i * FEW_PART;
  for (int64_t n = keys.low; n < keys.high; n += LANES) {
    float score[LANES];
    decode_scores<T>(p, at.b, at.h, i, j0 + n, j0 + keys.high - 1, s.qu + i * Dp, s.qw + i * Dp, score);
    vf sums[LANES];
    float tail[LANES] = {};
    TXL_UNROLL(16)
    for (int z = 0; z < LANES; ++z) {
      const T* v = key_row<T>(p, p.v_mem, p.v, at.b, at.h, j0 + min_of(n + z, keys.high - 1));
      int64_t d = 0;
      sums[z] = vf{};
      for (; d + LANES <= p.D; d += LANES) sums[z] += load(s.dout + i * Dp + d) * load(v + d);
      for (; d < p.D; ++d) tail[z] += s.dout[i * Dp + d] * to_float(v[d]);
    }
    const vf dp = sum_each(sums) + load(tail), below = load(score) - splat(lse);
    const vf e = exp_of(below > 0 ? vf{} : below), dS = e * (dp - splat(delta));
    if (n + LANES <= keys.high) {
      store(weight + n, e);
      store(gradient + n, dS);
    } else {
      for (int64_t z = 0; n + z < keys.high; ++z) weight[n + z] = e[z], gradient[n + z] = dS[z];
    }
  }
}

// out[D] = sum over the queries of weight[i][n] * x[i], of those that see the key; `row` for the sum.
template <class T>
TXL_INLINE void few_key(const Range* seen, int64_t L, int64_t n, const float* weight, const float* x, int64_t Dp,
                        int64_t D, float* row, T* out) {
  for (int64_t d = 0; d < Dp; d += LANES) {
    vf sum = {};
    for (int64_t i = 0; i < L; ++i)
      if (n >= seen[i].low && n < seen[i].high) sum += weight[i * FEW_PART + n] * load(x + i * Dp + d);
    store(row + d, sum);
  }
  write_row(out, row, 1.f, D);
}

// sum += row, dq += row.
TXL_INLINE void add_to_both(const float* row, int64_t Dp, float* sum, float* dq) {
  for (int64_t d = 0; d < Dp; d += LANES) {
    store(sum + d, load(sum + d) + load(row + d));
    store(dq + d, load(dq + d) + load(row + d));
  }
}

// What query i gets from those keys, and r from it.
template <class T>
static void few_query(const Problem& p, const BackwardPlan& z, const Part& at, int64_t i, int64_t j0, Range keys,
                      const FewScratch& s, const Sums& sums) {
  const int64_t D = p.D, Dp = z.Dp, first = j0 + keys.low, count = keys.high - keys.low;
  const float* gradient = s.ds + i * FEW_PART + keys.low;
  if (z.content) {
    const int64_t in_memory = clamp(p.M - first, 0, count);
    memset(s.row, 0, sizeof(float) * Dp);
    if (in_memory) weighted_rows(gradient, row_of<T>(p.k_mem, at.b, at.h, first), p.k_mem.s2, in_memory, D, s.row);
    if (count > in_memory)
      weighted_rows(gradient + in_memory, row_of<T>(p.k, at.b, at.h, first + in_memory - p.M), p.k.s2,
                    count - in_memory, D, s.row);
    add_to_both(s.row, Dp, sums.du, sums.dq + i * Dp);
  }
  if (z.position) {
    memset(s.row, 0, sizeof(float) * Dp);
    weighted_rows(gradient, row_of<T>(p.r, at.h, p.zero_row + p.M + i - first, 0), -p.r.s1, count, D, s.row);
    add_to_both(s.row, Dp, sums.dw, sums.dq + i * Dp);
  }
  if (!z.dr) return;
  float* dr = sums.dr + (rho_of(p, i, first) - z.first_rho(p, at.low)) * Dp;
  for (int64_t n = 0; n < count; ++n, dr += Dp)
    for (int64_t d = 0; d < Dp; d += LANES) store(dr + d, load(dr + d) + gradient[n] * load(s.qw_wide + i * Dp + d));
}

// As backward_part.
template <class T>
static void few_part(const Problem& p, const Gradients& g, const BackwardPlan& z, const float* delta, const Part& at,
                     const FewScratch& s, const Sums& sums) {
  const int64_t D = p.D, Dp = z.Dp, L = p.L;
  auto sees = [&](int64_t i) { return visible(p, at.b, i).any(); };
  pack_queries<T>(p, at.b, at.h, 0, L, sees, Dp, s.qu, s.qw);
  for (int64_t i = 0; i < L; ++i) {
    const T* dout = sees(i) ? row_of<T>(g.dout, at.b, at.h, i) : nullptr;
    for (int64_t d = 0; d < Dp; ++d) {
      s.dout[i * Dp + d] = dout && d < D ? to_float(dout[d]) : 0.f;
      s.qu_wide[i * Dp + d] = to_float(s.qu[i * Dp + d]);
      s.qw_wide[i * Dp + d] = to_float(s.qw[i * Dp + d]);
    }
  }
  for (int64_t j0 = at.low; j0 < at.high; j0 += FEW_PART) {
    const int64_t count = min_of(FEW_PART, at.high - j0);
    Range seen[DECODE_L];
    for (int64_t i = 0; i < L; ++i) {
      const Range all = visible(p, at.b, i);
      seen[i] = {clamp(all.low - j0, 0, count), clamp(all.high - j0, 0, count)};
      if (!seen[i].any()) continue;
      const int64_t row = at.bh(p) * L + i;
      few_weights<T>(p, at, i, j0, seen[i], p.lse[row], delta[row], s, Dp);
      few_query<T>(p, z, at, i, j0, seen[i], s, sums);
    }
    for (int64_t n = 0; n < count; ++n) {
      if (T* const dk = key_gradient<T>(p, g.dk_mem, g.dk, at, j0 + n))
        few_key(seen, L, n, s.ds, s.qu_wide, Dp, D, s.row, dk);
      if (T* const dv = key_gradient<T>(p, g.dv_mem, g.dv, at, j0 + n))
        few_key(seen, L, n, s.p, s.dout, Dp, D, s.row, dv);
    }
  }
}
