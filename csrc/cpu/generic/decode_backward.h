// Backward of decode: keys, values and r are read where they lie and their gradients written
// there, nothing is packed. Scores are summed as decode does, so that lse belongs to them.
#pragma once
#include "backward_plan.h"
#include "decode.h"

namespace txl::TXL_ISA {
namespace {

// Stats of the queries of a head whose lse is large, from their scores. scores: the call without values; queries: room
// for both kinds, [L][D] and [L][Dr].
template <class T>
static void decode_stats(const Problem& scores, int64_t bh, Packed* queries, const QueryStats& stats) {
  const int64_t b = bh / scores.H, L = scores.L, D = scores.D;
  auto sees = [&](int64_t i) { return visible(scores, b, i).any(); };
  pack_queries<T>(scores, b, bh % scores.H, 0, L, sees, D, scores.Dr, queries, queries + L * D);
  for (int64_t i = 0; i < L; ++i) {
    if (!is_large(scores, bh, i)) continue;
    const Range seen = visible(scores, b, i);
    float top = -INF, total = 0;
    for (int64_t j = seen.low; j < seen.high; j += DECODE_PART) {
      float part[2];  // top, sum
      decode_part<T>(scores, bh, i, {j, min_of(j + DECODE_PART, seen.high)}, queries + i * D,
                     queries + L * D + i * scores.Dr, part);
      if (part[1] == 0) continue;  // nothing but scores of -inf
      const float raised = part[0] > top ? part[0] : top;
      total = total * exp_of(top - raised) + part[1] * exp_of(part[0] - raised);
      top = raised;
    }
    set_stats(stats, bh * L + i, top, total);
  }
}

constexpr int64_t DECODE_BACKWARD_PART = 512;  // keys at a time: read three times, from the cache

// Rows of a group's queries: query i of its head g is row g * L + i.
struct DecodeBackwardScratch {
  float *dq, *p, *ds, *row;  // p, ds: [rows][DECODE_BACKWARD_PART]
  Packed *qu, *qw;
  float *qu_wide, *qw_wide, *dout;  // [rows][Dp], Drp and Dvp

  DecodeBackwardScratch(Arena& a, const Problem& call, const BackwardPlan& plan)
      : dq(plan.own_dq() ? a.take(plan.dq_floats()) : nullptr),
        p(a.take(plan.heads * call.L * DECODE_BACKWARD_PART)),
        ds(a.take(plan.heads * call.L * DECODE_BACKWARD_PART)),
        row(a.take(max_of(max_of(plan.Dp, plan.Drp), plan.Dvp))),
        qu(a.take<Packed>(plan.heads * call.L * plan.Dp)),
        qw(a.take<Packed>(plan.heads * call.L * plan.Drp)),
        qu_wide(a.take(plan.heads * call.L * plan.Dp)),
        qw_wide(a.take(plan.heads * call.L * plan.Drp)),
        dout(a.take(plan.heads * call.L * plan.Dvp)) {}
};

// p and dS of a row, query i of head h, for the keys from j0 on that it sees, relative to j0, all of which have
// positions or none.
template <class T>
static void decode_backward_weights(const Problem& p, const Part& at, int64_t h, int64_t i, int64_t n0, int64_t j0,
                                    Range keys, bool positions, const QueryStats& stats, const DecodeBackwardScratch& s,
                                    const BackwardPlan& plan) {
  const Cap cap(p);
  const int64_t query = (at.b * p.H + h) * p.L + i;
  float *weight = s.p + n0 * DECODE_BACKWARD_PART, *gradient = s.ds + n0 * DECODE_BACKWARD_PART;
  for (int64_t n = keys.low; n < keys.high; n += LANES) {
    float score[LANES];
    decode_scores<T>(p, at.b, h, i, j0 + n, j0 + keys.high - 1, positions, s.qu + n0 * plan.Dp, s.qw + n0 * plan.Drp,
                     score);
    vf sums[LANES];
    float tail[LANES] = {};
    TXL_UNROLL(16)
    for (int z = 0; z < LANES; ++z) {
      const T* v = key_row<T>(p, p.v_mem, p.v, at.b, at.hk, j0 + min_of(n + z, keys.high - 1));
      int64_t d = 0;
      sums[z] = vf{};
      for (; d + LANES <= p.Dv; d += LANES) sums[z] += load(s.dout + n0 * plan.Dvp + d) * load(v + d);
      for (; d < p.Dv; ++d) tail[z] += s.dout[n0 * plan.Dvp + d] * to_float(v[d]);
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

// out[D] = sum over the rows of weight[i][n] * x[i], of those that see the key; row i is of query i % L; `row` for the
// sum.
template <class T>
TXL_INLINE void decode_backward_key(const Range* seen, int64_t L, int64_t rows, int64_t n, const float* weight,
                                    const float* x, int64_t Dp, int64_t D, float* row, T* out) {
  for (int64_t d = 0; d < Dp; d += LANES) {
    vf sum = {};
    for (int64_t i = 0; i < rows; ++i)
      if (n >= seen[i % L].low && n < seen[i % L].high)
        sum += weight[i * DECODE_BACKWARD_PART + n] * load(x + i * Dp + d);
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

// Adds the keys' part of dq of row n0, which is query i, and of du.
template <class T>
static void decode_backward_content(const Problem& p, const BackwardPlan& plan, const Part& at, int64_t i, int64_t n0,
                                    int64_t j0, Range keys, const DecodeBackwardScratch& s, const Sums& sums) {
  const int64_t D = p.D, Dp = plan.Dp, first = j0 + keys.low, count = keys.high - keys.low;
  const float* gradient = s.ds + n0 * DECODE_BACKWARD_PART + keys.low;
  const int64_t in_memory = clamp(p.M - first, 0, count);
  memset(s.row, 0, sizeof(float) * Dp);
  if (in_memory) weighted_rows(gradient, row_of<T>(p.k_mem, at.b, at.hk, first), p.k_mem.s2, in_memory, D, s.row);
  if (count > in_memory)
    weighted_rows(gradient + in_memory, row_of<T>(p.k, at.b, at.hk, first + in_memory - p.M), p.k.s2, count - in_memory,
                  D, s.row);
  add_to_both(s.row, Dp, sums.du, sums.dq + i * Dp);
}

// Adds the part that the tables' rows for those keys have in dq_pos of row n0, which is query i of head h, and in dw;
// and the query's part of dr and dr_bias.
template <class T>
static void decode_backward_positions(const Problem& p, const BackwardPlan& plan, const Part& at, int64_t h, int64_t i,
                                      int64_t n0, int64_t j0, Range keys, const DecodeBackwardScratch& s,
                                      const Sums& sums) {
  const int64_t Drp = plan.Drp, first = j0 + keys.low, count = keys.high - keys.low;
  const float* gradient = s.ds + n0 * DECODE_BACKWARD_PART + keys.low;
  if (plan.position) {
    memset(s.row, 0, sizeof(float) * Drp);
    weighted_rows(gradient, row_of<T>(p.r, h, p.zero_row + p.M + i - first, 0), -p.r.s1, count, p.Dr, s.row);
    add_to_both(s.row, Drp, sums.dw, sums.dq_pos + i * Drp);
  }
  if (plan.dr_bias) {
    float* const dr_bias = sums.dr_bias + rho_of(p, i, first) - plan.first_rho(p, at.low);
    for (int64_t n = 0; n < count; ++n) dr_bias[n] += gradient[n];
  }
  if (!plan.dr) return;
  float* dr = sums.dr + (rho_of(p, i, first) - plan.first_rho(p, at.low)) * Drp;
  for (int64_t n = 0; n < count; ++n, dr += Drp)
    for (int64_t d = 0; d < Drp; d += LANES) store(dr + d, load(dr + d) + gradient[n] * load(s.qw_wide + n0 * Drp + d));
}

// As backward_part; of_head: the sums of each head of the group.
template <class T, class OfHead>
static void decode_backward_part(const Problem& p, const Gradients& g, const BackwardPlan& plan,
                                 const QueryStats& stats, const Part& at, const DecodeBackwardScratch& s,
                                 const OfHead& of_head) {
  const int64_t D = p.D, Dp = plan.Dp, Drp = plan.Drp, Dv = p.Dv, Dvp = plan.Dvp, L = p.L, rows = plan.heads * L;
  auto sees = [&](int64_t i) { return visible(p, at.b, i).any(); };
  for (int64_t x = 0; x < plan.heads; ++x)
    pack_queries<T>(p, at.b, at.hk * plan.heads + x, 0, L, sees, Dp, Drp, s.qu + x * L * Dp, s.qw + x * L * Drp);
  for (int64_t n = 0; n < rows; ++n) {
    const T* dout = sees(n % L) ? row_of<T>(g.dout, at.b, at.hk * plan.heads + n / L, n % L) : nullptr;
    const float share = stats.share_of((at.b * p.H + at.hk * plan.heads) * L + n);
    for (int64_t d = 0; d < Dvp; ++d) s.dout[n * Dvp + d] = dout && d < Dv ? to_float(dout[d]) * share : 0.f;
    for (int64_t d = 0; d < Dp; ++d) s.qu_wide[n * Dp + d] = to_float(s.qu[n * Dp + d]);
    for (int64_t d = 0; plan.dr && d < Drp; ++d) s.qw_wide[n * Drp + d] = to_float(s.qw[n * Drp + d]);
  }
  for (int64_t j0 = at.low; j0 < at.high; j0 += DECODE_BACKWARD_PART) {
    const int64_t count = min_of(DECODE_BACKWARD_PART, at.high - j0);
    Range seen[DECODE_L];
    for (int64_t i = 0; i < L; ++i) {
      const Range all = visible(p, at.b, i);
      seen[i] = {clamp(all.low - j0, 0, count), clamp(all.high - j0, 0, count)};
    }
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t h = at.hk * plan.heads + n / L, i = n % L;
      if (!seen[i].any()) continue;
      const DecodeRanges ranges(p, i, {j0 + seen[i].low, j0 + seen[i].high});
      for (int z = 0; z < 3; ++z) {
        const Range keys = {ranges.part[z].low - j0, ranges.part[z].high - j0};
        decode_backward_weights<T>(p, at, h, i, n, j0, keys, DecodeRanges::has_positions(z), stats, s, plan);
      }
      const Sums sums = of_head(n / L);
      if (plan.content) decode_backward_content<T>(p, plan, at, i, n, j0, seen[i], s, sums);
      const Range inside = {ranges.part[1].low - j0, ranges.part[1].high - j0};
      if (inside.any()) decode_backward_positions<T>(p, plan, at, h, i, n, j0, inside, s, sums);
    }
    for (int64_t n = 0; n < count; ++n) {
      if (T* const dk = key_gradient<T>(p, g.dk_mem, g.dk, at, j0 + n))
        decode_backward_key(seen, L, rows, n, s.ds, s.qu_wide, Dp, D, s.row, dk);
      if (T* const dv = key_gradient<T>(p, g.dv_mem, g.dv, at, j0 + n))
        decode_backward_key(seen, L, rows, n, s.p, s.dout, Dvp, Dv, s.row, dv);
    }
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
