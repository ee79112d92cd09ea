// The work of a block: one (b, h), or with TERMS several query heads of one head of keys, one part of the keys, and
// those of its keys that the queries see.
#pragma once
#include "rows.cuh"
#include "../visible.cuh"

namespace txl_cuda {

// Rows of keys or values, of memory or segment, by index in the part.
template <class S>
struct KeyRows {
  using T = typename S::T;
  const T *memory, *segment;  // address of row 0 of the part, which need not exist
  int64_t memory_step, segment_step;
  int boundary;  // rows before this one are in memory

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

// The hull of the keys of a part that queries see, and of the rows of r that belong to them, relative to the row of
// query 0 and the part's first key. Empty: low > high.
struct Hull {
  int low, high, r_low, r_high;
};

TXL_DEVICE Hull visible_in_part(const DecodeProblem& p, int64_t b, int i, int64_t first_key, int keys) {
  const Seen seen = visible(p, b, i);
  const int from = static_cast<int>(min_of(max_of(seen.low - first_key, 0), keys));
  const int to = static_cast<int>(min_of(max_of(seen.high - first_key, 0), keys));
  return {from, to, i - to + 1, i - from + 1};
}

// The query heads of a block, and the head of keys that they read.
struct Heads {
  int first, count, keys;
};

template <class S>
TXL_DEVICE Heads heads_of(const DecodeProblem& p) {
  const int y = block_y();
  if constexpr (!S::TERMS) return {y, 1, y};
  const int group = static_cast<int>(p.H) / static_cast<int>(p.Hkv), blocks = static_cast<int>(p.group_blocks);
  const int before = y % blocks * static_cast<int>(p.heads);  // heads of the group in its earlier blocks
  return {y / blocks * group + before, static_cast<int>(min_of(p.heads, group - before)), y / blocks};
}

// Query n of a block is query n % L of the segment, of query head n / L of the block.
template <class S>
TXL_DEVICE int query_of(const DecodeProblem& p, int n) {
  return S::TERMS ? n % static_cast<int>(p.L) : n;  // plant: query-of-a-head
}

// The number of a block's queries, as a constant if there is one.
template <class S>
TXL_DEVICE int count_queries(const DecodeProblem& p, const Heads& heads) {
  return S::Q == 1 ? 1 : S::TERMS ? heads.count * static_cast<int>(p.L) : static_cast<int>(p.L);
}

// Returns the hull over `count` queries, in every thread, and writes each query's own keys to shared memory. One of Q
// lanes works for each query.
template <class S>
TXL_DEVICE Hull visible_hull(const DecodeProblem& p, int64_t b, int count, int64_t first_key, int keys, float* from,
                             float* to) {
  const int i = thread() % S::Q;
  Hull hull = {keys, 0, S::TERMS ? static_cast<int>(p.L) : count, -keys};
  if (i < count) {
    const Hull own = visible_in_part(p, b, query_of<S>(p, i), first_key, keys);
    if (own.low < own.high) hull = own;
  }
  if constexpr (S::Q > 1) {
    if (thread() < S::Q) from[i] = static_cast<float>(hull.low), to[i] = static_cast<float>(hull.high);
    float low = hull.low, high = hull.high, r_low = hull.r_low, r_high = hull.r_high;  // exact in float
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
  // Batch rows are adjacent in the grid, so that blocks that run together read the same rows of r from the L2 cache.
  int b = block_x(), part = block_z();
  Heads heads;
  int D, queries, padded, part_keys, keys;  // padded: queries rounded up to QUERIES_AT_ONCE; keys: of this part
  int64_t first_key;
  Hull hull;

  TXL_DEVICE Block(const DecodeProblem& problem, float* memory)
      : p(problem),
        shared(memory),
        at(layout(S::Q, S::WIDTH, static_cast<int>(problem.part_keys))),
        heads(heads_of<S>(p)),
        D(static_cast<int>(p.D)),
        queries(count_queries<S>(p, heads)),
        padded((queries + S::QUERIES_AT_ONCE - 1) / S::QUERIES_AT_ONCE * S::QUERIES_AT_ONCE),
        part_keys(static_cast<int>(p.part_keys)),
        first_key(p.first_key + static_cast<int64_t>(part) * part_keys) {
    keys = static_cast<int>(min_of(part_keys, p.M + (S::TERMS ? p.L : queries) - first_key));
    hull = visible_hull<S>(p, b, queries, first_key, keys, shared + at.from, shared + at.to);
  }

  // The keys [from, to) of the part that query i sees. Valid after the first barrier.
  TXL_DEVICE int from(int i) const { return S::Q == 1 ? hull.low : static_cast<int>(shared[at.from + i]); }
  TXL_DEVICE int to(int i) const { return S::Q == 1 ? hull.high : static_cast<int>(shared[at.to + i]); }
  // The scores of query i, later its weights.
  TXL_DEVICE float* scores(int i) const { return shared + at.score + i * part_keys; }
  TXL_DEVICE int query(int n) const { return query_of<S>(p, n); }  // see query_of
  TXL_DEVICE int head(int n) const { return S::TERMS ? heads.first + n / static_cast<int>(p.L) : heads.first; }
  TXL_DEVICE int64_t bh(int n) const { return static_cast<int64_t>(b) * p.H + head(n); }
};

}  // namespace txl_cuda
