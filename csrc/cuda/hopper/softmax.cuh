// From scores in registers to weights: the online softmax of a warpgroup's 64 queries.
#pragma once
#include "../philox.cuh"
#include "queries.cuh"

namespace txl_cuda {

// Bit n of the result: entry n of a fragment of 64 keys from `key` on is kept. The 8 lanes of eight
// neighbouring queries hold the same keys; lane `own` of them draws those of columns 8 own to
// 8 own + 7, and each takes its query's bits of the others'.
TXL_DEVICE uint32_t draw_keep_mask(const Problem& p, int64_t bh, int64_t query, int64_t key) {
  const int lane = thread() % WARP, own = lane / 4;
  uint32_t mine = 0;  // byte 2 h + e: row h of the fragment's two, column e of the lane's two
  TXL_ROLLED
  for (int n = 0; n < 4; ++n)
    mine |= keep_mask_of_eight(p, bh, (query + n / 2 * 8) / 8, key + 8 * own + lane % 4 * 2 + n % 2) << 8 * n;
  uint32_t keep_mask = 0;
  TXL_UNROLL
  for (int x = 0; x < 8; ++x) {
    const uint32_t theirs = (x ? shuffle_bits_xor(mine, 4 * x) : mine) >> own & 0x01010101u;
    keep_mask |= (theirs * 0x01020408u >> 24 & 15) << 4 * (own ^ x);  // the bits of four bytes, side by side
  }
  return keep_mask;
}

// The softmax of this thread's two queries, rows lane / 4 and lane / 4 + 8 of its warp's 16.
class Softmax {
 public:
  // low, high: keys that each query sees. query: index of the first in its batch row.
  TXL_DEVICE Softmax(const Problem& p, int64_t bh, int64_t query, const int (&low)[2], const int (&high)[2])
      : p_(p), bh_(bh), query_(query) {
    for (int h = 0; h < 2; ++h) low_[h] = low[h], high_[h] = high[h], top_[h] = -INFINITY, sum_[h] = 0;
  }

  // Products of tile `tile` become weights relative to the largest so far. rescale: what the values
  // added up before are to be multiplied by. first_key: index of tile 0's first key.
  // between(): among the exponentials.
  template <class Between>
  TXL_DEVICE void weigh(float (&s)[32], int tile, int first_key, float (&rescale)[2], const Between& between) {
    mask(s, tile);
    // Two chains for each of the two queries, side by side: an instruction waits for the one before it in its chain,
    // and there are few warps to fill the waits.
    float top[4], base[2], sum[4] = {};
    TXL_UNROLL
    for (int c = 0; c < 4; ++c) top[c] = fmaxf(s[2 * c], s[2 * c + 1]);
    TXL_UNROLL
    for (int n = 8; n < 32; n += 2) top[n / 2 % 4] = fmaxf(top[n / 2 % 4], fmaxf(s[n], s[n + 1]));
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], top[h + 2]);
    TXL_UNROLL
    for (int step = 1; step < 4; step *= 2) {
      const float other[2] = {shuffle_xor(top[0], step), shuffle_xor(top[1], step)};
      top[0] = fmaxf(top[0], other[0]), top[1] = fmaxf(top[1], other[1]);
    }
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float all = fmaxf(top_[h], top[h]);
      base[h] = all == -INFINITY ? 0.f : all;
      rescale[h] = exp2_approx(top_[h] - base[h]);
      top_[h] = all;
    }
    between();
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

  TXL_DEVICE void weigh(float (&s)[32], int tile, int first_key, float (&rescale)[2]) {
    weigh(s, tile, first_key, rescale, [] {});
  }

  // Once all tiles were weighed: a query's sum of weights, over its four lanes.
  TXL_DEVICE float sum(int h) const {
    const float two = sum_[h] + shuffle_xor(sum_[h], 1);
    return two + shuffle_xor(two, 2);
  }
  TXL_DEVICE float top(int h) const { return top_[h]; }

 private:
  TXL_DEVICE void mask(float (&s)[32], int tile) const {
    const int first = tile * SIDE, last = first + SIDE;
    const bool all = low_[0] <= first && high_[0] >= last && low_[1] <= first && high_[1] >= last;
    if (all_of_warp(all)) return;
    const int own = first + accumulator_column();
    TXL_UNROLL
    for (int n = 0; n < 32; ++n) {
      const int h = n / 2 % 2, key = own + n / 4 * 8 + n % 2;
      if (key < low_[h] || key >= high_[h]) s[n] = -INFINITY;
    }
  }

  const Problem& p_;
  int64_t bh_, query_;
  int low_[2], high_[2];
  float top_[2], sum_[2];
};

// Weights as a left factor.
template <class T>
TXL_DEVICE void pack_operand(const float (&s)[32], uint32_t (&a)[16]) {
  TXL_UNROLL
  for (int n = 0; n < 16; ++n) a[n] = pack(T(), s[2 * n], s[2 * n + 1]);
}

}  // namespace txl_cuda
