// Decode of grouped heads: the queries that share a key-value head are rows of one product with the keys and of one
// with the values, so that both are read once. Query i of the group's head g is row g * L + i.
#pragma once
#include "decode_part.h"

namespace txl::TXL_ISA {
namespace {

constexpr int GROUP_ROWS = LANES == 16 ? 4 : 2;  // rows of a product, whose accumulators stay in registers
constexpr int64_t SCORES_LD = DECODE_PART + LANES;
constexpr int64_t VALUE_ROWS = 32;  // values that all rows and columns read while they are in the L1 cache

// score[n * SCORES_LD + z] = x[n] . key j + z, for N rows x of D floats and LANES keys. Keys past `last` repeat it.
template <int N, class T>
TXL_INLINE void group_scores(const Problem& p, int64_t b, int64_t hk, int64_t j, int64_t last, const float* x,
                             float* score) {
  constexpr int chunks = (4 * N + LANES - 1) / LANES;
  const int64_t stride = (j < p.M ? p.k_mem : p.k).s2;
  for (int first = 0; first < LANES; first += 4) {  // four keys at a time
    const T* k[4];
    vf lane_sums[chunks * LANES] = {};  // row n and key z at 4 * n + z
    TXL_UNROLL(4)
    for (int z = 0; z < 4; ++z) k[z] = key_row<T>(p, p.k_mem, p.k, b, hk, min_of(j + first + z, last));
    int64_t d = 0;
    for (; d + LANES <= p.D; d += LANES) {
      vf key[4];
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) {
        prefetch(k[z], stride, d);
        key[z] = load(k[z] + d);
      }
      TXL_UNROLL(4)
      for (int n = 0; n < N; ++n) {
        const vf query = load(x + n * p.D + d);
        TXL_UNROLL(4)
        for (int z = 0; z < 4; ++z) lane_sums[4 * n + z] += query * key[z];
      }
    }
    float sum[chunks * LANES];
    for (int c = 0; c < chunks; ++c) store(sum + c * LANES, reduce_add_rows(lane_sums + c * LANES));
    for (; d < p.D; ++d)
      for (int n = 0; n < N; ++n)
        for (int z = 0; z < 4; ++z) sum[4 * n + z] += x[n * p.D + d] * to_float(k[z][d]);
    for (int n = 0; n < N; ++n) memcpy(score + n * SCORES_LD + first, sum + 4 * n, 4 * sizeof(float));
  }
}

// out[n * out_stride + 0..W * LANES) += the sum over z < count of weight[n * SCORES_LD + z] * row z of values, for N
// rows.
template <int N, int W, class T>
TXL_INLINE void group_columns(const float* weight, const T* values, int64_t stride, int64_t count, float* out,
                              int64_t out_stride) {
  vf acc[N][W];
  TXL_UNROLL(4)
  for (int n = 0; n < N; ++n) TXL_UNROLL(4)
  for (int w = 0; w < W; ++w) acc[n][w] = load(out + n * out_stride + w * LANES);
  for (int64_t z = 0; z < count; ++z) {
    vf value[W];
    TXL_UNROLL(4)
    for (int w = 0; w < W; ++w) {
      prefetch(values + z * stride, stride, w * LANES);
      value[w] = load(values + z * stride + w * LANES);
    }
    TXL_UNROLL(4)
    for (int n = 0; n < N; ++n) TXL_UNROLL(4)
    for (int w = 0; w < W; ++w) acc[n][w] += weight[n * SCORES_LD + z] * value[w];
  }
  TXL_UNROLL(4)
  for (int n = 0; n < N; ++n) TXL_UNROLL(4)
  for (int w = 0; w < W; ++w) store(out + n * out_stride + w * LANES, acc[n][w]);
}

// The same for rows of width Dv.
template <int N, class T>
static void group_values(const float* weight, const T* values, int64_t stride, int64_t count, int64_t Dv, float* out,
                         int64_t out_stride) {
  int64_t d = 0;
  for (; d + 4 * LANES <= Dv; d += 4 * LANES)
    group_columns<N, 4>(weight, values + d, stride, count, out + d, out_stride);
  for (; d + LANES <= Dv; d += LANES) group_columns<N, 1>(weight, values + d, stride, count, out + d, out_stride);
  for (int n = 0; d < Dv && n < N; ++n)
    weighted_rows(weight + n * SCORES_LD, values + d, stride, count, Dv - d, out + n * out_stride + d);
}

// A number of rows as a compile-time constant.
template <int N>
struct RowCount {
  static constexpr int value = N;
};

// Calls f(RowCount<N>(), first row) for all rows, with N = GROUP_ROWS and, for the last rows, less.
template <class F>
TXL_INLINE void for_row_groups(int64_t rows, const F& f) {
  int64_t n = 0;
  for (; n + GROUP_ROWS <= rows; n += GROUP_ROWS) f(RowCount<GROUP_ROWS>(), n);
  if constexpr (GROUP_ROWS == 4) {
    if (rows - n == 3) f(RowCount<3>(), n);
    if (rows - n == 2) f(RowCount<2>(), n);
  }
  if (rows - n == 1) f(RowCount<1>(), n);
}

// Adds the positional terms of query i of head h for `keys`, which have rows in the tables. score[0] belongs to key
// `first`.
template <class T>
TXL_INLINE void add_positions(const Problem& p, int64_t h, int64_t i, Range keys, int64_t first, const Packed* qw,
                              float* score) {
  for (int64_t j = keys.low; j < keys.high; j += LANES) {
    const int64_t count = min_of(LANES, keys.high - j);
    vf sum[LANES];
    float tail[LANES] = {};
    for (int64_t z = 0; z < LANES; ++z) {
      const int64_t row = p.zero_row + p.M + i - (j + min_of(z, count - 1));
      sum[z] = vf{};
      if (p.r_bias.data) tail[z] = bias_of<T>(p, h, row);
      if (!p.r.data) continue;
      const T* r = row_of<T>(p.r, h, row, 0);
      int64_t d = 0;
      for (; d + LANES <= p.Dr; d += LANES) sum[z] += load(qw + d) * load(r + d);
      for (; d < p.Dr; ++d) tail[z] += to_float(qw[d]) * to_float(r[d]);
    }
    float added[LANES];
    store(added, reduce_add_rows(sum) + load(tail));
    for (int64_t z = 0; z < count; ++z) score[j - first + z] += added[z];
  }
}

// Attention of all rows of a group over a part of the keys. Row n writes to out + n * out_stride: out[Dv] (not yet
// normalized), then the maximum of scores and the sum of weights. Keys that all rows see are read once for all of them,
// the others for each row that sees them. x: float queries, [rows][D]; qu: the same packed; qw_of(g, i): queries of the
// table; scores: [rows][SCORES_LD].
template <class T, class QwOf>
static void decode_group_part(const Problem& p, int64_t b, int64_t hk, Range part, const float* x, const Packed* qu,
                              const QwOf& qw_of, float* scores, float* out, int64_t out_stride) {
  const int64_t L = p.L, group = group_size(p), rows = group * L, Dv = p.Dv;
  const Softcap softcap(p);
  Range own[DECODE_L], common = part;
  bool any_visible = false;
  for (int64_t i = 0; i < L; ++i) {
    own[i] = visible(p, b, i);
    own[i] = {max_of(own[i].low, part.low), min_of(own[i].high, part.high)};
    if (!own[i].any()) continue;
    common = {max_of(common.low, own[i].low), min_of(common.high, own[i].high)}, any_visible = true;
  }
  if (!any_visible) return;
  if (!common.any()) common = {part.low, part.low};
  auto score_of = [&](int64_t n) { return scores + n * SCORES_LD; };  // row n's score of key part.low
  // Whole vectors of scores are written; the next range overwrites the excess.
  auto own_scores = [&](int64_t n, Range keys) {
    for (int64_t j = keys.low; j < keys.high; j += LANES)
      decode_products<false, T>(p, b, hk * group + n / L, n % L, j, keys.high - 1, qu + n * p.D, nullptr,
                                score_of(n) + (j - part.low));
  };
  auto left_of = [&](Range all) { return Range{all.low, clamp(common.low, all.low, max_of(all.low, all.high))}; };
  auto right_of = [&](Range all) { return Range{clamp(common.high, all.low, max_of(all.low, all.high)), all.high}; };
  for (int64_t n = 0; n < rows; ++n)
    if (own[n % L].any()) own_scores(n, left_of(own[n % L]));
  for (int64_t j = common.low; j < common.high; j += LANES)
    for_row_groups(rows, [&](auto count, int64_t n) {
      group_scores<count.value, T>(p, b, hk, j, common.high - 1, x + n * p.D, score_of(n) + (j - part.low));
    });
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t g = n / L, i = n % L;
    const Range keys = own[i];
    float *const score = score_of(n) + (keys.low - part.low), *const sums = out + n * out_stride;
    if (!keys.any()) {
      memset(score_of(n), 0, sizeof(float) * SCORES_LD);  // the row takes part in products of common keys
      for (int64_t d = 0; d < Dv; ++d) sums[d] = 0;
      continue;
    }
    own_scores(n, right_of(keys));
    const DecodeRanges ranges(p, i, keys);
    add_positions<T>(p, hk * group + g, i, ranges.part[1], keys.low, qw_of(g, i), score);
    softmax_of_part(softcap, keys.high - keys.low, score, sums + Dv);
    for (int64_t d = 0; d < Dv; ++d) sums[d] = 0;
    const Range edges[] = {left_of(keys), right_of(keys)};
    for (const Range& edge : edges)
      if (edge.any()) weighted_key_rows<T>(p, p.v_mem, p.v, b, hk, edge, score + (edge.low - keys.low), Dv, sums);
  }
  for (int64_t first = common.low; first < common.high;) {
    const bool in_memory = first < p.M;
    const int64_t past = min_of(first + VALUE_ROWS, in_memory ? min_of(common.high, p.M) : common.high);
    const View& v = in_memory ? p.v_mem : p.v;
    const T* const values = row_of<T>(v, b, hk, in_memory ? first : first - p.M);
    for_row_groups(rows, [&](auto count, int64_t n) {
      group_values<count.value>(score_of(n) + (first - part.low), values, v.s2, past - first, Dv, out + n * out_stride,
                                out_stride);
    });
    first = past;
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
