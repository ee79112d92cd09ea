// Which keys a query sees, and rows of keys, values, queries and gradients: their width D (Dv of values and out, Dr of
// the table r and its queries) rounded up to NR, Dp (Dvp, Drp), with zeros behind D.
#pragma once
#include "../cpu_problem.h"
#include "../runtime.h"
#include "product.h"

namespace txl::TXL_ISA {
namespace {

// Working memory laid out once: the same code that takes the pieces tells, on a dry run, how much
// they need.
class Arena {
 public:
  explicit Arena(float* at) : at_(at) {}  // null for a dry run

  // The next `count` floats, from a multiple of 64 bytes on; null on a dry run.
  float* take(int64_t count) {
    float* const piece = at_ ? at_ + used_ : nullptr;
    used_ += round_up(count, 16);
    return piece;
  }
  // The same for elements of another size.
  template <class C>
  C* take(int64_t count) {
    return reinterpret_cast<C*>(take(div_up(count * static_cast<int64_t>(sizeof(C)), sizeof(float))));
  }
  int64_t used() const { return used_; }

 private:
  float* at_;
  int64_t used_ = 0;
};

// Floats that a `Layout(Arena&, arguments...)` takes.
template <class Layout, class... Arguments>
static int64_t floats_of(const Arguments&... arguments) {
  Arena dry(nullptr);
  Layout(dry, arguments...);
  return dry.used();
}

// Keys [low, high) that query i of batch row b sees; low == high if none.
struct Range {
  int64_t low, high;
  bool any() const { return low < high; }
};

TXL_INLINE Range visible(const Problem& p, int64_t b, int64_t i) {
  const int64_t S = p.M + p.L, at = p.M + i;
  int64_t low = max_of(0, at - p.left), high = min_of(at + p.right + 1, S);
  if (p.start.data) low = max_of(low, p.start.data[b * p.start.s0 + i * p.start.s1]);
  if (p.end.data) high = min_of(high, p.end.data[b * p.end.s0 + i * p.end.s1]);
  return low < high ? Range{low, high} : Range{0, 0};
}

// Keys of query i that are at distances with a row in the tables.
TXL_INLINE Range inside_table(const Problem& p, int64_t i) {
  const int64_t row_of_key_0 = p.zero_row + p.M + i;
  return {row_of_key_0 - p.T + 1, row_of_key_0 + 1};
}

// Grouped heads: query heads that read one head of keys and values, and that head of a query head.
TXL_INLINE int64_t group_of(const Problem& p) { return p.Hkv ? p.H / p.Hkv : 1; }
TXL_INLINE int64_t key_head(const Problem& p, int64_t h) { return h / group_of(p); }

// The sink of query i of batch row and head bh = b * H + h; -INF without one.
TXL_INLINE float sink_of(const Problem& p, int64_t bh, int64_t i) {
  if (!p.sink.data) return -INF;
  return static_cast<const float*>(p.sink.data)[bh / p.H * p.sink.s0 + bh % p.H * p.sink.s1 + i * p.sink.s2];
}

// The factor of out's sum of values, whose weights are relative to e^top and add up to `total`: 1 / total, or less
// beside the query's sink.
TXL_INLINE float share_of(const Problem& p, int64_t bh, int64_t i, float top, float total) {
  if (!p.sink.data) return 1.f / total;
  const float above = sink_of(p, bh, i) - top;
  const float below = exp_of(above > 0 ? -above : above);
  return above > 0 ? below / (total * below + 1.f) : 1.f / (total + below);
}

// Keys of each batch row, and distances, that some query meets. Rows that no query meets must not enter a
// product: a memory that is not filled yet may hold anything, and 0 * NaN is NaN.
struct InUse {
  Buffer memory;  // int32: [B][S + 1] counts of queries a key, then one count a distance -(L - 1) .. S
  int32_t *keys, *distances;
  int64_t B, S, first_distance;
  Range met{0, 0};  // distances, from the first that some query meets to past the last

  explicit InUse(const Problem& p)
      : memory(p.B * (p.M + p.L + 1) + p.M + 2 * p.L + 1),
        keys(reinterpret_cast<int32_t*>(memory.data)),
        distances(keys + p.B * (p.M + p.L + 1)),
        B(p.B),
        S(p.M + p.L),
        first_distance(1 - p.L) {
    // Where counts change, then their running sums.
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
      if (distances[d] > 0) met = {met.any() ? met.low : d + first_distance, d + first_distance + 1};
  }

  bool key(int64_t b, int64_t j) const { return j < S && keys[b * (S + 1) + j] > 0; }
  bool distance(int64_t d) const { return d >= first_distance && d < S && distances[d - first_distance] > 0; }
};

template <class T>
TXL_INLINE const T* row_of(const View& x, int64_t i0, int64_t i1, int64_t i2) {
  return static_cast<const T*>(x.data) + i0 * x.s0 + i1 * x.s1 + i2 * x.s2;
}

// Key row j of the memory or of the segment; null past the end.
template <class T>
TXL_INLINE const T* key_row(const Problem& p, const View& memory, const View& segment, int64_t b, int64_t h,
                            int64_t j) {
  if (j < p.M) return row_of<T>(memory, b, h, j);
  return j < p.M + p.L ? row_of<T>(segment, b, h, j - p.M) : nullptr;
}

// Packs rows [first, first + count), multiples of NR, into either layout or both, from where
// `panels` and `rows` point; row(j) gives the source row, null for zeros.
template <class T, class Row>
TXL_INLINE void pack(const Row& row, int64_t first, int64_t count, int64_t D, int64_t Dp, Packed* panels,
                     Packed* rows) {
  for (int64_t j = 0; j < count; j += NR) {
    const T* source[NR];
    for (int n = 0; n < NR; ++n) source[n] = row(first + j + n);
    if (panels) pack_panel<T>(source, D, panels + j * deep(D));
    if (rows) pack_rows<T>(source, D, Dp, rows + j * Dp);
  }
}

// The keys or values [first, first + count) of batch row b and key head h, D wide, zeros where no query sees them.
template <class T>
static void pack_keys(const Problem& p, const InUse& in_use, const View& memory, const View& segment, int64_t b,
                      int64_t h, int64_t first, int64_t count, int64_t D, int64_t Dp, Packed* panels, Packed* rows) {
  auto row = [&](int64_t j) { return in_use.key(b, j) ? key_row<T>(p, memory, segment, b, h, j) : nullptr; };
  pack<T>(row, first, count, D, Dp, panels, rows);
}

// The rows of keys, values and the table r that packing reads for the next tile of keys, of head h of a batch row:
// keys before `end`, and the table's rows that the query i0, the first, is the first to meet.
template <class T>
struct NextTile {
  const Problem& p;
  int64_t b, h, i0, end;
  bool keys, table;

  TXL_INLINE void fetch_row(const T* row, int64_t D) {
    for (int64_t d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
  }
  // Prefetches what belongs to the keys [from, to) into the second level of the cache. Inlined: GCC drops calls of a
  // function that does nothing but prefetch.
  __attribute__((always_inline)) void fetch(int64_t from, int64_t to) const {
    for (int64_t j = from; j < min_of(to, end); ++j) {
      if (keys) {
        fetch_row(key_row<T>(p, p.k_mem, p.k, b, key_head(p, h), j), p.D);
        fetch_row(key_row<T>(p, p.v_mem, p.v, b, key_head(p, h), j), p.Dv);
      }
      const int64_t row = p.zero_row + p.M + i0 - j;
      if (table && row >= 0 && row < p.T) fetch_row(row_of<T>(p.r, h, row, 0), p.Dr);
    }
  }
};

// A float row times a factor, rounded to T.
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

// (x + bias) * scale of `count` rows x(i), null for zeros, D wide: [count][Dp], zeros behind D.
template <class T, class Row>
TXL_INLINE void pack_shifted(const Row& x, int64_t count, const T* bias, float scale, int64_t D, int64_t Dp,
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

// Queries [i0, i0 + count) of keys and of the table r, with their biases and factors: qu [count][Dp] and, with r, qw
// [count][Drp]; zeros for queries that see nothing; sees(i) of the query's place in the block.
template <class T, class Sees>
static void pack_queries(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t count, const Sees& sees,
                         int64_t Dp, int64_t Drp, Packed* qu, Packed* qw) {
  auto row = [&](const View& x) {
    return [&p, &x, &sees, b, h, i0](int64_t i) { return sees(i) ? row_of<T>(x, b, h, i0 + i) : nullptr; };
  };
  pack_shifted<T>(row(p.q), count, row_of<T>(p.u, h, 0, 0), p.scale, p.D, Dp, qu);
  if (p.r.data)
    pack_shifted<T>(row(p.q_pos.data ? p.q_pos : p.q), count, row_of<T>(p.w, h, 0, 0), p.position_scale, p.Dr, Drp, qw);
}

}  // namespace
}  // namespace txl::TXL_ISA
