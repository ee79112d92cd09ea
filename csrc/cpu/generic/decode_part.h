// A part of the keys against one of few queries: keys, values and r are read where they lie, nothing is packed.
#pragma once
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t DECODE_L = 4;                   // above this, packing pays
constexpr int64_t DECODE_PART = 512;              // keys of a part
constexpr int64_t AHEAD = LANES < 8 ? 8 : LANES;  // rows of prefetch: three streams are more than the hardware follows

// Loads the cache line of column d of the row as many bytes further on as AHEAD rows of floats, once a line, into the
// second level of the cache: loads into the first are few at a time, and those that wait keep others from going on. The
// address may be no row's; it is not read.
template <class T>
TXL_INLINE void prefetch(const T* row, int64_t stride, int64_t d) {
  constexpr int64_t line = 64 / sizeof(T);
  if (d % line == 0)
    __builtin_prefetch(
        reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(row + d) + AHEAD * stride * sizeof(float)), 0, 2);
}

static bool decode_fits(const Problem& p) { return p.L <= DECODE_L && !p.drop_below; }

// score[0..LANES) of the keys from j on, widths summed in lanes: qu . k, and if POSITIONS qw . r. Keys past `last`
// count as the last one.
template <bool POSITIONS, class T>
TXL_INLINE void decode_products(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j, int64_t last,
                                const Packed* qu, const Packed* qw, float* score) {
  vf sum[LANES];
  float tail[LANES];
  const int64_t k_stride = (j < p.M ? p.k_mem : p.k).s2;
  for (int first = 0; first < LANES; first += 4) {  // four keys at a time: their pointers stay in registers
    const T *k[4], *r[4];
    vf four[4] = {};
    TXL_UNROLL(4)
    for (int z = 0; z < 4; ++z) {
      const int64_t key = min_of(j + first + z, last);
      k[z] = key_row<T>(p, p.k_mem, p.k, b, key_head(p, h), key);
      if (POSITIONS) r[z] = row_of<T>(p.r, h, p.zero_row + p.M + i - key, 0);
    }
    const int64_t both = POSITIONS ? min_of(p.D, p.Dr) : 0;
    int64_t d = 0;
    for (; d + LANES <= both; d += LANES) {
      const vf u = load(qu + d), w = load(qw + d);
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) {
        prefetch(k[z], k_stride, d);
        four[z] += u * load(k[z] + d);
        prefetch(r[z], -p.r.s1, d), four[z] += w * load(r[z] + d);
      }
    }
    int64_t c = d;  // the columns of r that are left
    for (; d + LANES <= p.D; d += LANES) {
      const vf u = load(qu + d);
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) prefetch(k[z], k_stride, d), four[z] += u * load(k[z] + d);
    }
    for (; POSITIONS && c + LANES <= p.Dr; c += LANES) {
      const vf w = load(qw + c);
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) prefetch(r[z], -p.r.s1, c), four[z] += w * load(r[z] + c);
    }
    const int64_t joint = POSITIONS && d == c ? both : d;  // columns of both that are left come first, in turns
    TXL_UNROLL(4)
    for (int z = 0; z < 4; ++z) {
      sum[first + z] = four[z];
      tail[first + z] = 0;
      for (int64_t x = d; x < joint; ++x) {
        tail[first + z] += to_float(qu[x]) * to_float(k[z][x]);
        tail[first + z] += to_float(qw[x]) * to_float(r[z][x]);
      }
      for (int64_t x = joint; x < p.D; ++x) tail[first + z] += to_float(qu[x]) * to_float(k[z][x]);
      for (int64_t x = d == c ? joint : c; POSITIONS && x < p.Dr; ++x)
        tail[first + z] += to_float(qw[x]) * to_float(r[z][x]);
    }
  }
  const vf total = sum_each(sum) + load(tail);
  store(score, total);
}

// The keys of a range as up to three of which all or none are at distances with a row in the tables.
struct DecodeRanges {
  Range part[3];
  DecodeRanges(const Problem& p, int64_t i, Range keys) {
    const Range inside = inside_table(p, i);
    const int64_t low = clamp(inside.low, keys.low, keys.high), high = clamp(inside.high, low, keys.high);
    part[0] = {keys.low, low}, part[1] = {low, high}, part[2] = {high, keys.high};
  }
  static bool has_positions(int n) { return n == 1; }
};

// The same with r_bias, before the cap; without either where the keys have no positions.
template <class T>
TXL_INLINE void decode_scores(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j, int64_t last,
                              bool positions, const Packed* qu, const Packed* qw, float* score) {
  if (p.r.data && positions)
    decode_products<true, T>(p, b, h, i, j, last, qu, qw, score);
  else
    decode_products<false, T>(p, b, h, i, j, last, qu, qw, score);
  for (int64_t z = 0; p.r_bias.data && positions && z < LANES; ++z)
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

// Caps n scores and turns them into weights e^(score - reference), in place; tells the reference, the largest of them,
// and the weights' sum. Room for whole vectors is written.
TXL_INLINE void softmax_of_part(const Cap& cap, int64_t n, float* score, float* reference_and_sum) {
  for (int64_t x = 0; cap.cap && x < n; x += LANES) store(score + x, cap(load(score + x)));
  for (int64_t x = n; x < round_up(n, LANES); ++x) score[x] = -INF;
  vf tops = splat(-INF);
  for (int64_t x = 0; x < n; x += LANES) tops = max_of(load(score + x), tops);
  const float top = max_lane(tops), shift = top == -INF ? 0.f : top;  // scores of -inf weigh nothing
  vf sum = {};
  for (int64_t x = 0; x < n; x += LANES) {
    const vf e = exp_of(load(score + x) - splat(shift));
    store(score + x, e);
    sum += e;
  }
  reference_and_sum[0] = top, reference_and_sum[1] = sum_lanes(sum);
}

// out[Dv] += the values of the keys times their weights.
template <class T>
TXL_INLINE void add_values(const Problem& p, int64_t b, int64_t hk, Range keys, const float* weight, float* out) {
  const int64_t n = keys.high - keys.low, in_memory = clamp(p.M - keys.low, 0, n);
  if (in_memory) weighted_rows(weight, row_of<T>(p.v_mem, b, hk, keys.low), p.v_mem.s2, in_memory, p.Dv, out);
  if (n > in_memory)
    weighted_rows(weight + in_memory, row_of<T>(p.v, b, hk, keys.low + in_memory - p.M), p.v.s2, n - in_memory, p.Dv,
                  out);
}

// A part of one query: out[Dv] (not yet divided), then the reference of its weights and their sum.
template <class T>
static void decode_part(const Problem& p, int64_t bh, int64_t i, Range keys, const Packed* qu, const Packed* qw,
                        float* out) {
  const int64_t b = bh / p.H, h = bh % p.H, hk = key_head(p, h), Dv = p.Dv;
  const int64_t n = keys.high - keys.low;
  const Cap cap(p);
  const DecodeRanges ranges(p, i, keys);
  float score[DECODE_PART + LANES];  // a range is written to whole vectors, the next one over what is too much
  for (int z = 0; z < 3; ++z)
    for (int64_t j = ranges.part[z].low; j < ranges.part[z].high; j += LANES)
      decode_scores<T>(p, b, h, i, j, ranges.part[z].high - 1, DecodeRanges::has_positions(z), qu, qw,
                       score + (j - keys.low));
  for (int64_t x = 0; x < min_of(n, AHEAD); ++x) {  // the first values, while the weights are computed
    const T* row = key_row<T>(p, p.v_mem, p.v, b, hk, keys.low + x);
    for (int64_t d = 0; d < Dv; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
  }
  softmax_of_part(cap, n, score, out + Dv);
  for (int64_t d = 0; d < Dv; ++d) out[d] = 0;
  add_values<T>(p, b, hk, keys, score, out);
}

}  // namespace
}  // namespace txl::TXL_ISA
