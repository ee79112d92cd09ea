// The online softmax of a warpgroup's 64 queries: from scores in an accumulator to weights.
#pragma once
#include "../philox.cuh"
#include "fragments.cuh"

namespace txl_cuda {

// Bit n of the result: dropout keeps element n of this thread's fragment of 64 keys from `key` on. The 8 lanes that
// hold the same keys of eight neighbouring queries share the work, as one draw serves eight queries: the lane of row
// `row` draws for columns 8 row to 8 row + 7, and each takes its query's bits from the others.
TXL_DEVICE uint32_t draw_keep_mask(const Problem& p, int64_t bh, int64_t query, int64_t key) {
  const int lane = thread() % WARP, row = lane / 4;
  uint32_t drawn = 0;  // byte 2 h + e: row h of the fragment's two, column e of the lane's two
  TXL_ROLLED
  for (int n = 0; n < 4; ++n)
    drawn |= keep_mask_of_eight(p, bh, (query + n / 2 * 8) / 8, key + 8 * row + lane % 4 * 2 + n % 2) << 8 * n;
  uint32_t keep_mask = 0;
  TXL_UNROLL
  for (int x = 0; x < 8; ++x) {
    const uint32_t bits = (x ? shuffle_bits_xor(drawn, 4 * x) : drawn) >> row & 0x01010101u;
    keep_mask |= (bits * 0x01020408u >> 24 & 15) << 4 * (row ^ x);  // the bits of four bytes, side by side
  }
  return keep_mask;
}

// The softmax of this thread's two queries, rows lane / 4 and lane / 4 + 8 of its warp's 16.
class Softmax {
 public:
  // low, high: the keys that each query sees. query: index of the first in its batch row.
  TXL_DEVICE Softmax(const Problem& p, int64_t bh, int64_t query, const int (&low)[2], const int (&high)[2])
      : p_(p), bh_(bh), query_(query) {
    for (int h = 0; h < 2; ++h) low_[h] = low[h], high_[h] = high[h], max_[h] = -INFINITY, sum_[h] = 0;
  }

  // Turns the scores of tile `tile` into weights 2^(score - max), relative to the largest score so far. rescale: the
  // factor for what was summed up relative to the largest before. first_key: index of tile 0's first key.
  // interleaved(): other work, done among the exponentials.
  template <class Interleaved>
  TXL_DEVICE void update(float (&s)[32], int tile, int first_key, float (&rescale)[2], const Interleaved& interleaved) {
    mask(s, tile);
    // Two chains for each of the two queries, side by side: an instruction waits for the one before it in its chain,
    // and there are few warps to fill the waits.
    float max[4], base[2], sum[4] = {};
    TXL_UNROLL
    for (int c = 0; c < 4; ++c) max[c] = fmaxf(s[2 * c], s[2 * c + 1]);
    TXL_UNROLL
    for (int n = 8; n < 32; n += 2) max[n / 2 % 4] = fmaxf(max[n / 2 % 4], fmaxf(s[n], s[n + 1]));
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) max[h] = fmaxf(max[h], max[h + 2]);
    TXL_UNROLL
    for (int step = 1; step < 4; step *= 2) {
      const float other[2] = {shuffle_xor(max[0], step), shuffle_xor(max[1], step)};
      max[0] = fmaxf(max[0], other[0]), max[1] = fmaxf(max[1], other[1]);
    }
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float new_max = fmaxf(max_[h], max[h]);
      base[h] = new_max == -INFINITY ? 0.f : new_max;
      rescale[h] = exp2_approx(max_[h] - base[h]);
      max_[h] = new_max;
    }
    interleaved();
    TXL_UNROLL
    for (int n = 0; n < 32; n += 2) {
      const int h = n / 2 % 2;
      s[n] = exp2_approx(s[n] - base[h]), s[n + 1] = exp2_approx(s[n + 1] - base[h]);
      sum[n / 2 % 4] += s[n] + s[n + 1];
    }
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) sum_[h] = sum_[h] * rescale[h] + (sum[h] + sum[h + 2]);
    if (!p_.drop_below) return;
    const uint32_t keep_mask = draw_keep_mask(p_, bh_, query_, first_key + tile * SIDE);
    TXL_UNROLL
    for (int n = 0; n < 32; ++n) s[n] = keep_mask >> n & 1 ? s[n] * p_.keep_scale : 0.f;
  }

  // After the last tile: the sum of weights of a query, over its four lanes, and its largest score.
  TXL_DEVICE float sum(int h) const {
    const float pair_sum = sum_[h] + shuffle_xor(sum_[h], 1);
    return pair_sum + shuffle_xor(pair_sum, 2);
  }
  TXL_DEVICE float max(int h) const { return max_[h]; }

 private:
  // Scores of keys that their query does not see become -inf.
  TXL_DEVICE void mask(float (&s)[32], int tile) const {
    const int tile_begin = tile * SIDE, tile_end = tile_begin + SIDE;
    const bool sees_all =
        low_[0] <= tile_begin && high_[0] >= tile_end && low_[1] <= tile_begin && high_[1] >= tile_end;
    if (all_of_warp(sees_all)) return;
    const int column = tile_begin + accumulator_column();
    TXL_UNROLL
    for (int n = 0; n < 32; ++n) {
      const int h = n / 2 % 2, key = column + n / 4 * 8 + n % 2;
      if (key < low_[h] || key >= high_[h]) s[n] = -INFINITY;
    }
  }

  const Problem& p_;
  int64_t bh_, query_;
  int low_[2], high_[2];
  float max_[2], sum_[2];
};

}  // namespace txl_cuda
