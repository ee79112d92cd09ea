// Which keys a query sees.
#pragma once
#include "cuda_problem.h"
#include "simt.h"

namespace txl_cuda {

TXL_DEVICE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
TXL_DEVICE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys [low, high) that a query sees; low == high: none. invalid: its bounds are out of range, or a key that it
// sees has no row in r although `zero_outside` is not set. Its output is NaN then, since raising an error would take a
// synchronization with the host.
struct Seen {
  int64_t low, high;
  bool invalid;
};

TXL_DEVICE Seen visible(const Problem& p, int64_t b, int64_t i) {
  const int64_t S = p.M + p.L, at = p.M + i;
  Seen seen = {max_of(0, at - p.left), min_of(at + p.right + 1, S), false};
  if (p.start.data) {
    const int64_t bound = p.start.data[b * p.start.s0 + i * p.start.s1];
    seen.invalid |= bound < 0 || bound > S;
    seen.low = max_of(seen.low, bound);
  }
  if (p.end.data) {
    const int64_t bound = p.end.data[b * p.end.s0 + i * p.end.s1];
    seen.invalid |= bound < 0 || bound > S;
    seen.high = min_of(seen.high, bound);
  }
  if (seen.low < seen.high && !p.zero_outside)
    seen.invalid |= p.zero_row + at - seen.low >= p.T || p.zero_row + at - (seen.high - 1) < 0;
  return seen.invalid || seen.low >= seen.high ? Seen{0, 0, seen.invalid} : seen;
}

// The output of a query whose weights sum to 0: 0 if it sees no key, NaN if its bounds are invalid or all scores are
// -inf.
TXL_DEVICE float empty_output(const Problem& p, int64_t b, int64_t i) {
  const Seen seen = visible(p, b, i);
  return seen.invalid || seen.low < seen.high ? NAN : 0.f;
}

// The lse of a query from its maximum score, times log2 e, and its sum of weights relative to that.
TXL_DEVICE float log_sum_exp(const Problem& p, int64_t b, int64_t i, float max, float sum) {
  constexpr float LN_2 = 0.6931471805599453f;
  if (sum != 0) return (max + log2f(sum)) * LN_2;
  return visible(p, b, i).invalid ? NAN : -INFINITY;
}

// The weight 2^(score - max), 0 for a score of -inf, even if max is -inf; NaN stays NaN.
TXL_DEVICE float exp2_weight(float score, float max) { return score == -INFINITY ? 0.f : exp2f(score - max); }

}  // namespace txl_cuda
