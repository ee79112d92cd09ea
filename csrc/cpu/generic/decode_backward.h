// Backward of decode. Keys, values and r are read where they lie, and gradients of keys and values are written row by
// row; nothing is packed. Scores are summed in decode's order, so that they match its lse.
#pragma once
#include "backward_plan.h"
#include "decode.h"

namespace txl::TXL_ISA {
namespace {

// Recomputes lse and norm of those queries of a head whose lse is large. scores: the call without values; queries: room
// for qu [L][D] and qw [L][Dr].
template <class T>
static void decode_recompute_large_lse(const Problem& scores, int64_t bh, Packed* queries, const QueryStats& stats) {
  const int64_t b = bh / scores.H, L = scores.L, D = scores.D;
  auto sees = [&](int64_t i) { return visible(scores, b, i).any(); };
  pack_queries<T>(scores, b, bh % scores.H, 0, L, sees, D, scores.Dr, queries, queries + L * D);
  for (int64_t i = 0; i < L; ++i) {
    if (!has_large_lse(scores, bh, i)) continue;
    const Range seen = visible(scores, b, i);
    float max = -INF, sum = 0;
    for (int64_t j = seen.low; j < seen.high; j += DECODE_PART) {
      float part[2];  // max, sum
      decode_part<T>(scores, bh, i, {j, min_of(j + DECODE_PART, seen.high)}, queries + i * D,
                     queries + L * D + i * scores.Dr, part);
      if (part[1] == 0) continue;  // all scores are -inf
      const float new_max = part[0] > max ? part[0] : max;
      sum = sum * exp_of(max - new_max) + part[1] * exp_of(part[0] - new_max);
      max = new_max;
    }
    set_stats(stats, bh * L + i, max, sum);
  }
}

constexpr int64_t DECODE_BACKWARD_PART = 512;  // keys at a time, which are read three times, from the cache

// One thread's working memory. Query i of the group's head g is row g * L + i.
struct DecodeBackwardScratch {
  float *dq, *p, *ds, *row;  // p, ds: [rows][DECODE_BACKWARD_PART]
  Packed *qu, *qw;
  float *qu_float, *qw_float, *dout;  // [rows][Dp], Drp and Dvp

  DecodeBackwardScratch(Arena& a, const Problem& call, const BackwardPlan& plan)
      : dq(plan.completes_dq() ? a.allocate(plan.dq_floats()) : nullptr),
        p(a.allocate(plan.heads * call.L * DECODE_BACKWARD_PART)),
        ds(a.allocate(plan.heads * call.L * DECODE_BACKWARD_PART)),
        row(a.allocate(max_of(max_of(plan.Dp, plan.Drp), plan.Dvp))),
        qu(a.allocate<Packed>(plan.heads * call.L * plan.Dp)),
        qw(a.allocate<Packed>(plan.heads * call.L * plan.Drp)),
        qu_float(a.allocate(plan.heads * call.L * plan.Dp)),
        qw_float(a.allocate(plan.heads * call.L * plan.Drp)),
        dout(a.allocate(plan.heads * call.L * plan.Dvp)) {}
};

// Computes P and dS of row n0, which is query i of head h, for `keys`, relative to j0, all of which it sees. positions:
// whether the keys have rows in the tables.
template <class T>
static void decode_backward_weights(const Problem& p, const KeyChunk& chunk, int64_t h, int64_t i, int64_t n0,
                                    int64_t j0, Range keys, bool positions, const QueryStats& stats,
                                    const DecodeBackwardScratch& s, const BackwardPlan& plan) {
  const Softcap softcap(p);
  const int64_t query = (chunk.b * p.H + h) * p.L + i;
  float *weight = s.p + n0 * DECODE_BACKWARD_PART, *gradient = s.ds + n0 * DECODE_BACKWARD_PART;
  for (int64_t n = keys.low; n < keys.high; n += LANES) {
    float score[LANES];
    decode_scores<T>(p, chunk.b, h, i, j0 + n, j0 + keys.high - 1, positions, s.qu + n0 * plan.Dp, s.qw + n0 * plan.Drp,
                     score);
    vf sums[LANES];
    float tail[LANES] = {};
    TXL_UNROLL(16)
    for (int z = 0; z < LANES; ++z) {
      const T* v = key_row<T>(p, p.v_mem, p.v, chunk.b, chunk.hk, j0 + min_of(n + z, keys.high - 1));
      int64_t d = 0;
      sums[z] = vf{};
      for (; d + LANES <= p.Dv; d += LANES) sums[z] += load(s.dout + n0 * plan.Dvp + d) * load(v + d);
      for (; d < p.Dv; ++d) tail[z] += s.dout[n0 * plan.Dvp + d] * to_float(v[d]);
    }
    const vf dp = reduce_add_rows(sums) + load(tail);
    vf x = load(score), derivative = splat(1.f);
    if (p.softcap) x = softcap(x, derivative);
    const vf exponent = x - splat(stats.lse[query]), e = exp_of(exponent > 0 ? vf{} : exponent) * stats.norm[query];
    const vf dS = e * (dp - splat(stats.delta[query])) * derivative;
    if (n + LANES <= keys.high) {
      store(weight + n, e);
      store(gradient + n, dS);
    } else {
      for (int64_t z = 0; n + z < keys.high; ++z) weight[n + z] = e[z], gradient[n + z] = dS[z];
    }
  }
}

// out[D] = the sum over the rows that see key n of weight[i][n] * x[i]. Row i is query i % L; row: room for the sum.
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

// Adds a row to both sum and dq.
TXL_INLINE void add_to_both(const float* row, int64_t Dp, float* sum, float* dq) {
  for (int64_t d = 0; d < Dp; d += LANES) {
    store(sum + d, load(sum + d) + load(row + d));
    store(dq + d, load(dq + d) + load(row + d));
  }
}

// Adds the content term of dq of row n0, which is query i, and of du, for `keys`, relative to j0.
template <class T>
static void decode_backward_content(const Problem& p, const BackwardPlan& plan, const KeyChunk& chunk, int64_t i,
                                    int64_t n0, int64_t j0, Range keys, const DecodeBackwardScratch& s,
                                    const GradientSums& sums) {
  const float* gradient = s.ds + n0 * DECODE_BACKWARD_PART + keys.low;
  memset(s.row, 0, sizeof(float) * plan.Dp);
  weighted_key_rows<T>(p, p.k_mem, p.k, chunk.b, chunk.hk, {j0 + keys.low, j0 + keys.high}, gradient, p.D, s.row);
  add_to_both(s.row, plan.Dp, sums.du, sums.dq + i * plan.Dp);
}

// Adds the positional term of dq_pos of row n0, which is query i of head h, and of dw, dr and dr_bias, for `keys`,
// relative to j0, which have rows in the tables.
template <class T>
static void decode_backward_positions(const Problem& p, const BackwardPlan& plan, const KeyChunk& chunk, int64_t h,
                                      int64_t i, int64_t n0, int64_t j0, Range keys, const DecodeBackwardScratch& s,
                                      const GradientSums& sums) {
  const int64_t Drp = plan.Drp, first = j0 + keys.low, count = keys.high - keys.low;
  const float* gradient = s.ds + n0 * DECODE_BACKWARD_PART + keys.low;
  if (plan.wants_position) {
    memset(s.row, 0, sizeof(float) * Drp);
    weighted_rows(gradient, row_of<T>(p.r, h, p.zero_row + p.M + i - first, 0), -p.r.s1, count, p.Dr, s.row);
    add_to_both(s.row, Drp, sums.dw, sums.dq_pos + i * Drp);
  }
  if (plan.wants_dr_bias) {
    float* const dr_bias = sums.dr_bias + rho_of(p, i, first) - plan.first_rho(p, chunk.low);
    for (int64_t n = 0; n < count; ++n) dr_bias[n] += gradient[n];
  }
  if (!plan.wants_dr) return;
  float* dr = sums.dr + (rho_of(p, i, first) - plan.first_rho(p, chunk.low)) * Drp;
  for (int64_t n = 0; n < count; ++n, dr += Drp)
    for (int64_t d = 0; d < Drp; d += LANES)
      store(dr + d, load(dr + d) + gradient[n] * load(s.qw_float + n0 * Drp + d));
}

// Computes dk and dv of a chunk's keys, and adds the gradients of its batch row to the sums of each query head,
// sums_of(g).
template <class T, class SumsOf>
static void decode_backward_chunk(const Problem& p, const Gradients& g, const BackwardPlan& plan,
                                  const QueryStats& stats, const KeyChunk& chunk, const DecodeBackwardScratch& s,
                                  const SumsOf& sums_of) {
  const int64_t D = p.D, Dp = plan.Dp, Drp = plan.Drp, Dv = p.Dv, Dvp = plan.Dvp, L = p.L, rows = plan.heads * L;
  auto sees = [&](int64_t i) { return visible(p, chunk.b, i).any(); };
  for (int64_t x = 0; x < plan.heads; ++x)
    pack_queries<T>(p, chunk.b, chunk.hk * plan.heads + x, 0, L, sees, Dp, Drp, s.qu + x * L * Dp, s.qw + x * L * Drp);
  for (int64_t n = 0; n < rows; ++n) {
    const T* dout = sees(n % L) ? row_of<T>(g.dout, chunk.b, chunk.hk * plan.heads + n / L, n % L) : nullptr;
    const float share = stats.key_share((chunk.b * p.H + chunk.hk * plan.heads) * L + n);
    for (int64_t d = 0; d < Dvp; ++d) s.dout[n * Dvp + d] = dout && d < Dv ? to_float(dout[d]) * share : 0.f;
    for (int64_t d = 0; d < Dp; ++d) s.qu_float[n * Dp + d] = to_float(s.qu[n * Dp + d]);
    for (int64_t d = 0; plan.wants_dr && d < Drp; ++d) s.qw_float[n * Drp + d] = to_float(s.qw[n * Drp + d]);
  }
  for (int64_t j0 = chunk.low; j0 < chunk.high; j0 += DECODE_BACKWARD_PART) {
    const int64_t count = min_of(DECODE_BACKWARD_PART, chunk.high - j0);
    Range seen[DECODE_L];
    for (int64_t i = 0; i < L; ++i) {
      const Range all = visible(p, chunk.b, i);
      seen[i] = {clamp(all.low - j0, 0, count), clamp(all.high - j0, 0, count)};
    }
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t h = chunk.hk * plan.heads + n / L, i = n % L;
      if (!seen[i].any()) continue;
      const DecodeRanges ranges(p, i, {j0 + seen[i].low, j0 + seen[i].high});
      for (int z = 0; z < 3; ++z) {
        const Range keys = {ranges.part[z].low - j0, ranges.part[z].high - j0};
        decode_backward_weights<T>(p, chunk, h, i, n, j0, keys, DecodeRanges::has_positions(z), stats, s, plan);
      }
      const GradientSums sums = sums_of(n / L);
      if (plan.wants_content) decode_backward_content<T>(p, plan, chunk, i, n, j0, seen[i], s, sums);
      const Range inside = {ranges.part[1].low - j0, ranges.part[1].high - j0};
      if (inside.any()) decode_backward_positions<T>(p, plan, chunk, h, i, n, j0, inside, s, sums);
    }
    for (int64_t n = 0; n < count; ++n) {
      if (T* const dk = key_gradient_row<T>(p, g.dk_mem, g.dk, chunk, j0 + n))
        decode_backward_key(seen, L, rows, n, s.ds, s.qu_float, Dp, D, s.row, dk);
      if (T* const dv = key_gradient_row<T>(p, g.dv_mem, g.dv, chunk, j0 + n))
        decode_backward_key(seen, L, rows, n, s.p, s.dout, Dvp, Dv, s.row, dv);
    }
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
