// Forward for a few queries: keys, values and r are read once where they lie, nothing is packed.
// The keys are split into parts that threads share; parts are merged by their log-sum-exp in order,
// so the thread count changes no bit.
#pragma once
#include "backward_plan.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t DECODE_L = 4;                   // above this, packing pays
constexpr int64_t DECODE_PART = 512;              // keys of a part
constexpr int64_t AHEAD = LANES < 8 ? 8 : LANES;  // rows of prefetch: three streams are more than the hardware follows

// The cache line of column d of the row as many bytes further on as AHEAD rows of floats, once a line. The address may
// be no row's; it is not read.
template <class T>
TXL_INLINE void prefetch(const T* row, int64_t stride, int64_t d) {
  constexpr int64_t line = 64 / sizeof(T);
  if (d % line == 0)
    __builtin_prefetch(
        reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(row + d) + AHEAD * stride * sizeof(float)));
}

static bool decode_fits(const Problem& p) { return p.L <= DECODE_L && !p.drop_below; }

// score[0..LANES) of the keys from j on, D summed in lanes: qu . k, and if POSITIONS qw . r. Keys past `last` count
// as the last one.
template <bool POSITIONS, class T>
TXL_INLINE void decode_products(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j, int64_t last,
                                const Cell* qu, const Cell* qw, float* score) {
  vf sum[LANES];
  float tail[LANES];
  const int64_t k_stride = (j < p.M ? p.k_mem : p.k).s2;
  for (int first = 0; first < LANES; first += 4) {  // four keys at a time: their pointers stay in registers
    const T *k[4], *r[4];
    vf four[4] = {};
    TXL_UNROLL(4)
    for (int z = 0; z < 4; ++z) {
      const int64_t key = min_of(j + first + z, last);
      k[z] = key_row<T>(p, p.k_mem, p.k, b, h, key);
      if (POSITIONS) r[z] = row_of<T>(p.r, h, p.zero_row + p.M + i - key, 0);
    }
    int64_t d = 0;
    for (; d + LANES <= p.D; d += LANES) {
      const vf u = load(qu + d), w = load(qw + d);
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) {
        prefetch(k[z], k_stride, d);
        four[z] += u * load(k[z] + d);
        if (POSITIONS) prefetch(r[z], -p.r.s1, d), four[z] += w * load(r[z] + d);
      }
    }
    TXL_UNROLL(4)
    for (int z = 0; z < 4; ++z) {
      sum[first + z] = four[z];
      tail[first + z] = 0;
      for (int64_t x = d; x < p.D; ++x) {
        tail[first + z] += to_float(qu[x]) * to_float(k[z][x]);
        if (POSITIONS) tail[first + z] += to_float(qw[x]) * to_float(r[z][x]);
      }
    }
  }
  const vf total = sum_each(sum) + load(tail);
  store(score, total);
}

// The same with r_bias, before the cap.
template <class T>
TXL_INLINE void decode_scores(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j, int64_t last,
                              const Cell* qu, const Cell* qw, float* score) {
  if (p.r.data)
    decode_products<true, T>(p, b, h, i, j, last, qu, qw, score);
  else
    decode_products<false, T>(p, b, h, i, j, last, qu, qw, score);
  for (int64_t z = 0; p.r_bias.data && z < LANES; ++z)
    score[z] += bias_of<T>(p, h, p.zero_row + p.M + i - min_of(j + z, last));
}

// out[0..N * LANES) += sum over n < count of weight[n] * values[n * stride], N vectors of
// accumulators.
template <int N, class T>
TXL_INLINE void weighted_columns(const float* weight, const T* values, int64_t stride, int64_t count, float* out) {
  vf acc[N];
  TXL_UNROLL(8)
  for (int z = 0; z < N; ++z) acc[z] = load(out + z * LANES);
  for (int64_t n = 0; n < count; ++n) {
    TXL_UNROLL(8)
    for (int z = 0; z < N; ++z) {
      prefetch(values + n * stride, stride, z * LANES);
      acc[z] += weight[n] * load(values + n * stride + z * LANES);
    }
  }
  TXL_UNROLL(8)
  for (int z = 0; z < N; ++z) store(out + z * LANES, acc[z]);
}

// The same for a whole row of D.
template <class T>
static void weighted_rows(const float* weight, const T* values, int64_t stride, int64_t count, int64_t D, float* out) {
  int64_t d = 0;
  for (; d + 8 * LANES <= D; d += 8 * LANES) weighted_columns<8>(weight, values + d, stride, count, out + d);
  for (; d + 4 * LANES <= D; d += 4 * LANES) weighted_columns<4>(weight, values + d, stride, count, out + d);
  for (; d + LANES <= D; d += LANES) weighted_columns<1>(weight, values + d, stride, count, out + d);
  for (; d < D; ++d)
    for (int64_t n = 0; n < count; ++n) out[d] += weight[n] * to_float(values[n * stride + d]);
}

// A part of one query: out[Dv] (not yet divided), then the reference of its weights and their sum.
template <class T>
static void decode_part(const Problem& p, int64_t bh, int64_t i, Range keys, const Cell* qu, const Cell* qw,
                        float* out) {
  const int64_t b = bh / p.H, h = bh % p.H, Dv = p.Dv;
  const int64_t n = keys.high - keys.low;
  const Cap cap(p);
  float score[DECODE_PART];
  for (int64_t x = 0; x < n; x += LANES) decode_scores<T>(p, b, h, i, keys.low + x, keys.high - 1, qu, qw, score + x);
  for (int64_t x = 0; p.softcap && x < n; x += LANES) store(score + x, cap(load(score + x)));
  for (int64_t x = n; x < round_up(n, LANES); ++x) score[x] = -INF;
  for (int64_t x = 0; x < min_of(n, AHEAD); ++x) {  // the first values, while the weights are computed
    const T* row = key_row<T>(p, p.v_mem, p.v, b, h, keys.low + x);
    for (int64_t d = 0; d < Dv; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
  }
  vf tops = splat(-INF);
  for (int64_t x = 0; x < n; x += LANES) tops = max_of(load(score + x), tops);
  const float top = max_lane(tops), shift = top == -INF ? 0.f : top;  // scores of -inf weigh nothing
  vf sum = {};
  for (int64_t x = 0; x < n; x += LANES) {
    const vf e = exp_of(load(score + x) - splat(shift));
    store(score + x, e);
    sum += e;
  }
  for (int64_t d = 0; d < Dv; ++d) out[d] = 0;
  const int64_t in_memory = clamp(p.M - keys.low, 0, n);
  if (in_memory) weighted_rows(score, row_of<T>(p.v_mem, b, h, keys.low), p.v_mem.s2, in_memory, Dv, out);
  if (n > in_memory)
    weighted_rows(score + in_memory, row_of<T>(p.v, b, h, keys.low + in_memory - p.M), p.v.s2, n - in_memory, Dv, out);
  out[Dv] = top;
  out[Dv + 1] = sum_lanes(sum);
}

template <class T>
static void run_decode(const Problem& p) {
  const int64_t BH = p.B * p.H, D = p.D, Dv = p.Dv, queries = BH * p.L, parts = div_up(p.M + p.L, DECODE_PART);
  const int64_t entry = Dv + 2;
  Buffer partial(queries * parts * entry), shifted(queries * 2 * D), sums(Dv);
  auto qu_of = [&](int64_t bh, int64_t i) {  // q + w: L rows on
    return reinterpret_cast<Cell*>(shifted.data) + (2 * bh * p.L + i) * D;
  };
  for (int64_t bh = 0; bh < BH; ++bh) {
    auto sees = [&](int64_t i) { return visible(p, bh / p.H, i).any(); };
    pack_queries<T>(p, bh / p.H, bh % p.H, 0, p.L, sees, D, qu_of(bh, 0), qu_of(bh, p.L));
  }
  auto part_of = [&](Range seen, int64_t part) -> Range {
    return {max_of(seen.low, part * DECODE_PART), min_of(seen.high, (part + 1) * DECODE_PART)};
  };
  // An item is one (b, h) and part: its keys stay in cache for all the queries, its rows of r for the next
  // batch row.
  parallel_for(p.threads, BH * parts, [&](int64_t item, int) {
    const int64_t bh = item % p.B * p.H + item / p.B / parts, part = item / p.B % parts;
    for (int64_t i = 0; i < p.L; ++i) {
      const Range keys = part_of(visible(p, bh / p.H, i), part);
      if (!keys.any()) continue;
      decode_part<T>(p, bh, i, keys, qu_of(bh, i), qu_of(bh, p.L + i),
                     partial.data + ((bh * p.L + i) * parts + part) * entry);
    }
  });
  for (int64_t x = 0; x < queries; ++x) {
    const int64_t bh = x / p.L, i = x % p.L;
    const Range seen = visible(p, bh / p.H, i);
    T* out = const_cast<T*>(row_of<T>(p.out, bh / p.H, bh % p.H, i));
    float* into = sums.data;
    float top = -INF, total = 0;
    for (int64_t d = 0; d < Dv; ++d) into[d] = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const Range keys = part_of(seen, part);
      if (!keys.any()) continue;
      const float* from = partial.data + (x * parts + part) * entry;
      if (from[Dv + 1] == 0) continue;  // nothing but scores of -inf
      const float raised = from[Dv] > top ? from[Dv] : top;
      const float old_factor = exp_of(top - raised), new_factor = exp_of(from[Dv] - raised);
      for (int64_t d = 0; d < Dv; ++d) into[d] = into[d] * old_factor + from[d] * new_factor;
      total = total * old_factor + from[Dv + 1] * new_factor;
      top = raised;
    }
    const bool empty = !seen.any();
    for (int64_t d = 0; d < Dv; ++d) put(out + d, empty ? 0.f : into[d] / total);
    if (p.lse) p.lse[x] = empty ? -INF : top + log_of(total);
  }
}

// Backward's stats of query i from the largest of its scores and the sum of its weights relative to `top`, which lies
// at most a few e-folds below that: lse, rounded up from no less than the largest, and what that rounding leaves out.
TXL_INLINE void set_stats(const QueryStats& stats, int64_t at, float top, float total) {
  const float lse = top + log_of(total);
  stats.lse[at] = lse;
  stats.norm[at] = 1.f / (total * exp_of(top - lse));
}

// Whether rounding lse to float32 changes the weights of a query that sees keys by more than their own rounding.
TXL_INLINE bool is_large(const Problem& p, int64_t bh, int64_t i) {
  constexpr float LARGE = 64;
  const float lse = p.lse[bh * p.L + i];
  return (lse > LARGE || lse < -LARGE) && visible(p, bh / p.H, i).any();
}

// Stats of the queries of a head whose lse is large, from their scores. scores: the call without values; queries: room
// for both kinds, [2][L][D].
template <class T>
static void few_sums(const Problem& scores, int64_t bh, Cell* queries, const QueryStats& stats) {
  const int64_t b = bh / scores.H, L = scores.L, D = scores.D;
  auto sees = [&](int64_t i) { return visible(scores, b, i).any(); };
  pack_queries<T>(scores, b, bh % scores.H, 0, L, sees, D, queries, queries + L * D);
  for (int64_t i = 0; i < L; ++i) {
    if (!is_large(scores, bh, i)) continue;
    const Range seen = visible(scores, b, i);
    float top = -INF, total = 0;
    for (int64_t j = seen.low; j < seen.high; j += DECODE_PART) {
      float part[2];  // top, sum
      decode_part<T>(scores, bh, i, {j, min_of(j + DECODE_PART, seen.high)}, queries + i * D, queries + (L + i) * D,
                     part);
      if (part[1] == 0) continue;  // nothing but scores of -inf
      const float raised = part[0] > top ? part[0] : top;
      total = total * exp_of(top - raised) + part[1] * exp_of(part[0] - raised);
      top = raised;
    }
    set_stats(stats, bh * L + i, top, total);
  }
}

// Backward for a few queries: keys, values and r are read where they lie and their gradients written
// there, nothing is packed. Scores are summed as decode does, so that lse belongs to them.

constexpr int64_t FEW_PART = 512;  // keys at a time: read three times, from the cache

struct FewScratch {
  float *dq, *p, *ds, *row;  // p, ds: [L][FEW_PART]
  Cell *qu, *qw;
  float *qu_wide, *qw_wide, *dout;  // [L][Dp], dout Dvp

  FewScratch(Arena& a, const Problem& call, const BackwardPlan& z)
      : dq(z.chunks == 1 ? a.take(z.dq_floats()) : nullptr),
        p(a.take(call.L * FEW_PART)),
        ds(a.take(call.L * FEW_PART)),
        row(a.take(max_of(z.Dp, z.Dvp))),
        qu(a.take<Cell>(call.L * z.Dp)),
        qw(a.take<Cell>(call.L * z.Dp)),
        qu_wide(a.take(call.L * z.Dp)),
        qw_wide(a.take(call.L * z.Dp)),
        dout(a.take(call.L * z.Dvp)) {}
};

// p and dS of query i for the keys from j0 on that it sees, relative to j0.
template <class T>
static void few_weights(const Problem& p, const Part& at, int64_t i, int64_t j0, Range keys, const QueryStats& stats,
                        const FewScratch& s, const BackwardPlan& plan) {
  const Cap cap(p);
  const int64_t query = at.bh(p) * p.L + i;
  float *weight = s.p + i * FEW_PART, *gradient = s.ds + i * FEW_PART;
  for (int64_t n = keys.low; n < keys.high; n += LANES) {
    float score[LANES];
    decode_scores<T>(p, at.b, at.h, i, j0 + n, j0 + keys.high - 1, s.qu + i * plan.Dp, s.qw + i * plan.Dp, score);
    vf sums[LANES];
    float tail[LANES] = {};
    TXL_UNROLL(16)
    for (int z = 0; z < LANES; ++z) {
      const T* v = key_row<T>(p, p.v_mem, p.v, at.b, at.h, j0 + min_of(n + z, keys.high - 1));
      int64_t d = 0;
      sums[z] = vf{};
      for (; d + LANES <= p.Dv; d += LANES) sums[z] += load(s.dout + i * plan.Dvp + d) * load(v + d);
      for (; d < p.Dv; ++d) tail[z] += s.dout[i * plan.Dvp + d] * to_float(v[d]);
    }
    const vf dp = sum_each(sums) + load(tail);
    vf x = load(score), slope = splat(1.f);
    if (p.softcap) x = cap(x, slope);
    const vf below = x - splat(stats.lse[query]), e = exp_of(below > 0 ? vf{} : below) * stats.norm[query];
    const vf dS = e * (dp - splat(stats.delta[query])) * slope;
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

// What query i gets from those keys, and the tables from it.
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
  if (z.dr_bias) {
    float* const dr_bias = sums.dr_bias + rho_of(p, i, first) - z.first_rho(p, at.low);
    for (int64_t n = 0; n < count; ++n) dr_bias[n] += gradient[n];
  }
  if (!z.dr) return;
  float* dr = sums.dr + (rho_of(p, i, first) - z.first_rho(p, at.low)) * Dp;
  for (int64_t n = 0; n < count; ++n, dr += Dp)
    for (int64_t d = 0; d < Dp; d += LANES) store(dr + d, load(dr + d) + gradient[n] * load(s.qw_wide + i * Dp + d));
}

// As backward_part.
template <class T>
static void few_part(const Problem& p, const Gradients& g, const BackwardPlan& z, const QueryStats& stats,
                     const Part& at, const FewScratch& s, const Sums& sums) {
  const int64_t D = p.D, Dp = z.Dp, Dv = p.Dv, Dvp = z.Dvp, L = p.L;
  auto sees = [&](int64_t i) { return visible(p, at.b, i).any(); };
  pack_queries<T>(p, at.b, at.h, 0, L, sees, Dp, s.qu, s.qw);
  for (int64_t i = 0; i < L; ++i) {
    const T* dout = sees(i) ? row_of<T>(g.dout, at.b, at.h, i) : nullptr;
    for (int64_t d = 0; d < Dvp; ++d) s.dout[i * Dvp + d] = dout && d < Dv ? to_float(dout[d]) : 0.f;
    for (int64_t d = 0; d < Dp; ++d) {
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
      few_weights<T>(p, at, i, j0, seen[i], stats, s, z);
      few_query<T>(p, z, at, i, j0, seen[i], s, sums);
    }
    for (int64_t n = 0; n < count; ++n) {
      if (T* const dk = key_gradient<T>(p, g.dk_mem, g.dk, at, j0 + n))
        few_key(seen, L, n, s.ds, s.qu_wide, Dp, D, s.row, dk);
      if (T* const dv = key_gradient<T>(p, g.dv_mem, g.dv, at, j0 + n))
        few_key(seen, L, n, s.p, s.dout, Dvp, Dv, s.row, dv);
    }
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
