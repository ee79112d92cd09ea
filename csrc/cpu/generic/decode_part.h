// Decode: attention of one query over one part of the keys. Keys, values and r are read where they lie, nothing is
// packed.
#pragma once
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t DECODE_L = 4;       // maximum of queries; with more, packing pays
constexpr int64_t DECODE_PART = 512;  // keys of a part
constexpr int64_t PREFETCH_ROWS =
    LANES < 8 ? 8 : LANES;  // prefetch distance: the hardware prefetcher does not follow three streams

// Prefetches into the L2 cache the line at column d of the row that is PREFETCH_ROWS rows of floats further on, once
// for each line. Prefetches into L1 are limited in number, and those outstanding hold up other loads. The address need
// not be valid.
template <class T>
TXL_INLINE void prefetch(const T* row, int64_t stride, int64_t d) {
  constexpr int64_t line = 64 / sizeof(T);
  if (d % line == 0)
    __builtin_prefetch(
        reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(row + d) + PREFETCH_ROWS * stride * sizeof(float)), 0,
        2);
}

// Whether a call is run by the decode kernels.
static bool is_decode(const Problem& p) { return p.L <= DECODE_L && !p.drop_below; }

// Computes score[0..LANES) for the keys from j on: qu . k and, if POSITIONS, plus qw . r. Keys past `last` repeat it.
template <bool POSITIONS, class T>
TXL_INLINE void decode_products(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j, int64_t last,
                                const Packed* qu, const Packed* qw, float* score) {
  vf sum[LANES];
  float tail[LANES];
  const int64_t k_stride = (j < p.M ? p.k_mem : p.k).s2;
  for (int first = 0; first < LANES; first += 4) {  // four keys at a time: their pointers stay in registers
    const T *k[4], *r[4];
    vf lane_sums[4] = {};
    TXL_UNROLL(4)
    for (int z = 0; z < 4; ++z) {
      const int64_t key = min_of(j + first + z, last);
      k[z] = key_row<T>(p, p.k_mem, p.k, b, kv_head(p, h), key);
      if (POSITIONS) r[z] = row_of<T>(p.r, h, p.zero_row + p.M + i - key, 0);
    }
    const int64_t common = POSITIONS ? min_of(p.D, p.Dr) : 0;
    int64_t d = 0;
    for (; d + LANES <= common; d += LANES) {
      const vf u = load(qu + d), w = load(qw + d);
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) {
        prefetch(k[z], k_stride, d);
        lane_sums[z] += u * load(k[z] + d);
        prefetch(r[z], -p.r.s1, d), lane_sums[z] += w * load(r[z] + d);
      }
    }
    int64_t c = d;  // the remaining columns of r start here
    for (; d + LANES <= p.D; d += LANES) {
      const vf u = load(qu + d);
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) prefetch(k[z], k_stride, d), lane_sums[z] += u * load(k[z] + d);
    }
    for (; POSITIONS && c + LANES <= p.Dr; c += LANES) {
      const vf w = load(qw + c);
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) prefetch(r[z], -p.r.s1, c), lane_sums[z] += w * load(r[z] + c);
    }
    const int64_t joint = POSITIONS && d == c ? common : d;  // the end of the remaining columns that k and r share
    TXL_UNROLL(4)
    for (int z = 0; z < 4; ++z) {
      sum[first + z] = lane_sums[z];
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
  const vf total = reduce_add_rows(sum) + load(tail);
  store(score, total);
}

// A range of keys split into three: those before, inside and after the distances with a row in the tables.
struct DecodeRanges {
  Range part[3];
  DecodeRanges(const Problem& p, int64_t i, Range keys) {
    const Range inside = inside_table(p, i);
    const int64_t low = clamp(inside.low, keys.low, keys.high), high = clamp(inside.high, low, keys.high);
    part[0] = {keys.low, low}, part[1] = {low, high}, part[2] = {high, keys.high};
  }
  static bool has_positions(int n) { return n == 1; }
};

// Computes score[0..LANES), with r_bias and before softcap. positions: whether the keys have rows in the tables.
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

// out[0..N * LANES) += the sum over n < count of weight[n] * row n of values, in N vectors of accumulators.
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

// out[D] += the sum over n < count of weight[n] * row n of values.
template <class T>
static void weighted_rows(const float* weight, const T* values, int64_t stride, int64_t count, int64_t D, float* out) {
  int64_t d = 0;
  for (; d + 8 * LANES <= D; d += 8 * LANES) weighted_columns<8>(weight, values + d, stride, count, out + d);
  for (; d + 4 * LANES <= D; d += 4 * LANES) weighted_columns<4>(weight, values + d, stride, count, out + d);
  for (; d + LANES <= D; d += LANES) weighted_columns<1>(weight, values + d, stride, count, out + d);
  for (; d < D; ++d)
    for (int64_t n = 0; n < count; ++n) out[d] += weight[n] * to_float(values[n * stride + d]);
}

// Turns n scores into weights e^(score - max), with softcap, in place. Returns the maximum and the sum of weights.
// Whole vectors are written.
TXL_INLINE void softmax_of_part(const Softcap& softcap, int64_t n, float* score, float* max_and_sum) {
  for (int64_t x = 0; softcap.limit && x < n; x += LANES) store(score + x, softcap(load(score + x)));
  for (int64_t x = n; x < round_up(n, LANES); ++x) score[x] = -INF;
  vf lane_max = splat(-INF);
  for (int64_t x = 0; x < n; x += LANES) lane_max = max_of(load(score + x), lane_max);
  const float max = reduce_max(lane_max), shift = max == -INF ? 0.f : max;  // weights of -inf are 0
  vf sum = {};
  for (int64_t x = 0; x < n; x += LANES) {
    const vf e = exp_of(load(score + x) - splat(shift));
    store(score + x, e);
    sum += e;
  }
  max_and_sum[0] = max, max_and_sum[1] = reduce_add(sum);
}

// out[D] += the sum of weight[j - keys.low] * row j of the keys (or values) of memory and segment, for j in `keys`.
template <class T>
TXL_INLINE void weighted_key_rows(const Problem& p, const View& memory, const View& segment, int64_t b, int64_t hk,
                                  Range keys, const float* weight, int64_t D, float* out) {
  const int64_t n = keys.high - keys.low, in_memory = clamp(p.M - keys.low, 0, n);
  if (in_memory) weighted_rows(weight, row_of<T>(memory, b, hk, keys.low), memory.s2, in_memory, D, out);
  if (n > in_memory)
    weighted_rows(weight + in_memory, row_of<T>(segment, b, hk, keys.low + in_memory - p.M), segment.s2, n - in_memory,
                  D, out);
}

// Attention of one query over a part of the keys: out[Dv] (not yet normalized), then the maximum of scores and the sum
// of weights.
template <class T>
static void decode_part(const Problem& p, int64_t bh, int64_t i, Range keys, const Packed* qu, const Packed* qw,
                        float* out) {
  const int64_t b = bh / p.H, h = bh % p.H, hk = kv_head(p, h), Dv = p.Dv;
  const int64_t n = keys.high - keys.low;
  const Softcap softcap(p);
  const DecodeRanges ranges(p, i, keys);
  float score[DECODE_PART + LANES];  // ranges write whole vectors; the next range overwrites the excess
  for (int z = 0; z < 3; ++z)
    for (int64_t j = ranges.part[z].low; j < ranges.part[z].high; j += LANES)
      decode_scores<T>(p, b, h, i, j, ranges.part[z].high - 1, DecodeRanges::has_positions(z), qu, qw,
                       score + (j - keys.low));
  for (int64_t x = 0; x < min_of(n, PREFETCH_ROWS);
       ++x) {  // prefetches the first values while the weights are computed
    const T* row = key_row<T>(p, p.v_mem, p.v, b, hk, keys.low + x);
    for (int64_t d = 0; d < Dv; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
  }
  softmax_of_part(softcap, n, score, out + Dv);
  for (int64_t d = 0; d < Dv; ++d) out[d] = 0;
  weighted_key_rows<T>(p, p.v_mem, p.v, b, hk, keys, score, Dv, out);
}

}  // namespace
}  // namespace txl::TXL_ISA
