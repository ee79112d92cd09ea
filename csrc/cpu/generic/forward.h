// Forward: a range of queries walks the tiles of keys it can see with an online softmax (Milakov
// and Gimelshein 2018). Each tile is packed where it is used, so that it stays in the cache. Few
// items: the keys are split into parts, whose results are merged by log-sum-exp in order; how many
// parts is a function of shapes, so threads change no bit.
#pragma once
#include "decode.h"
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t GROUP = MR % 8 == 0   ? MR
                          : MR % 4 == 0 ? 2 * MR
                                        : 4 * MR;     // queries of whole strips, and of whole
                                                      // blocks of dropout
constexpr int64_t RANGE_L = DEPTH == 32 ? 768 : 384;  // queries of an item, at most; a multiple of GROUP
constexpr int64_t FORWARD_ITEMS = 32;                 // parts are made until there are as many items
constexpr int64_t PART_S = 768;                       // keys of a part, at least

// One row over [from, to) of a tile, multiples of STEP: weight = e^(score + position - shift), 0 outside [low, high),
// the score capped first if CAPPED, times the dropout factors if there are any. WHOLE: low is from and high is to.
// score may be weight. Tells the sums of the weights before dropout and the largest scores, by lanes.
template <bool WHOLE, bool DROP, bool CAPPED>
static void weigh(const float* score, const float* position, const Cap& cap, float shift, const float* factor,
                  int64_t low, int64_t high, int64_t from, int64_t to, Packed* weight, vf& sum, vf& top) {
  vf added = {}, largest = splat(-INF);
  for (int64_t n = from; n < to; n += WEIGHTS) {
    vf kept[WEIGHTS / LANES];
    TXL_UNROLL(2)
    for (int z = 0; z < WEIGHTS / LANES; ++z) {
      const int64_t at = n + z * LANES;
      vf x = load(score + at) + load(position + at);
      if (CAPPED) x = cap(x);
      if (!WHOLE) x = lanes_within(at, low, high) ? x : splat(-INF);
      largest = max_of(x, largest);
      const vf e = weight_of(x - splat(shift));
      added += e;
      kept[z] = e;
      if (DROP) kept[z] = lanes_within(at, low, high) ? e * load(factor + at) : vf{};  // beyond, none is known
    }
    store_weights(weight + n, kept);
  }
  sum = added, top = largest;
}

// Online softmax of one strip. Row maxima and sums stay in vectors until the strip ends, so that they are reduced for
// all rows at once. A row's weights are
// e^(score - reference), the reference a score that it met. So that one pass over the scores will do, it may lie up to
// SLACK below the largest, which costs no accuracy.
constexpr float SLACK = 14;

struct Softmax {
  static constexpr int ROWS = (MR + LANES - 1) / LANES * LANES;
  vf top[ROWS], sum[ROWS];  // of each row, by lanes
  float reference[ROWS], rescale[ROWS];
  const float slack;

  Softmax(const float* references, float max_slack) : slack(max_slack) {
    for (int x = 0; x < ROWS; ++x) reference[x] = -INF;
    memcpy(reference, references, sizeof(float) * MR);
    clear();
  }
  void clear() {
    for (int x = 0; x < ROWS; ++x) top[x] = splat(-INF), sum[x] = vf{};
  }
  float shift(int64_t x) const { return reference[x] == -INF ? 0.f : reference[x]; }  // of -inf alone weighs nothing

  // Whether some row met scores too far above its reference, which is raised; its weights are then to be formed
  // anew, and rescale[x] tells the factors for what came before.
  bool raise() {
    float largest[ROWS];
    bool some = false;
    for (int x = 0; x < ROWS; x += LANES) store(largest + x, max_each(top + x));
    for (int x = 0; x < MR; ++x) {
      rescale[x] = 1.f;
      if (!(largest[x] > reference[x] + slack)) continue;
      rescale[x] = exp_of(reference[x] - largest[x]);
      reference[x] = largest[x], some = true;
    }
    return some;
  }

  // Adds the sums of the strip to its totals.
  void add_up(float* total) {
    float added[ROWS];
    for (int x = 0; x < ROWS; x += LANES) store(added + x, sum_each(sum + x));
    for (int x = 0; x < MR; ++x) total[x] += added[x];
  }
};

// weigh of a call.
TXL_INLINE auto* weigh_of(const Problem& p, bool whole) {
  if (p.softcap) return p.drop_below ? weigh<false, true, true> : weigh<false, false, true>;
  return p.drop_below ? weigh<false, true, false> : whole ? weigh<true, false, false> : weigh<false, false, false>;
}

// The largest of the first scores that a row sees, to begin with.
TXL_INLINE float first_score(const float* score, const float* position, const Cap& cap, Range own) {
  const int64_t n = own.low / LANES * LANES;
  vf x = load(score + n) + load(position + n);
  if (cap.cap) x = cap(x);
  return max_lane(lanes_within(n, own.low, own.high) ? x : splat(-INF));
}

constexpr int64_t MAX_HEADS = 8;  // of an item: each has a result and queries in working memory

// How the work is cut: items are a batch row and heads that read one head of keys, a range of queries, a part of the
// keys.
struct ForwardPlan {
  int64_t Dp, Drp, Dvp, range, ranges, part, parts, rows;  // range: queries; part: keys; rows: a range rounded up to MR
  int64_t heads;                                           // of an item: a divisor of the group

  explicit ForwardPlan(const Problem& p)
      : Dp(round_up(p.D, NR)), Drp(round_up(p.Dr, NR)), Dvp(round_up(p.Dv, NR)), heads(min_of(group_of(p), MAX_HEADS)) {
    const int64_t S = p.M + p.L, tiles = div_up(S, BLOCK_S);
    ranges = div_up(p.L, RANGE_L);
    range = round_up(div_up(p.L, ranges), GROUP);
    ranges = div_up(p.L, range);
    auto few = [&] { return p.B * p.H / heads * ranges * max_of(1, S / PART_S) < FORWARD_ITEMS; };
    while (heads > 1 && (group_of(p) % heads || few())) --heads;  // items for all cores come first
    parts = clamp(div_up(FORWARD_ITEMS, p.B * p.H / heads * ranges), 1, max_of(1, S / PART_S));
    part = div_up(tiles, parts) * BLOCK_S;
    parts = div_up(S, part);
    rows = min_of(range, round_up(p.L, MR));
  }
  int64_t entry() const { return rows * (Dvp + 2); }  // floats of a head's result: out, then references, then sums
};

#ifdef TXL_PAIRS
// Forward's weights, rounded.
TXL_INLINE bf16* weights_of(Arena& a, float*) { return a.take<bf16>(MR * BLOCK_S); }
#else
// Forward's weights take the place of the scores.
TXL_INLINE float* weights_of(Arena&, float* scores) { return scores; }
#endif

// One thread's working memory. What each head of a group has of its own: qu, qw, the result and its window of the
// table, unless the heads share one.
struct ForwardScratch {
  Packed *qu, *qw, *k_panels, *v_rows;
  float *content, *position;
  Packed* weights;
  float *factor, *result;
  bool one_table;
  Table* tables;

  ForwardScratch(Arena& a, const Problem& p, const ForwardPlan& plan)
      : qu(a.take<Packed>(plan.heads * plan.rows * plan.Dp)),
        qw(a.take<Packed>(plan.heads * plan.rows * plan.Drp)),
        k_panels(a.take<Packed>(BLOCK_S * deep(p.D))),
        v_rows(a.take<Packed>(BLOCK_S * plan.Dvp)),
        content(a.take(MR * BLOCK_S)),
        position(a.take(MR * POSITION_LD)),
        weights(weights_of(a, content)),
        factor(a.take(GROUP * BLOCK_S)),
        result(a.take(plan.heads * plan.entry())),
        one_table(plan.heads == 1 || (p.r.s0 == 0 && p.r_bias.s0 == 0)),
        tables(a.take<Table>(one_table ? 1 : plan.heads)) {
    for (int64_t g = 0; g < (one_table ? 1 : plan.heads); ++g) {
      const Table empty(a, Table::room(BLOCK_S + plan.rows), p, 0);
      if (tables) tables[g] = empty;
    }
  }
};

// Queries [i0, i0 + count) of one head of a batch row, against tiles of keys.
template <class T>
struct HeadRange {
  const Problem& p;
  const ForwardPlan& plan;
  const BlockRanges<RANGE_L>& ranges;
  int64_t b, h, i0, rows;  // rows: count rounded up to MR
  const Packed *qu, *qw;
  Table& table;
  float *out, *reference, *total;  // of the result
  float slack;                     // SLACK, or less
  NextTile<T> next;

  // Adds a tile of keys, packed in s, to out (not yet divided), references and sums.
  void add_tile(int64_t j0, ForwardScratch& s) const {
    const int64_t Dp = plan.Dp, Drp = plan.Drp, Dvp = plan.Dvp;
    const Cap cap(p);
    for (int64_t i = 0; i < rows; i += MR) {
      if (p.drop_below && i % GROUP == 0)
        dropout_factors(p, ranges.row + i, min_of(GROUP, rows - i), b * p.H + h, i0 + i, j0, s.factor);
      const Range seen = within(ranges.strip[i / MR], j0);
      if (!seen.any()) continue;
      const int64_t from = seen.low / NR * NR, to = round_up(seen.high, STEP);
      Softmax softmax(reference + i, slack);
      for (bool raised = true; raised;) {
        const Positions positions = strip_scores(p, Dp, Drp, qu + i * Dp, qw + i * Drp, i0 + i, j0, from, to,
                                                 s.k_panels, table, s.content, s.position);
        for (int64_t x = 0; x < MR; ++x) {
          // A few rows at a time: the processor waits where many loads are outstanding.
          next.fetch(j0 + BLOCK_S + (i + x) * BLOCK_S / rows, j0 + BLOCK_S + (i + x + 1) * BLOCK_S / rows);
          const Range own = within(ranges.row[i + x], j0);
          Packed* const weights = s.weights + x * BLOCK_S;
          float* const score = s.content + x * BLOCK_S;
          const float* const position = positions.row(x);
          if (!own.any()) {
            memset(weights + from, 0, sizeof(Packed) * (to - from));
            continue;
          }
          if (softmax.reference[x] == -INF) softmax.reference[x] = first_score(score, position, cap, own);
          const bool whole = own.low == from && own.high == to;
          weigh_of(p, whole)(score, position, cap, softmax.shift(x), s.factor + (i % GROUP + x) * BLOCK_S, own.low,
                             own.high, from, to, weights, softmax.sum[x], softmax.top[x]);
        }
        raised = softmax.raise();
        for (int64_t x = 0; raised && x < MR; ++x) {
          if (softmax.rescale[x] == 1.f) continue;
          total[i + x] *= softmax.rescale[x];
          for (int64_t d = 0; d < Dvp; d += LANES)
            store(out + (i + x) * Dvp + d, load(out + (i + x) * Dvp + d) * softmax.rescale[x]);
        }
        if (raised) softmax.clear();
      }
      memcpy(reference + i, softmax.reference, sizeof(float) * MR);
      softmax.add_up(total + i);
      const int64_t first = seen.low / DEPTH * DEPTH;
      add_times_rows(s.weights + first, BLOCK_S, s.v_rows + first * Dvp, round_up(seen.high - first, DEPTH), Dvp,
                     out + i * Dvp);
    }
  }
};

// out (not yet divided), references and sums of queries [i0, i0 + count) over the keys of a part, of each of the item's
// heads from h0 on, into `result`, `step` floats apart. A tile of keys and values is packed once for all of them.
// slack: SLACK, or less.
template <class T>
static void sum_range(const Problem& p, const ForwardPlan& plan, const InUse& in_use, int64_t b, int64_t h0, int64_t i0,
                      int64_t count, Range part, float slack, ForwardScratch& s, float* result, int64_t step) {
  const int64_t Dp = plan.Dp, Drp = plan.Drp, Dvp = plan.Dvp, rows = round_up(count, MR), hk = key_head(p, h0);
  const BlockRanges<RANGE_L> ranges(p, b, i0, count, part);
  auto head = [&](int64_t g) {
    float *const out = result + g * step, *const reference = out + plan.rows * Dvp;
    return HeadRange<T>{p,
                        plan,
                        ranges,
                        b,
                        h0 + g,
                        i0,
                        rows,
                        s.qu + g * plan.rows * Dp,
                        s.qw + g * plan.rows * Drp,
                        s.tables[s.one_table ? 0 : g],
                        out,
                        reference,
                        reference + plan.rows,
                        slack,
                        {p, b, h0 + g, i0, ranges.all.high, g == 0, p.r.data && (g == 0 || !s.one_table)}};
  };
  for (int64_t g = 0; g < plan.heads; ++g) {
    const HeadRange<T> it = head(g);
    memset(it.out, 0, sizeof(float) * rows * Dvp);
    for (int64_t i = 0; i < rows; ++i) it.reference[i] = -INF, it.total[i] = 0;
    pack_queries<T>(
        p, b, it.h, i0, rows, [&](int64_t i) { return ranges.row[i].any(); }, Dp, Drp, s.qu + g * plan.rows * Dp,
        s.qw + g * plan.rows * Drp);
  }
  for (int64_t j0 = ranges.all.low / BLOCK_S * BLOCK_S; j0 < ranges.all.high; j0 += BLOCK_S) {
    const Range tile = within(ranges.all, j0);
    const int64_t first = tile.low / NR * NR, last = round_up(tile.high, NR);
    pack_keys<T>(p, in_use, p.k_mem, p.k, b, hk, j0 + first, last - first, p.D, Dp, s.k_panels + first * deep(p.D),
                 nullptr);
    pack_keys<T>(p, in_use, p.v_mem, p.v, b, hk, j0 + first, last - first, p.Dv, Dvp, nullptr, s.v_rows + first * Dvp);
    for (int64_t g = 0; g < plan.heads; ++g) {
      const HeadRange<T> it = head(g);
      it.table.template cover<T>(p, in_use, it.h, rho_of(p, i0 + rows - 1, j0 + first), rho_of(p, i0, j0 + last), Drp);
      it.add_tile(j0, s);
    }
  }
}

// The same, for values of any size: weights of up to e^SLACK times values near the largest float are not finite, where
// weights of at most 1 may be.
template <class T>
static void forward_range(const Problem& p, const ForwardPlan& plan, const InUse& in_use, int64_t b, int64_t h0,
                          int64_t i0, int64_t count, Range part, ForwardScratch& s, float* result, int64_t step) {
  sum_range<T>(p, plan, in_use, b, h0, i0, count, part, SLACK, s, result, step);
  vf odd = {};  // 0, or NaN
  for (int64_t g = 0; g < plan.heads; ++g)
    for (int64_t n = 0; n < count * plan.Dvp; n += LANES) odd += load(result + g * step + n) * 0.f;
  if (!(sum_lanes(odd) == 0)) sum_range<T>(p, plan, in_use, b, h0, i0, count, part, 0.f, s, result, step);
}

// Merges a head's results of the parts, `step` floats apart, into the first and writes out and lse.
template <class T>
static void write_range(const Problem& p, const ForwardPlan& plan, int64_t bh, int64_t i0, int64_t count, float* result,
                        int64_t step) {
  const int64_t references = plan.rows * plan.Dvp, sums = references + plan.rows;
  for (int64_t i = 0; i < count; ++i) {
    float top = -INF, total = 0;
    for (int64_t n = 0; n < plan.parts; ++n) top = max_of(splat(result[n * step + references + i]), splat(top))[0];
    float* out = result + i * plan.Dvp;
    for (int64_t n = 0; n < plan.parts; ++n) {
      const float* from = result + n * step;
      if (from[sums + i] == 0) continue;  // sees none of this part's keys
      const float factor = exp_of(from[references + i] - top);
      total += from[sums + i] * factor;
      if (n == 0 && factor == 1.f) continue;
      for (int64_t d = 0; d < plan.Dvp; d += LANES)
        store(out + d, (n ? load(out + d) : vf{}) + load(from + i * plan.Dvp + d) * factor);
    }
    const bool empty = !visible(p, bh / p.H, i0 + i).any();
    T* to = const_cast<T*>(row_of<T>(p.out, bh / p.H, bh % p.H, i0 + i));
    write_row(to, out, empty ? 0.f : share_of(p, bh, i0 + i, top, total), p.Dv);
    if (p.lse) p.lse[bh * p.L + i0 + i] = empty ? -INF : top + log_of(total);
  }
}

// Forward by tiles, for any number of queries. An item is a range of queries and the heads that read one head of keys:
// of one batch row and a part of its keys, or of several small batch rows, which find the table packed.
template <class T>
static void run_tiles(const Problem& p) {
  const ForwardPlan plan(p);
  const InUse in_use(p);
  const int64_t pairs = p.B * p.H * plan.ranges, per_thread = floats_of<ForwardScratch>(p, plan);
  const int64_t group = plan.parts > 1 ? 1 : batch_rows_of_item(p, FORWARD_ITEMS), groups = div_up(p.B, group);
  const int64_t bundles = p.H / plan.heads;                                        // of heads that share an item
  const int64_t step = plan.parts > 1 ? plan.parts * plan.entry() : plan.entry();  // from head to head
  Buffer scratch(p.threads * per_thread), results(plan.parts > 1 ? pairs * plan.parts * plan.entry() : 0);
  // Longest first: a causal range late in the segment sees the most keys.
  auto range_of = [&](int64_t x) { return (plan.ranges - 1 - x) * plan.range; };
  parallel_for(p.threads, plan.ranges * bundles * groups * plan.parts, [&](int64_t item, int thread) {
    const int64_t n = item % plan.parts, b0 = item / plan.parts % groups * group;
    const int64_t h0 = item / plan.parts / groups % bundles * plan.heads, x = item / plan.parts / groups / bundles;
    const int64_t i0 = range_of(x), count = min_of(plan.range, p.L - i0);
    [[maybe_unused]] const Unit unit;
    Arena arena(scratch.data + thread * per_thread);
    ForwardScratch s(arena, p, plan);
    for (int64_t b = b0; b < min_of(b0 + group, p.B); ++b) {
      const int64_t bh = b * p.H + h0;  // of the first head
      float* result = plan.parts > 1 ? results.data + ((x * p.B * p.H + bh) * plan.parts + n) * plan.entry() : s.result;
      forward_range<T>(p, plan, in_use, b, h0, i0, count, {n * plan.part, (n + 1) * plan.part}, s, result, step);
      for (int64_t g = 0; plan.parts == 1 && g < plan.heads; ++g)
        write_range<T>(p, plan, bh + g, i0, count, result + g * step, 0);
    }
  });
  if (plan.parts > 1)
    parallel_for(p.threads, pairs, [&](int64_t pair, int) {
      const int64_t i0 = range_of(pair / (p.B * p.H));
      write_range<T>(p, plan, pair % (p.B * p.H), i0, min_of(plan.range, p.L - i0),
                     results.data + pair * plan.parts * plan.entry(), plan.entry());
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
