// Forward: a range of queries walks the tiles of keys it can see with an online softmax (Milakov
// and Gimelshein 2018). Each tile is packed where it is used, so that it stays in the cache. Few
// items: the keys are split into parts, whose results are merged by log-sum-exp in order; how many
// parts is a function of shapes, so threads change no bit.
#pragma once
#include "decode.h"
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t GROUP = MR % 4 ? 2 * MR : MR;  // queries of whole strips and whole groups of four (dropout)
constexpr int64_t RANGE_L = 384;                 // queries of an item, at most; a multiple of GROUP
constexpr int64_t FORWARD_ITEMS = 32;            // parts are made until there are as many items
constexpr int64_t PART_TILES = 4;                // tiles of a part, at least

// score += position for one row over [low, high) of a tile; -inf elsewhere in [from, to), which are
// multiples of LANES. Returns the largest in each lane. WHOLE: low is from and high is to.
template <bool WHOLE>
static vf add_position(float* score, const float* position, int64_t low, int64_t high, int64_t from, int64_t to) {
  vf top = splat(-INF);
  for (int64_t n = from; n < to; n += LANES) {
    vf x = load(score + n) + load(position + n);
    if (!WHOLE) x = lanes_within(n, low, high) ? x : splat(-INF);
    store(score + n, x);
    top = max_of(x, top);
  }
  return top;
}

// weight = exp(score - maximum) for one row over [from, to), multiples of STEP, times the dropout factors
// in [low, high) if there are any. score may be weight. Returns the sums of the lanes before dropout.
template <bool DROP>
static vf weigh(const float* score, float maximum, const float* factor, int64_t low, int64_t high, int64_t from,
                int64_t to, Cell* weight) {
  vf sum = {};
  const vf shift = splat(maximum == -INF ? 0.f : maximum);  // scores that overflowed to -inf weigh nothing
  for (int64_t n = from; n < to; n += WEIGHTS) {
    vf kept[WEIGHTS / LANES];
    TXL_UNROLL(2)
    for (int z = 0; z < WEIGHTS / LANES; ++z) {
      const int64_t at = n + z * LANES;
      const vf e = weight_of(load(score + at) - shift);
      sum += e;
      kept[z] = e;
      if (DROP) kept[z] = lanes_within(at, low, high) ? e * load(factor + at) : vf{};  // beyond, none is known
    }
    store_weights(weight + n, kept);
  }
  return sum;
}

// The online softmax of a strip, all rows together where vectors would end in single numbers.
struct Softmax {
  static constexpr int ROWS = (MR + LANES - 1) / LANES * LANES;
  vf lanes[ROWS];  // of each row: its largest scores, then its sums
  float maximum[ROWS], rescale[ROWS], sum[ROWS];

  Softmax() {
    for (int x = 0; x < ROWS; ++x) lanes[x] = splat(-INF), maximum[x] = -INF;
  }

  // Raises the maxima of the strip and tells the factors for what came before.
  void raise(float* running) {
    memcpy(maximum, running, sizeof(float) * MR);
    for (int x = 0; x < ROWS; x += LANES) {
      const vf before = load(maximum + x), now = max_of(max_each(lanes + x), before);
      store(rescale + x, now > before ? exp_of(before - now) : splat(1.f));
      store(maximum + x, now);
      for (int z = 0; z < LANES; ++z) lanes[x + z] = vf{};
    }
    memcpy(running, maximum, sizeof(float) * MR);
  }

  // Adds the sums of the strip to its totals.
  void add_up(float* total) {
    for (int x = 0; x < ROWS; x += LANES) store(sum + x, sum_each(lanes + x));
    for (int x = 0; x < MR; ++x) total[x] = total[x] * rescale[x] + sum[x];
  }
};

// How the work is cut: items are (b, h), a range of queries, a part of the keys.
struct ForwardPlan {
  int64_t Dp, range, ranges, part, parts, rows;  // range: queries; part: keys; rows: a range rounded up to MR

  explicit ForwardPlan(const Problem& p) : Dp(round_up(p.D, NR)) {
    const int64_t S = p.M + p.L, tiles = div_up(S, BLOCK_S);
    ranges = div_up(p.L, RANGE_L);
    range = round_up(div_up(p.L, ranges), GROUP);
    ranges = div_up(p.L, range);
    parts = clamp(div_up(FORWARD_ITEMS, p.B * p.H * ranges), 1, max_of(1, tiles / PART_TILES));
    part = div_up(tiles, parts) * BLOCK_S;
    parts = div_up(S, part);
    rows = min_of(range, round_up(p.L, MR));
  }
  int64_t entry() const { return rows * (Dp + 2); }  // floats of a range's result: out, then maxima, then sums
};

#ifdef TXL_PAIRS
// Forward's weights, rounded.
TXL_INLINE bf16* weights_of(Arena& a, float*) { return a.take<bf16>(MR * BLOCK_S); }
#else
// Forward's weights take the place of the scores.
TXL_INLINE float* weights_of(Arena&, float* scores) { return scores; }
#endif

// One thread's working memory.
struct ForwardScratch {
  Cell *qu, *qw, *k_panels, *v_rows;
  float *content, *position;
  Cell* weights;
  float *factor, *result;
  Table table;

  ForwardScratch(Arena& a, const Problem& p, const ForwardPlan& z)
      : qu(a.take<Cell>(z.rows * z.Dp)),
        qw(a.take<Cell>(z.rows * z.Dp)),
        k_panels(a.take<Cell>(BLOCK_S * deep(p.D))),
        v_rows(a.take<Cell>(BLOCK_S * z.Dp)),
        content(a.take(MR * BLOCK_S)),
        position(a.take(MR * POSITION_LD)),
        weights(weights_of(a, content)),
        factor(a.take(GROUP * BLOCK_S)),
        result(a.take(z.entry())),
        table(a, Table::room(BLOCK_S + z.rows), p.D, 0) {}
};

// out (not yet divided), maxima and sums of queries [i0, i0 + count) over the keys of a part, into
// `result`.
template <class T>
static void forward_range(const Problem& p, const ForwardPlan& z, const InUse& in_use, int64_t bh, int64_t i0,
                          int64_t count, Range part, ForwardScratch& s, float* result) {
  const int64_t b = bh / p.H, h = bh % p.H, Dp = z.Dp, rows = round_up(count, MR);
  const BlockRanges<RANGE_L> ranges(p, b, i0, count, part);
  float *out = result, *maximum = out + z.rows * Dp, *total = maximum + z.rows;
  memset(out, 0, sizeof(float) * rows * Dp);
  for (int64_t i = 0; i < rows; ++i) maximum[i] = -INF, total[i] = 0;
  pack_queries<T>(p, b, h, i0, rows, [&](int64_t i) { return ranges.row[i].any(); }, Dp, s.qu, s.qw);

  for (int64_t j0 = ranges.all.low / BLOCK_S * BLOCK_S; j0 < ranges.all.high; j0 += BLOCK_S) {
    const Range tile = within(ranges.all, j0);
    const int64_t first = tile.low / NR * NR, last = round_up(tile.high, NR);
    pack_keys<T>(p, in_use, p.k_mem, p.k, b, h, j0 + first, last - first, Dp, s.k_panels + first * deep(p.D), nullptr);
    pack_keys<T>(p, in_use, p.v_mem, p.v, b, h, j0 + first, last - first, Dp, nullptr, s.v_rows + first * Dp);
    s.table.template cover<T>(p, in_use, h, rho_of(p, i0 + rows - 1, j0 + first), rho_of(p, i0, j0 + last), Dp);
    for (int64_t i = 0; i < rows; i += MR) {
      if (p.drop_below && i % GROUP == 0)
        dropout_factors(p, ranges.row + i, min_of(GROUP, rows - i), bh, i0 + i, j0, s.factor);
      const Range seen = within(ranges.strip[i / MR], j0);
      if (!seen.any()) continue;
      const int64_t from = seen.low / NR * NR, to = round_up(seen.high, STEP);
      const int64_t offset = strip_scores(p, Dp, s.qu + i * Dp, s.qw + i * Dp, i0 + i, j0, from, to, s.k_panels,
                                          s.table, s.content, s.position);
      Softmax softmax;
      for (int64_t x = 0; x < MR; ++x) {
        const Range own = within(ranges.row[i + x], j0);
        if (!own.any()) continue;
        auto* const add = own.low == from && own.high == to ? add_position<true> : add_position<false>;
        softmax.lanes[x] =
            add(s.content + x * BLOCK_S, s.position + x * POSITION_LD + offset - x, own.low, own.high, from, to);
      }
      softmax.raise(maximum + i);
      for (int64_t x = 0; x < MR; ++x) {
        const Range own = within(ranges.row[i + x], j0);
        Cell* weights = s.weights + x * BLOCK_S;
        if (!own.any()) {
          memset(weights + from, 0, sizeof(Cell) * (to - from));
          continue;
        }
        auto* const weigh_row = p.drop_below ? weigh<true> : weigh<false>;
        softmax.lanes[x] = weigh_row(s.content + x * BLOCK_S, softmax.maximum[x], s.factor + (i % GROUP + x) * BLOCK_S,
                                     own.low, own.high, from, to, weights);
        if (const float rescale = softmax.rescale[x]; rescale != 1.f)
          for (int64_t d = 0; d < Dp; d += LANES) store(out + (i + x) * Dp + d, load(out + (i + x) * Dp + d) * rescale);
      }
      softmax.add_up(total + i);
      add_times_rows(s.weights + from, BLOCK_S, s.v_rows + from * Dp, to - from, Dp, out + i * Dp);
    }
  }
}

// Merges the results of the parts, `step` floats apart, into the first and writes out and lse.
template <class T>
static void write_range(const Problem& p, const ForwardPlan& z, int64_t bh, int64_t i0, int64_t count, float* result,
                        int64_t step) {
  const int64_t maxima = z.rows * z.Dp, sums = maxima + z.rows;
  for (int64_t i = 0; i < count; ++i) {
    float top = -INF, total = 0;
    for (int64_t n = 0; n < z.parts; ++n) top = max_of(splat(result[n * step + maxima + i]), splat(top))[0];
    float* out = result + i * z.Dp;
    for (int64_t n = 0; n < z.parts; ++n) {
      const float* from = result + n * step;
      if (from[sums + i] == 0) continue;  // sees none of this part's keys
      const float factor = exp_of(from[maxima + i] - top);
      total += from[sums + i] * factor;
      if (n == 0 && factor == 1.f) continue;
      for (int64_t d = 0; d < z.Dp; d += LANES)
        store(out + d, (n ? load(out + d) : vf{}) + load(from + i * z.Dp + d) * factor);
    }
    const bool empty = !visible(p, bh / p.H, i0 + i).any();
    T* to = const_cast<T*>(row_of<T>(p.out, bh / p.H, bh % p.H, i0 + i));
    write_row(to, out, empty ? 0.f : 1.f / total, p.D);
    if (p.lse) p.lse[bh * p.L + i0 + i] = empty ? -INF : top + log_of(total);
  }
}

// Forward by tiles, for any number of queries. An item is a range of queries and a head: of one batch row
// and a part of its keys, or of several small batch rows, which find the table packed.
template <class T>
static void run_tiles(const Problem& p) {
  const ForwardPlan z(p);
  const InUse in_use(p);
  const int64_t pairs = p.B * p.H * z.ranges, per_thread = floats_of<ForwardScratch>(p, z);
  const int64_t group = z.parts > 1 ? 1 : batch_rows_of_item(p, FORWARD_ITEMS), groups = div_up(p.B, group);
  Buffer scratch(p.threads * per_thread), results(z.parts > 1 ? pairs * z.parts * z.entry() : 0);
  // Longest first: a causal range late in the segment sees the most keys.
  auto range_of = [&](int64_t x) { return (z.ranges - 1 - x) * z.range; };
  parallel_for(p.threads, z.ranges * p.H * groups * z.parts, [&](int64_t item, int thread) {
    const int64_t n = item % z.parts, b0 = item / z.parts % groups * group, h = item / z.parts / groups % p.H;
    const int64_t x = item / z.parts / groups / p.H, i0 = range_of(x), count = min_of(z.range, p.L - i0);
    [[maybe_unused]] const Unit unit;
    Arena arena(scratch.data + thread * per_thread);
    ForwardScratch s(arena, p, z);
    for (int64_t b = b0; b < min_of(b0 + group, p.B); ++b) {
      const int64_t bh = b * p.H + h;
      float* result = z.parts > 1 ? results.data + ((x * p.B * p.H + bh) * z.parts + n) * z.entry() : s.result;
      forward_range<T>(p, z, in_use, bh, i0, count, {n * z.part, (n + 1) * z.part}, s, result);
      if (z.parts == 1) write_range<T>(p, z, bh, i0, count, result, 0);
    }
  });
  if (z.parts > 1)
    parallel_for(p.threads, pairs, [&](int64_t pair, int) {
      const int64_t i0 = range_of(pair / (p.B * p.H));
      write_range<T>(p, z, pair % (p.B * p.H), i0, min_of(z.range, p.L - i0), results.data + pair * z.parts * z.entry(),
                     z.entry());
    });
}

template <class T>
static void run_forward(const Problem& p) {
  if (decode_fits(p))
    run_decode<T>(p);
  else
    run_tiles<T>(p);
}

}  // namespace
}  // namespace txl::TXL_ISA
