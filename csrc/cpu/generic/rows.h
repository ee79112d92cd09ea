// The keys that a query sees, and packing of rows of keys, values, queries and gradients. Packed rows have the width D
// (Dv for values and out, Dr for the table r and its queries) rounded up to NR: Dp (Dvp, Drp), with zeros from D on.
#pragma once
#include "../cpu_problem.h"
#include "../runtime.h"
#include "product.h"

namespace txl::TXL_ISA {
namespace {

// A bump allocator of working memory. The code that allocates from it, run without memory, computes how much is needed.
class Arena {
 public:
  explicit Arena(float* memory) : memory_(memory) {}  // null: only counts

  // Returns room for `count` floats, at a multiple of 64 bytes; null without memory.
  float* allocate(int64_t count) {
    float* const block = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(count, 16);
    return block;
  }
  // Returns room for `count` elements of another type.
  template <class C>
  C* allocate(int64_t count) {
    return reinterpret_cast<C*>(allocate(div_up(count * static_cast<int64_t>(sizeof(C)), sizeof(float))));
  }
  int64_t used() const { return used_; }

 private:
  float* memory_;
  int64_t used_ = 0;
};

// The number of floats that the constructor Scratch(Arena&, arguments...) allocates.
template <class Scratch, class... Arguments>
static int64_t scratch_floats(const Arguments&... arguments) {
  Arena arena(nullptr);
  Scratch(arena, arguments...);
  return arena.used();
}

// A half-open interval [low, high), mostly of keys.
struct Range {
  int64_t low, high;
  bool any() const { return low < high; }
};

// The keys that query i of batch row b sees.
TXL_INLINE Range visible(const Problem& p, int64_t b, int64_t i) {
  const int64_t S = p.M + p.L, at = p.M + i;
  int64_t low = max_of(0, at - p.left), high = min_of(at + p.right + 1, S);
  if (p.start.data) low = max_of(low, p.start.data[b * p.start.s0 + i * p.start.s1]);
  if (p.end.data) high = min_of(high, p.end.data[b * p.end.s0 + i * p.end.s1]);
  return low < high ? Range{low, high} : Range{0, 0};
}

// The keys whose distances from query i have a row in the tables.
TXL_INLINE Range inside_table(const Problem& p, int64_t i) {
  const int64_t row_of_key_0 = p.zero_row + p.M + i;
  return {row_of_key_0 - p.T + 1, row_of_key_0 + 1};
}

// Grouped-query attention: the number of query heads that share a key-value head, and the key-value head of a query
// head.
TXL_INLINE int64_t group_size(const Problem& p) { return p.Hkv ? p.H / p.Hkv : 1; }
TXL_INLINE int64_t kv_head(const Problem& p, int64_t h) { return h / group_size(p); }

// The sink of query i of batch row b and head h, bh = b * H + h; -INF without sinks.
TXL_INLINE float sink_of(const Problem& p, int64_t bh, int64_t i) {
  if (!p.sink.data) return -INF;
  return static_cast<const float*>(p.sink.data)[bh / p.H * p.sink.s0 + bh % p.H * p.sink.s1 + i * p.sink.s2];
}

// The factor that normalizes the weighted sum of values, 1 / (sum + e^(sink - max)): weights are e^(score - max), `sum`
// is their sum.
TXL_INLINE float output_scale(const Problem& p, int64_t bh, int64_t i, float max, float sum) {
  if (!p.sink.data) return 1.f / sum;
  const float difference = sink_of(p, bh, i) - max;
  const float ratio =
      exp_of(difference > 0 ? -difference : difference);  // of the smaller to the larger of e^sink, e^max
  return difference > 0 ? ratio / (sum * ratio + 1.f) : 1.f / (sum + ratio);
}

// The keys of each batch row that some query sees, and the distances at which some query sees a key. Rows that no query
// sees must not enter a product: a memory that is not filled yet may hold anything, and 0 * NaN is NaN.
struct VisibleRows {
  Buffer memory;
  int32_t *keys,
      *distances;  // numbers of queries: [B][S + 1] for each key, [S + L + 1] for each distance from 1 - L on
  int64_t B, S, first_distance;
  Range distance_range{0, 0};  // contains all distances at which some query sees a key

  explicit VisibleRows(const Problem& p)
      : memory(p.B * (p.M + p.L + 1) + p.M + 2 * p.L + 1),
        keys(reinterpret_cast<int32_t*>(memory.data)),
        distances(keys + p.B * (p.M + p.L + 1)),
        B(p.B),
        S(p.M + p.L),
        first_distance(1 - p.L) {
    // Differences of the counts, then their prefix sums.
    memset(keys, 0, sizeof(int32_t) * (B * (S + 1) + S + p.L + 1));
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < p.L; ++i) {
        const Range seen = visible(p, b, i);
        if (!seen.any()) continue;
        const int64_t at = p.M + i;
        ++keys[b * (S + 1) + seen.low], --keys[b * (S + 1) + seen.high];
        ++distances[at - seen.high + 1 - first_distance], --distances[at - seen.low + 1 - first_distance];
      }
    for (int64_t b = 0; b < B; ++b)
      for (int64_t j = 1; j <= S; ++j) keys[b * (S + 1) + j] += keys[b * (S + 1) + j - 1];
    for (int64_t d = 1; d < S + p.L + 1; ++d) distances[d] += distances[d - 1];
    for (int64_t d = 0; d < S + p.L; ++d)
      if (distances[d] > 0)
        distance_range = {distance_range.any() ? distance_range.low : d + first_distance, d + first_distance + 1};
  }

  bool has_key(int64_t b, int64_t j) const { return j < S && keys[b * (S + 1) + j] > 0; }
  bool has_distance(int64_t d) const { return d >= first_distance && d < S && distances[d - first_distance] > 0; }
};

template <class T>
TXL_INLINE const T* row_of(const View& x, int64_t i0, int64_t i1, int64_t i2) {
  return static_cast<const T*>(x.data) + i0 * x.s0 + i1 * x.s1 + i2 * x.s2;
}

// Row j of the keys (or values) of memory and segment together; null past the end.
template <class T>
TXL_INLINE const T* key_row(const Problem& p, const View& memory, const View& segment, int64_t b, int64_t h,
                            int64_t j) {
  if (j < p.M) return row_of<T>(memory, b, h, j);
  return j < p.M + p.L ? row_of<T>(segment, b, h, j - p.M) : nullptr;
}

// Packs rows [first, first + count), multiples of NR, into `panels`, `rows` or both; null: not wanted. row(j) returns
// the source row, null for zeros.
template <class T, class Row>
TXL_INLINE void pack(const Row& row, int64_t first, int64_t count, int64_t D, int64_t Dp, Packed* panels,
                     Packed* rows) {
  for (int64_t j = 0; j < count; j += NR) {
    const T* source[NR];
    for (int n = 0; n < NR; ++n) source[n] = row(first + j + n);
    if (panels) pack_panel<T>(source, D, panels + j * padded_depth(D));
    if (rows) pack_rows<T>(source, D, Dp, rows + j * Dp);
  }
}

// Packs the keys or values [first, first + count) of batch row b and key-value head h, of width D; those that no query
// sees are zeros.
template <class T>
static void pack_keys(const Problem& p, const VisibleRows& visible_rows, const View& memory, const View& segment,
                      int64_t b, int64_t h, int64_t first, int64_t count, int64_t D, int64_t Dp, Packed* panels,
                      Packed* rows) {
  auto row = [&](int64_t j) { return visible_rows.has_key(b, j) ? key_row<T>(p, memory, segment, b, h, j) : nullptr; };
  pack<T>(row, first, count, D, Dp, panels, rows);
}

// Prefetches the rows of keys, values and the table r that packing will read for the next tile of keys, for head h of a
// batch row: keys before `end`, and the table's rows that no tile before needed. i0 is the first query.
template <class T>
struct TilePrefetcher {
  const Problem& p;
  int64_t b, h, i0, end;
  bool keys, table;

  TXL_INLINE void prefetch_row(const T* row, int64_t D) {
    for (int64_t d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
  }
  // Prefetches the rows that belong to the keys [from, to) into the L2 cache. Always inlined, since GCC drops calls of
  // a function that only prefetches.
  __attribute__((always_inline)) void prefetch(int64_t from, int64_t to) const {
    for (int64_t j = from; j < min_of(to, end); ++j) {
      if (keys) {
        prefetch_row(key_row<T>(p, p.k_mem, p.k, b, kv_head(p, h), j), p.D);
        prefetch_row(key_row<T>(p, p.v_mem, p.v, b, kv_head(p, h), j), p.Dv);
      }
      const int64_t row = p.zero_row + p.M + i0 - j;
      if (table && row >= 0 && row < p.T) prefetch_row(row_of<T>(p.r, h, row, 0), p.Dr);
    }
  }
};

// Writes a float row times a factor, rounded to T.
template <class T>
TXL_INLINE void write_row(T* out, const float* x, float factor, int64_t D) {
  int64_t d = 0;
  for (; d + LANES <= D; d += LANES) store(out + d, load(x + d) * factor);
  for (; d < D; ++d) put(out + d, x[d] * factor);
}

template <class T>
TXL_INLINE void clear_row(T* out, int64_t D) {
  memset(static_cast<void*>(out), 0, sizeof(T) * D);
}

// Packs (x(i) + bias) * scale for i < count into out [count][Dp], with zeros from D on. x(i) is a row of width D, null
// for zeros.
template <class T, class Row>
TXL_INLINE void pack_biased(const Row& x, int64_t count, const T* bias, float scale, int64_t D, int64_t Dp,
                            Packed* out) {
  for (int64_t i = 0; i < count; ++i, out += Dp) {
    int64_t d = 0;
    if (const T* row = x(i)) {
      for (; d + LANES <= D; d += LANES) store(out + d, (load(row + d) + load(bias + d)) * scale);
      for (; d < D; ++d) put(out + d, (to_float(row[d]) + to_float(bias[d])) * scale);
    }
    for (; d < Dp; ++d) out[d] = Packed{};
  }
}

// Packs queries [i0, i0 + count), with their biases and scales: those of the keys into qu [count][Dp] and, with r,
// those of the table into qw [count][Drp]. Rows i0 + i for which sees(i) is false are zeros.
template <class T, class Sees>
static void pack_queries(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t count, const Sees& sees,
                         int64_t Dp, int64_t Drp, Packed* qu, Packed* qw) {
  auto row = [&](const View& x) {
    return [&p, &x, &sees, b, h, i0](int64_t i) { return sees(i) ? row_of<T>(x, b, h, i0 + i) : nullptr; };
  };
  pack_biased<T>(row(p.q), count, row_of<T>(p.u, h, 0, 0), p.scale, p.D, Dp, qu);
  if (p.r.data)
    pack_biased<T>(row(p.q_pos.data ? p.q_pos : p.q), count, row_of<T>(p.w, h, 0, 0), p.position_scale, p.Dr, Drp, qw);
}

}  // namespace
}  // namespace txl::TXL_ISA
