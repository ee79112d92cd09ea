// Attention of a few queries over many keys: the work is reading k, v and r once, in 16-byte loads, several in flight.
//
// A block takes one (b, h) and one part of the keys, for all queries of the segment: scores of the part go to shared
// memory (content first, then position, each over rows as they lie), then weights, then the weighted values. Parts are
// merged by a second kernel in the order of keys, so the same bits come out of every run. Nothing is waited for on the
// host and nothing is allocated.
#pragma once
#include "element.cuh"
#include "philox.cuh"
#include "problem.h"

namespace txl_cuda {

constexpr int THREADS = 128, WARP = 32, WARPS = THREADS / WARP;
constexpr int ROWS = 4;  // rows that a group of lanes has in flight
constexpr int MOST_QUERIES = 16, MOST_WIDTH = 256;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Keys [low, high) that a query sees; low == high: none. bad: its bounds are out of range, or a key it sees has no row
// in r; then its result is NaN, since nobody reads values back to the host to raise an error.
struct Seen {
  int64_t low, high;
  bool bad;
};

TXL_DEVICE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
TXL_DEVICE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

TXL_DEVICE Seen visible(const Problem& p, int64_t b, int64_t i) {
  const int64_t S = p.M + p.L, at = p.M + i;
  Seen seen = {p.window ? most(0, at - p.window + 1) : 0, p.causal ? at + 1 : S, false};
  if (p.start.data) {
    const int64_t bound = p.start.data[b * p.start.s0 + i * p.start.s1];
    seen.bad |= bound < 0 || bound > S;
    seen.low = most(seen.low, bound);
  }
  if (p.end.data) {
    const int64_t bound = p.end.data[b * p.end.s0 + i * p.end.s1];
    seen.bad |= bound < 0 || bound > S;
    seen.high = least(seen.high, bound);
  }
  if (seen.low < seen.high)
    seen.bad |= p.zero_row + at - seen.low >= p.T || p.zero_row + at - (seen.high - 1) < 0;
  return seen.bad || seen.low >= seen.high ? Seen{0, 0, seen.bad} : seen;
}

template <class T>
TXL_DEVICE const T* row_of(const View& x, int64_t n0, int64_t n1, int64_t n2) {
  return static_cast<const T*>(x.data) + n0 * x.s0 + n1 * x.s1 + n2 * x.s2;
}

// Key or value row j: of the memory, or of the segment.
template <class T>
TXL_DEVICE const T* key_row(const Problem& p, const View& memory, const View& segment, int64_t b, int64_t h, int64_t j) {
  return j < p.M ? row_of<T>(memory, b, h, j) : row_of<T>(segment, b, h, j - p.M);
}

// Sum over the lanes of a group, in all of them.
template <int LANES>
TXL_DEVICE float sum_of_group(float x) {
  for (int step = LANES / 2; step; step /= 2) x += shuffle_xor(x, step);
  return x;
}

// Shared memory of a block, in floats: queries [2][Q][D] (which the last sum over warps takes over), scores [Q][keys].
TXL_DEVICE float* scores_in(float* shared, int Q, int64_t D) { return shared + 2 * Q * D; }

// Dot products of the rows [from, to) with Q queries: use(row, q, product) is called by one lane for each.
// LANES lanes share a row of D elements, CHUNKS 16-byte loads a lane.
template <class T, int LANES, int CHUNKS, int Q, class RowAt, class Use>
TXL_DEVICE void products(const Problem& p, const float* queries, int64_t from, int64_t to, const RowAt& row_at,
                         const Use& use) {
  constexpr int E = PER_CHUNK<T>, GROUPS = THREADS / LANES;
  const int lane = thread() % LANES, group = thread() / LANES;
  for (int64_t first = from; first < to; first += GROUPS * ROWS) {  // the same rounds for all: shuffles need every lane
    Chunk chunk[ROWS][CHUNKS];
    TXL_UNROLL
    for (int z = 0; z < ROWS; ++z) {
      const int64_t row = first + z * GROUPS + group;
      const T* data = row < to ? row_at(row) : nullptr;
      TXL_UNROLL
      for (int c = 0; c < CHUNKS; ++c) {
        const int64_t d = (c * LANES + lane) * E;
        chunk[z][c] = data && d < p.D ? load_chunk(data + d, p.aligned) : Chunk{};
      }
    }
    TXL_UNROLL
    for (int q = 0; q < Q; ++q) {
      if (q >= p.L) break;
      float sum[ROWS] = {};
      TXL_UNROLL
      for (int c = 0; c < CHUNKS; ++c) {
        const int64_t d = (c * LANES + lane) * E;
        if (d >= p.D) continue;
        TXL_UNROLL
        for (int e = 0; e < E; ++e) {
          const float x = queries[q * p.D + d + e];
          TXL_UNROLL
          for (int z = 0; z < ROWS; ++z) sum[z] += x * element<T>(chunk[z][c], e);
        }
      }
      TXL_UNROLL
      for (int z = 0; z < ROWS; ++z) {
        const float product = sum_of_group<LANES>(sum[z]);
        const int64_t row = first + z * GROUPS + group;
        if (lane == 0 && row < to) use(row, q, product);
      }
    }
  }
}

// What a query gets whose weights sum to nothing: 0 if it sees no key, NaN if its bounds are bad or all scores are -inf.
TXL_DEVICE float empty_result(const Problem& p, int64_t b, int64_t i) {
  const Seen seen = visible(p, b, i);
  return seen.bad || seen.low < seen.high ? NAN : 0.f;
}

// lse of a query from its largest score, times log2 e, and its sum of weights relative to that.
TXL_DEVICE float log_sum(const Problem& p, int64_t b, int64_t i, float top, float sum) {
  if (sum != 0) return (top + log2f(sum)) * LN_2;
  return visible(p, b, i).bad ? NAN : -INFINITY;
}

template <class T, int LANES, int CHUNKS, int Q>
TXL_KERNEL(THREADS) part_kernel(const Problem p) {
  TXL_SHARED(shared);
  constexpr int E = PER_CHUNK<T>, GROUPS = THREADS / LANES;
  const int lane = thread() % LANES, group = thread() / LANES, warp = thread() / WARP;
  // Batch rows are next to each other in the grid: blocks that run together read the same rows of r from the L2.
  const int64_t b = block_x() % p.B, h = block_x() / p.B, part = block_y();
  const int64_t D = p.D, L = p.L, first_key = part * p.part_keys;
  const int64_t last_key = least(first_key + p.part_keys, p.M + L);
  float* const content = shared;
  float* const position = shared + Q * D;
  float* const score = scores_in(shared, Q, D);

  for (int64_t x = thread(); x < L * D; x += THREADS) {
    const int64_t i = x / D, d = x % D;
    const float q = to_float(row_of<T>(p.q, b, h, i)[d]);
    content[x] = q + to_float(row_of<T>(p.u, h, 0, 0)[d]);
    position[x] = q + to_float(row_of<T>(p.w, h, 0, 0)[d]);
  }
  for (int64_t x = thread(); x < L * p.part_keys; x += THREADS) score[x] = 0;
  // Keys of this part that some query sees, and the rows of r they meet.
  int64_t low = last_key, high = first_key, r_low = p.T, r_high = 0;
  for (int i = 0; i < L; ++i) {
    const Seen seen = visible(p, b, i);
    const int64_t from = most(seen.low, first_key), to = least(seen.high, last_key);
    if (from >= to) continue;
    low = least(low, from), high = most(high, to);
    r_low = least(r_low, p.zero_row + p.M + i - (to - 1));
    r_high = most(r_high, p.zero_row + p.M + i - from + 1);
  }
  barrier();

  products<T, LANES, CHUNKS, Q>(
      p, content, low, high, [&](int64_t j) { return key_row<T>(p, p.k_mem, p.k, b, h, j); },
      [&](int64_t j, int q, float x) { score[q * p.part_keys + j - first_key] = x; });
  barrier();
  products<T, LANES, CHUNKS, Q>(
      p, position, r_low, r_high, [&](int64_t t) { return row_of<T>(p.r, h, t, 0); },
      [&](int64_t t, int q, float x) {
        const int64_t j = p.zero_row + p.M + q - t;  // row t is distance M + q - j
        if (j >= low && j < high) score[q * p.part_keys + j - first_key] += x;
      });
  barrier();

  // A warp turns a query's scores into weights, relative to the part's own maximum.
  float* const maxima = score + Q * p.part_keys;
  float* const sums = maxima + Q;
  const float factor = p.scale * LOG2_E;
  for (int64_t i = warp; i < L; i += WARPS) {
    const Seen seen = visible(p, b, i);
    const int64_t from = most(seen.low, first_key) - first_key, to = least(seen.high, last_key) - first_key;
    float* const mine = score + i * p.part_keys;
    float top = -INFINITY, sum = 0;
    for (int64_t n = from + thread() % WARP; n < to; n += WARP) top = fmaxf(top, mine[n] * factor);
    for (int step = WARP / 2; step; step /= 2) top = fmaxf(top, shuffle_xor(top, step));
    for (int64_t n = thread() % WARP; n < last_key - first_key; n += WARP) {
      // Scores of -inf weigh nothing, even where there is no other.
      const float weight = n >= from && n < to && top != -INFINITY ? exp2f(mine[n] * factor - top) : 0.f;
      sum += weight;
      mine[n] = p.drop_below && weight != 0 ? weight * kept(p, b * p.H + h, i, first_key + n) : weight;
    }
    sum = sum_of_group<WARP>(sum);
    if (thread() % WARP == 0) maxima[i] = top, sums[i] = sum;
  }
  barrier();

  float total[Q][CHUNKS * E] = {};
  for (int64_t first = low; first < high; first += GROUPS * ROWS) {
    Chunk chunk[ROWS][CHUNKS];
    TXL_UNROLL
    for (int z = 0; z < ROWS; ++z) {
      const int64_t j = first + z * GROUPS + group;
      const T* data = j < high ? key_row<T>(p, p.v_mem, p.v, b, h, j) : nullptr;
      TXL_UNROLL
      for (int c = 0; c < CHUNKS; ++c) {
        const int64_t d = (c * LANES + lane) * E;
        chunk[z][c] = data && d < D ? load_chunk(data + d, p.aligned) : Chunk{};
      }
    }
    TXL_UNROLL
    for (int z = 0; z < ROWS; ++z) {
      const int64_t j = first + z * GROUPS + group;
      if (j >= high) break;
      TXL_UNROLL
      for (int q = 0; q < Q; ++q) {
        if (q >= L) break;
        const float weight = score[q * p.part_keys + j - first_key];
        TXL_UNROLL
        for (int c = 0; c < CHUNKS; ++c)
          TXL_UNROLL
          for (int e = 0; e < E; ++e) total[q][c * E + e] += weight * element<T>(chunk[z][c], e);
      }
    }
  }
  // Groups of a warp are summed by shuffles, warps one after the other: an order that nothing changes.
  float* const sum_over_warps = shared;  // [Q][D]; the queries have served
  for (int turn = 0; turn < WARPS; ++turn) {
    TXL_UNROLL
    for (int q = 0; q < Q; ++q) {
      if (q >= L) break;
      TXL_UNROLL
      for (int c = 0; c < CHUNKS; ++c)
        TXL_UNROLL
        for (int e = 0; e < E; ++e) {
          float x = total[q][c * E + e];
          if (turn == 0) {
            for (int step = LANES; step < WARP; step *= 2) x += shuffle_xor(x, step);
            total[q][c * E + e] = x;
          }
          const int64_t d = (c * LANES + lane) * E + e;
          if (warp == turn && thread() % WARP < LANES && d < D) {
            float* const to = sum_over_warps + q * D + d;
            *to = turn ? *to + x : x;
          }
        }
    }
    barrier();
  }

  const int64_t bh = b * p.H + h;
  for (int64_t x = thread(); x < L * D; x += THREADS) {
    const int64_t i = x / D, d = x % D;
    if (p.parts > 1) {
      p.partial[((bh * L + i) * p.parts + part) * (D + 2) + d] = sum_over_warps[x];
      continue;
    }
    const float result = sums[i] == 0 ? empty_result(p, b, i) : sum_over_warps[x] / sums[i];
    put(const_cast<T*>(row_of<T>(p.out, b, h, i)) + d, result);
  }
  for (int64_t i = thread(); i < L; i += THREADS) {
    if (p.parts > 1) {
      float* const entry = p.partial + ((bh * L + i) * p.parts + part) * (D + 2);
      entry[D] = maxima[i], entry[D + 1] = sums[i];
    } else if (p.lse) {
      p.lse[bh * L + i] = log_sum(p, b, i, maxima[i], sums[i]);
    }
  }
}

// Merges the parts of one query, block x = (b * H + h) * L + i, in the order of keys.
template <class T>
TXL_KERNEL(THREADS) merge_kernel(const Problem p) {
  const int64_t x = block_x(), i = x % p.L, bh = x / p.L, b = bh / p.H, h = bh % p.H, stride = p.D + 2;
  const float* const entry = p.partial + x * p.parts * stride;
  float top = -INFINITY, sum = 0;
  for (int64_t part = 0; part < p.parts; ++part)
    if (entry[part * stride + p.D + 1] != 0) top = fmaxf(top, entry[part * stride + p.D]);
  for (int64_t part = 0; part < p.parts; ++part) {
    const float* const at = entry + part * stride + p.D;
    if (at[1] != 0) sum += at[1] * exp2f(at[0] - top);
  }
  for (int64_t d = thread(); d < p.D; d += THREADS) {
    float total = 0;
    for (int64_t part = 0; part < p.parts; ++part) {
      const float* const at = entry + part * stride;
      if (at[p.D + 1] != 0) total += at[d] * exp2f(at[p.D] - top);
    }
    put(const_cast<T*>(row_of<T>(p.out, b, h, i)) + d, sum == 0 ? empty_result(p, b, i) : total / sum);
  }
  if (thread() == 0 && p.lse) p.lse[x] = log_sum(p, b, i, top, sum);
}

}  // namespace txl_cuda
