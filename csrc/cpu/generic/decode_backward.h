// Backward of decode: keys, values and r are read where they lie and their gradients written
// there, nothing is packed. Scores are summed as decode does, so that lse belongs to them.
#pragma once
#include "backward_plan.h"
#include "decode.h"

namespace txl::TXL_ISA {
namespace {

// Stats of the queries of a head whose lse is large, from their scores. scores: the call without values; queries: room
// for both kinds, [2][L][D].
template <class T>
static void decode_stats(const Problem& scores, int64_t bh, Packed* queries, const QueryStats& stats) {
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

constexpr int64_t DECODE_BACKWARD_PART = 512;  // keys at a time: read three times, from the cache

struct DecodeBackwardScratch {
  float *dq, *p, *ds, *row;  // p, ds: [L][DECODE_BACKWARD_PART]
  Packed *qu, *qw;
  float *qu_wide, *qw_wide, *dout;  // [L][Dp], dout Dvp

  DecodeBackwardScratch(Arena& a, const Problem& call, const BackwardPlan& plan)
      : dq(plan.chunks == 1 ? a.take(plan.dq_floats()) : nullptr),
        p(a.take(call.L * DECODE_BACKWARD_PART)),
        ds(a.take(call.L * DECODE_BACKWARD_PART)),
        row(a.take(max_of(plan.Dp, plan.Dvp))),
        qu(a.take<Packed>(call.L * plan.Dp)),
        qw(a.take<Packed>(call.L * plan.Dp)),
        qu_wide(a.take(call.L * plan.Dp)),
        qw_wide(a.take(call.L * plan.Dp)),
        dout(a.take(call.L * plan.Dvp)) {}
};

// p and dS of query i for the keys from j0 on that it sees, relative to j0.
template <class T>
static void decode_backward_weights(const Problem& p, const Part& at, int64_t i, int64_t j0, Range keys,
                                    const QueryStats& stats, const DecodeBackwardScratch& s, const BackwardPlan& plan) {
  const Cap cap(p);
  const int64_t query = at.bh(p) * p.L + i;
  float *weight = s.p + i * DECODE_BACKWARD_PART, *gradient = s.ds + i * DECODE_BACKWARD_PART;
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
TXL_INLINE void decode_backward_key(const Range* seen, int64_t L, int64_t n, const float* weight, const float* x,
                                    int64_t Dp, int64_t D, float* row, T* out) {
  for (int64_t d = 0; d < Dp; d += LANES) {
    vf sum = {};
    for (int64_t i = 0; i < L; ++i)
      if (n >= seen[i].low && n < seen[i].high) sum += weight[i * DECODE_BACKWARD_PART + n] * load(x + i * Dp + d);
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

// Adds what those keys contribute to dq of query i, and what it contributes to the gradients of the tables.
template <class T>
static void decode_backward_query(const Problem& p, const BackwardPlan& plan, const Part& at, int64_t i, int64_t j0,
                                  Range keys, const DecodeBackwardScratch& s, const Sums& sums) {
  const int64_t D = p.D, Dp = plan.Dp, first = j0 + keys.low, count = keys.high - keys.low;
  const float* gradient = s.ds + i * DECODE_BACKWARD_PART + keys.low;
  if (plan.content) {
    const int64_t in_memory = clamp(p.M - first, 0, count);
    memset(s.row, 0, sizeof(float) * Dp);
    if (in_memory) weighted_rows(gradient, row_of<T>(p.k_mem, at.b, at.h, first), p.k_mem.s2, in_memory, D, s.row);
    if (count > in_memory)
      weighted_rows(gradient + in_memory, row_of<T>(p.k, at.b, at.h, first + in_memory - p.M), p.k.s2,
                    count - in_memory, D, s.row);
    add_to_both(s.row, Dp, sums.du, sums.dq + i * Dp);
  }
  if (plan.position) {
    memset(s.row, 0, sizeof(float) * Dp);
    weighted_rows(gradient, row_of<T>(p.r, at.h, p.zero_row + p.M + i - first, 0), -p.r.s1, count, D, s.row);
    add_to_both(s.row, Dp, sums.dw, sums.dq + i * Dp);
  }
  if (plan.dr_bias) {
    float* const dr_bias = sums.dr_bias + rho_of(p, i, first) - plan.first_rho(p, at.low);
    for (int64_t n = 0; n < count; ++n) dr_bias[n] += gradient[n];
  }
  if (!plan.dr) return;
  float* dr = sums.dr + (rho_of(p, i, first) - plan.first_rho(p, at.low)) * Dp;
  for (int64_t n = 0; n < count; ++n, dr += Dp)
    for (int64_t d = 0; d < Dp; d += LANES) store(dr + d, load(dr + d) + gradient[n] * load(s.qw_wide + i * Dp + d));
}

// As backward_part.
template <class T>
static void decode_backward_part(const Problem& p, const Gradients& g, const BackwardPlan& plan,
                                 const QueryStats& stats, const Part& at, const DecodeBackwardScratch& s,
                                 const Sums& sums) {
  const int64_t D = p.D, Dp = plan.Dp, Dv = p.Dv, Dvp = plan.Dvp, L = p.L;
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
  for (int64_t j0 = at.low; j0 < at.high; j0 += DECODE_BACKWARD_PART) {
    const int64_t count = min_of(DECODE_BACKWARD_PART, at.high - j0);
    Range seen[DECODE_L];
    for (int64_t i = 0; i < L; ++i) {
      const Range all = visible(p, at.b, i);
      seen[i] = {clamp(all.low - j0, 0, count), clamp(all.high - j0, 0, count)};
      if (!seen[i].any()) continue;
      decode_backward_weights<T>(p, at, i, j0, seen[i], stats, s, plan);
      decode_backward_query<T>(p, plan, at, i, j0, seen[i], s, sums);
    }
    for (int64_t n = 0; n < count; ++n) {
      if (T* const dk = key_gradient<T>(p, g.dk_mem, g.dk, at, j0 + n))
        decode_backward_key(seen, L, n, s.ds, s.qu_wide, Dp, D, s.row, dk);
      if (T* const dv = key_gradient<T>(p, g.dv_mem, g.dv, at, j0 + n))
        decode_backward_key(seen, L, n, s.p, s.dout, Dvp, Dv, s.row, dv);
    }
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
