// The work of a block: one (b, h), one part of the keys, and the keys of it that the queries see.
#pragma once
#include "rows.cuh"
#include "../visible.cuh"

namespace txl_cuda {

// Rows of keys or values by their number in the part: of the memory, or of the segment.
template <class S>
struct KeyRows {
  using T = typename S::T;
  const T *memory, *segment;  // where row 0 of the part lies or would lie
  int64_t memory_step, segment_step;
  int boundary;  // rows of the part before this are memory's

  TXL_DEVICE KeyRows(const DecodeProblem& p, const View& memory_view, const View& segment_view, int64_t b, int64_t h,
                     int64_t first_key)
      : memory(row_of<T>(memory_view, b, h, first_key)),
        segment(row_of<T>(segment_view, b, h, first_key - p.M)),
        memory_step(memory_view.s2),
        segment_step(segment_view.s2),
        boundary(static_cast<int>(min_of(p.part_keys, max_of(p.M - first_key, 0)))) {}

  TXL_DEVICE const T* operator()(int n) const {
    const bool is_memory = n < boundary;
    return (is_memory ? memory : segment) + n * (is_memory ? memory_step : segment_step);
  }
};

// Keys of a part that queries see, and the rows of r they meet, relative to that of query 0 and the
// part's first key. Empty: low > high.
struct Hull {
  int low, high, r_low, r_high;
};

TXL_DEVICE Hull seen_in_part(const DecodeProblem& p, int64_t b, int i, int64_t first_key, int keys) {
  const Seen seen = visible(p, b, i);
  const int from = static_cast<int>(min_of(max_of(seen.low - first_key, 0), keys));
  const int to = static_cast<int>(min_of(max_of(seen.high - first_key, 0), keys));
  return {from, to, i - to + 1, i - from + 1};
}

// The hull of all queries, in every thread; each query's own keys, in shared memory. One lane of Q does
// the work for a query.
template <class S>
TXL_DEVICE Hull hull_of_part(const DecodeProblem& p, int64_t b, int64_t first_key, int keys, float* from, float* to) {
  const int L = queries_of<S>(p), i = thread() % S::Q;
  Hull hull = {keys, 0, L, -keys};
  if (i < L) {
    const Hull own = seen_in_part(p, b, i, first_key, keys);
    if (own.low < own.high) hull = own;
  }
  if constexpr (S::Q > 1) {
    if (thread() < S::Q) from[i] = static_cast<float>(hull.low), to[i] = static_cast<float>(hull.high);
    float low = hull.low, high = hull.high, r_low = hull.r_low, r_high = hull.r_high;  // floats hold them exactly
    for (int step = S::Q / 2; step; step /= 2) {
      low = fminf(low, shuffle_xor(low, step)), high = fmaxf(high, shuffle_xor(high, step));
      r_low = fminf(r_low, shuffle_xor(r_low, step)), r_high = fmaxf(r_high, shuffle_xor(r_high, step));
    }
    hull = {static_cast<int>(low), static_cast<int>(high), static_cast<int>(r_low), static_cast<int>(r_high)};
  }
  return hull;
}

template <class S>
struct Block {
  const DecodeProblem& p;
  float* shared;
  Layout at;
  // Batch rows are next to each other in the grid: blocks that run together read the same rows of r
  // from the L2.
  int b = block_x(), h = block_y(), part = block_z();
  int D, L, rounded, part_keys, keys;  // rounded: L, to whole groups of queries; keys: of this part
  int64_t first_key;
  Hull hull;

  TXL_DEVICE Block(const DecodeProblem& problem, float* memory)
      : p(problem),
        shared(memory),
        at(layout(S::Q, S::WIDTH, static_cast<int>(problem.part_keys))),
        D(static_cast<int>(p.D)),
        L(queries_of<S>(p)),
        rounded((L + S::AT_ONCE - 1) / S::AT_ONCE * S::AT_ONCE),
        part_keys(static_cast<int>(p.part_keys)),
        first_key(p.first_key + static_cast<int64_t>(part) * part_keys) {
    keys = static_cast<int>(min_of(part_keys, p.M + L - first_key));
    hull = hull_of_part<S>(p, b, first_key, keys, shared + at.from, shared + at.to);
  }

  // Keys [from, to) of the part that query i sees; later than the first barrier.
  TXL_DEVICE int from(int i) const { return S::Q == 1 ? hull.low : static_cast<int>(shared[at.from + i]); }
  TXL_DEVICE int to(int i) const { return S::Q == 1 ? hull.high : static_cast<int>(shared[at.to + i]); }
  // Scores, later weights, of query i.
  TXL_DEVICE float* scores(int i) const { return shared + at.score + i * part_keys; }
  TXL_DEVICE int64_t bh() const { return static_cast<int64_t>(b) * p.H + h; }
};

}  // namespace txl_cuda
