// Attention of a few queries over one part of the keys: the work is reading k, v and r once.
//
// A block takes one (b, h) and one part of the keys, for all queries of the segment. It asks for its first rows of k, r
// and v at once, then forms scores in shared memory (content, then position, each over rows as they lie), weights, and
// the weighted sum of values. Nothing is waited for on the host and nothing is allocated.
#pragma once
#include "merge.cuh"
#include "philox.cuh"
#include "rows.cuh"
#include "visible.cuh"

namespace txl_cuda {

// Shared memory of a block, in floats. Queries [Q][WIDTH] with each bias, which the sum over warps takes over; scores
// [Q][part_keys]; the largest score and the sum of weights, [WARPS][Q] each; first and last + 1 key that a query sees,
// [Q].
struct Layout {
  int content, position, score, tops, sums, from, to, floats;
};

template <class S>
constexpr TXL_ANYWHERE Layout layout(int part_keys) {
  const int position = S::Q * S::WIDTH, score = 2 * position, tops = score + S::Q * part_keys;
  const int sums = tops + WARPS * S::Q, from = sums + WARPS * S::Q;
  return {0, position, score, tops, sums, from, from + S::Q, from + 2 * S::Q};
}

// Rows of keys or values by their number in the part: of the memory, or of the segment.
template <class S>
struct KeyRows {
  using T = typename S::T;
  const T *memory, *segment;  // where row 0 of the part lies or would lie
  int64_t memory_step, segment_step;
  int boundary;  // rows of the part before this are memory's

  TXL_DEVICE KeyRows(const Problem& p, const View& memory_view, const View& segment_view, int64_t b, int64_t h,
                     int64_t first_key)
      : memory(row_of<T>(memory_view, b, h, first_key)),
        segment(row_of<T>(segment_view, b, h, first_key - p.M)),
        memory_step(memory_view.s2),
        segment_step(segment_view.s2),
        boundary(static_cast<int>(least(p.part_keys, most(p.M - first_key, 0)))) {}

  TXL_DEVICE const T* operator()(int n) const {
    const bool is_memory = n < boundary;
    return (is_memory ? memory : segment) + n * (is_memory ? memory_step : segment_step);
  }
};

// Keys of a part that queries see, and the rows of r they meet, relative to that of query 0 and the part's first key.
// Empty: low > high.
struct Hull {
  int low, high, r_low, r_high;
};

TXL_DEVICE Hull seen_in_part(const Problem& p, int64_t b, int i, int64_t first_key, int keys) {
  const Seen seen = visible(p, b, i);
  const int from = static_cast<int>(least(most(seen.low - first_key, 0), keys));
  const int to = static_cast<int>(least(most(seen.high - first_key, 0), keys));
  return {from, to, i - to + 1, i - from + 1};
}

// Of all queries, in every thread; and what each query sees, in shared memory. One lane of Q does the work for a query.
template <class S>
TXL_DEVICE Hull hull_of_part(const Problem& p, int64_t b, int64_t first_key, int keys, float* from, float* to) {
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
TXL_KERNEL void part_kernel(const Problem p) {
  TXL_SHARED(shared);
  using T = typename S::T;
  const int D = static_cast<int>(p.D), L = queries_of<S>(p), part_keys = static_cast<int>(p.part_keys);
  const int rounded = (L + S::AT_ONCE - 1) / S::AT_ONCE * S::AT_ONCE;
  // Batch rows are next to each other in the grid: blocks that run together read the same rows of r from the L2.
  const int b = block_x(), h = block_y(), part = block_z();
  const int64_t first_key = p.first_key + static_cast<int64_t>(part) * part_keys;
  const int keys = static_cast<int>(least(part_keys, p.M + L - first_key));
  const Layout at = layout<S>(part_keys);
  float* const score = shared + at.score;

  const Hull hull = hull_of_part<S>(p, b, first_key, keys, shared + at.from, shared + at.to);
  const int low = hull.low, high = hull.high;
  // What query i sees; later than the first barrier.
  const auto from = [&](int i) { return S::Q == 1 ? low : static_cast<int>(shared[at.from + i]); };
  const auto to = [&](int i) { return S::Q == 1 ? high : static_cast<int>(shared[at.to + i]); };
  const int first = low & ~3;  // four weights are read at once
  const KeyRows<S> k(p, p.k_mem, p.k, b, h, first_key), v(p, p.v_mem, p.v, b, h, first_key);
  const T* const r_row = row_of<T>(p.r, h, p.zero_row + p.M - first_key, 0);
  const auto r = [&](int n) { return r_row + n * p.r.s1; };
  Tile<S> k_tile, r_tile, v_tile;
  fetch<S>(k_tile, D, low, low, high, k);
  fetch<S>(r_tile, D, hull.r_low, hull.r_low, hull.r_high, r);
  fetch<S>(v_tile, D, first, low, high, v);

  TXL_ROLLED
  for (int x = thread(); x < rounded * S::WIDTH; x += THREADS) {
    const int i = x / S::WIDTH, d = x % S::WIDTH, to = i * S::WIDTH + in_quarters<S>(d);
    const bool inside = i < L && d < D;
    const float q = inside ? to_float(row_of<T>(p.q, b, h, i)[d]) : 0.f;
    shared[at.content + to] = inside ? q + to_float(row_of<T>(p.u, h, 0, 0)[d]) : 0.f;
    shared[at.position + to] = inside ? q + to_float(row_of<T>(p.w, h, 0, 0)[d]) : 0.f;
  }
  barrier();

  products<S>(p, shared + at.content, k_tile, low, high, k,
              [&](int n, int q, float x) { score[q * part_keys + n] = x; });
  barrier();
  products<S>(p, shared + at.position, r_tile, hull.r_low, hull.r_high, r, [&](int n, int q, float x) {
    if (q - n >= low && q - n < high) score[q * part_keys + q - n] += x;  // this row's distance from query q
  });
  barrier();

  // Scores become weights relative to the largest of the part, query by query; every thread helps with each.
  const int warp = thread() / WARP;
  const float factor = p.scale * 1.4426950408889634f;  // log2 e
  TXL_ROLLED
  for (int i = 0; i < L; ++i) {
    float top = -INFINITY;
    TXL_ROLLED
    for (int n = from(i) + thread(); n < to(i); n += THREADS) top = fmaxf(top, score[i * part_keys + n] * factor);
    for (int step = WARP / 2; step; step /= 2) top = fmaxf(top, shuffle_xor(top, step));
    if (thread() % WARP == 0) shared[at.tops + warp * S::Q + i] = top;
  }
  barrier();
  TXL_ROLLED
  for (int i = 0; i < rounded; ++i) {
    float top = -INFINITY, sum = 0;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared[at.tops + w * S::Q + i]);
    TXL_ROLLED
    for (int n = thread(); n < part_keys; n += THREADS) {
      float* const entry = score + i * part_keys + n;
      const float weight = n >= from(i) && n < to(i) ? weight_of(*entry * factor, top) : 0.f;
      sum += weight;
      const bool drops = p.drop_below && weight != 0;
      *entry = drops ? weight * kept(p, static_cast<int64_t>(b) * p.H + h, i, first_key + n) : weight;
    }
    for (int step = WARP / 2; step; step /= 2) sum += shuffle_xor(sum, step);
    if (thread() % WARP == 0) shared[at.sums + warp * S::Q + i] = sum;
  }
  barrier();

  float total[S::Q][S::PER_LANE] = {};
  for (int n = first; n < high; n += S::STEP) {
    float x[ROWS][S::PER_LANE];
    widen<S>(v_tile, x);
    fetch<S>(v_tile, D, n + S::STEP, low, high, v);
    const int row = n + first_row<S>();
    if (row >= part_keys) continue;
    if (S::Q > 1 && (p.start.data || p.end.data)) {  // between two intervals a row that nobody sees may hold anything
      TXL_UNROLL
      for (int z = 0; z < ROWS; ++z) {
        bool seen = false;
        for (int i = 0; i < L; ++i) seen |= row + z >= from(i) && row + z < to(i);
        TXL_UNROLL
        for (int d = 0; d < S::PER_LANE; ++d) x[z][d] = seen ? x[z][d] : 0.f;
      }
    }
    TXL_UNROLL
    for (int q = 0; q < S::Q; ++q) {
      if (q % S::AT_ONCE == 0 && q >= L) break;
      const Four weight = load_four(score + q * part_keys + row);
      TXL_UNROLL
      for (int z = 0; z < ROWS; ++z) TXL_UNROLL
      for (int d = 0; d < S::PER_LANE; ++d) total[q][d] += weight.x[z] * x[z][d];
    }
  }
  // Groups of a warp are summed by shuffles, warps one after the other: an order that nothing changes.
  float* const sum_over_warps = shared;  // [Q][WIDTH]; the queries have served
  TXL_ROLLED
  for (int turn = 0; turn < WARPS; ++turn) {
    TXL_UNROLL
    for (int q = 0; q < S::Q; ++q) {
      if (q >= L) break;
      TXL_UNROLL
      for (int d = 0; d < S::PER_LANE; ++d) {
        if (turn == 0)
          for (int step = S::LANES; step < WARP; step *= 2) total[q][d] += shuffle_xor(total[q][d], step);
        float* const to = sum_over_warps + q * S::WIDTH + column<S>(d / S::E) + d % S::E;
        if (warp == turn && thread() % WARP < S::LANES) *to = turn ? *to + total[q][d] : total[q][d];
      }
    }
    barrier();
  }

  const int64_t bh = static_cast<int64_t>(b) * p.H + h;
  TXL_ROLLED
  for (int i = 0; i < L; ++i) {
    float top = -INFINITY, sum = 0;
    for (int w = 0; w < WARPS; ++w) {
      top = fmaxf(top, shared[at.tops + w * S::Q + i]);
      sum += shared[at.sums + w * S::Q + i];
    }
    const int64_t x = bh * L + i;
    TXL_ROLLED
    for (int d = thread(); d < D; d += THREADS) {
      const float value = sum_over_warps[i * S::WIDTH + d];
      if (p.parts > 1) {
        p.partial[(x * p.parts + part) * D + d] = value;
      } else {
        put(const_cast<T*>(row_of<T>(p.out, b, h, i)) + d, sum == 0 ? empty_result(p, b, i) : value / sum);
      }
    }
    if (thread() != 0) continue;
    if (p.parts > 1) {
      part_sums(p, x, part)[0] = top, part_sums(p, x, part)[1] = sum;
    } else if (p.lse) {
      p.lse[x] = log_sum(p, b, i, top, sum);
    }
  }
}

}  // namespace txl_cuda
