// Forward: a range of queries loops over the tiles of keys that it sees, with an online softmax (Milakov and Gimelshein
// 2018). Each tile is packed where it is used, so that it stays in the cache. If there are few items, the keys are
// split into parts, whose results are merged by their log-sum-exp in order. The split depends on shapes alone, so
// results have the same bits at any number of threads.
#pragma once
#include "decode.h"
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t QUERY_ALIGN = MR % 8 == 0 ? MR : MR % 4 == 0 ? 2 * MR : 4 * MR;  // a multiple of MR and DROPOUT_ROWS
constexpr int64_t RANGE_L = DEPTH == 32 ? 768 : 384;  // maximum of queries of an item; a multiple of QUERY_ALIGN
constexpr int64_t FORWARD_ITEMS = 32;                 // keys are split into parts until there are as many items
constexpr int64_t MIN_PART_S = 768;                   // minimum of keys of a part

// Computes the weights of one row for the keys [from, to) of a tile, multiples of KEY_STEP: e^(score + position -
// shift), 0 outside [low, high), with softcap if SOFTCAP, times the dropout factors if DROPOUT. FULL: low is from and
// high is to. `weight` may be `score`. Returns in each lane of sum and max the sum of weights before dropout and the
// maximum of scores.
template <bool FULL, bool DROPOUT, bool SOFTCAP>
static void exp_weights(const float* score, const float* position, const Softcap& softcap, float shift,
                        const float* factor, int64_t low, int64_t high, int64_t from, int64_t to, Packed* weight,
                        vf& sum, vf& max) {
  vf lane_sum = {}, lane_max = splat(-INF);
  for (int64_t n = from; n < to; n += WEIGHTS_PER_STORE) {
    vf weights[WEIGHTS_PER_STORE / LANES];
    TXL_UNROLL(2)
    for (int z = 0; z < WEIGHTS_PER_STORE / LANES; ++z) {
      const int64_t at = n + z * LANES;
      vf x = load(score + at) + load(position + at);
      if (SOFTCAP) x = softcap(x);
      if (!FULL) x = lane_mask(at, low, high) ? x : splat(-INF);
      lane_max = max_of(x, lane_max);
      const vf e = exp_weight(x - splat(shift));
      lane_sum += e;
      weights[z] = e;
      if (DROPOUT)
        weights[z] = lane_mask(at, low, high) ? e * load(factor + at) : vf{};  // factors of hidden keys are not set
    }
    store_weights(weight + n, weights);
  }
  sum = lane_sum, max = lane_max;
}

// The online softmax of one strip. Row maxima and sums stay in vectors until the strip ends, so that they are reduced
// for all rows at once. A row's weights are e^(score - reference), where the reference is a score of an earlier key. It
// may be up to SLACK below the maximum, so that one pass over the scores suffices; this costs no accuracy.
constexpr float SLACK = 14;

struct Softmax {
  static constexpr int ROWS = (MR + LANES - 1) / LANES * LANES;
  vf max[ROWS], sum[ROWS];  // for each row, in each lane
  float reference[ROWS], rescale[ROWS];
  const float slack;

  Softmax(const float* references, float max_slack) : slack(max_slack) {
    for (int x = 0; x < ROWS; ++x) reference[x] = -INF;
    memcpy(reference, references, sizeof(float) * MR);
    clear();
  }
  void clear() {
    for (int x = 0; x < ROWS; ++x) max[x] = splat(-INF), sum[x] = vf{};
  }
  float shift(int64_t x) const { return reference[x] == -INF ? 0.f : reference[x]; }  // weights of -inf are 0

  // Raises the reference of each row that has a score more than `slack` above it. Returns whether there was one:
  // weights must then be computed again, and row x of the previous output and sum multiplied by rescale[x].
  bool update_references() {
    float row_max[ROWS];
    bool updated = false;
    for (int x = 0; x < ROWS; x += LANES) store(row_max + x, reduce_max_rows(max + x));
    for (int x = 0; x < MR; ++x) {
      rescale[x] = 1.f;
      if (!(row_max[x] > reference[x] + slack)) continue;
      rescale[x] = exp_of(reference[x] - row_max[x]);
      reference[x] = row_max[x], updated = true;
    }
    return updated;
  }

  // Adds the strip's row sums to `total`.
  void add_sums(float* total) {
    float row_sum[ROWS];
    for (int x = 0; x < ROWS; x += LANES) store(row_sum + x, reduce_add_rows(sum + x));
    for (int x = 0; x < MR; ++x) total[x] += row_sum[x];
  }
};

// The instance of exp_weights for a call.
TXL_INLINE auto* exp_weights_for(const Problem& p, bool full) {
  if (p.softcap) return p.drop_below ? exp_weights<false, true, true> : exp_weights<false, false, true>;
  return p.drop_below ? exp_weights<false, true, false>
         : full       ? exp_weights<true, false, false>
                      : exp_weights<false, false, false>;
}

// The first reference of a row: the maximum of the first vector of scores that it sees.
TXL_INLINE float initial_reference(const float* score, const float* position, const Softcap& softcap, Range own) {
  const int64_t n = own.low / LANES * LANES;
  vf x = load(score + n) + load(position + n);
  if (softcap.limit) x = softcap(x);
  return reduce_max(lane_mask(n, own.low, own.high) ? x : splat(-INF));
}

constexpr int64_t MAX_HEADS = 8;  // maximum of query heads of an item: each has a result and queries in working memory

// The split of the work into items. An item has one batch row, `heads` query heads that share a key-value head, a range
// of the queries and a part of the keys.
struct ForwardPlan {
  int64_t Dp, Drp, Dvp, range, ranges, part, parts, rows;  // range: queries; part: keys; rows: a range rounded up to MR
  int64_t heads;                                           // a divisor of the group size

  explicit ForwardPlan(const Problem& p)
      : Dp(round_up(p.D, NR)),
        Drp(round_up(p.Dr, NR)),
        Dvp(round_up(p.Dv, NR)),
        heads(min_of(group_size(p), MAX_HEADS)) {
    const int64_t S = p.M + p.L, tiles = div_up(S, BLOCK_S);
    ranges = div_up(p.L, RANGE_L);
    range = round_up(div_up(p.L, ranges), QUERY_ALIGN);
    ranges = div_up(p.L, range);
    auto too_few_items = [&] { return p.B * p.H / heads * ranges * max_of(1, S / MIN_PART_S) < FORWARD_ITEMS; };
    while (heads > 1 && (group_size(p) % heads || too_few_items())) --heads;  // enough items for all cores come first
    parts = clamp(div_up(FORWARD_ITEMS, p.B * p.H / heads * ranges), 1, max_of(1, S / MIN_PART_S));
    part = div_up(tiles, parts) * BLOCK_S;
    parts = div_up(S, part);
    rows = min_of(range, round_up(p.L, MR));
  }
  int64_t result_floats() const { return rows * (Dvp + 2); }  // of a head: out, then references, then sums
};

#ifdef TXL_BF16_DOT
// Room for a strip's weights, rounded to bfloat16.
TXL_INLINE bf16* allocate_weights(Arena& a, float*) { return a.allocate<bf16>(MR * BLOCK_S); }
#else
// A strip's weights overwrite its scores.
TXL_INLINE float* allocate_weights(Arena&, float* scores) { return scores; }
#endif

// One thread's working memory. Each head of an item has its own qu, qw, result and, unless all share one table, window
// of the table.
struct ForwardScratch {
  Packed *qu, *qw, *k_panels, *v_rows;
  float *content, *position;
  Packed* weights;
  float *factor, *result;
  bool shared_table;
  TableWindow* tables;

  ForwardScratch(Arena& a, const Problem& p, const ForwardPlan& plan)
      : qu(a.allocate<Packed>(plan.heads * plan.rows * plan.Dp)),
        qw(a.allocate<Packed>(plan.heads * plan.rows * plan.Drp)),
        k_panels(a.allocate<Packed>(BLOCK_S * padded_depth(p.D))),
        v_rows(a.allocate<Packed>(BLOCK_S * plan.Dvp)),
        content(a.allocate(MR * BLOCK_S)),
        position(a.allocate(MR * POSITION_LD)),
        weights(allocate_weights(a, content)),
        factor(a.allocate(QUERY_ALIGN * BLOCK_S)),
        result(a.allocate(plan.heads * plan.result_floats())),
        shared_table(plan.heads == 1 || (p.r.s0 == 0 && p.r_bias.s0 == 0)),
        tables(a.allocate<TableWindow>(shared_table ? 1 : plan.heads)) {
    for (int64_t g = 0; g < (shared_table ? 1 : plan.heads); ++g) {
      const TableWindow empty(a, TableWindow::capacity_for(BLOCK_S + plan.rows), p, 0);
      if (tables) tables[g] = empty;
    }
  }
};

// Attention of queries [i0, i0 + count) of one head of a batch row over tiles of keys.
template <class T>
struct HeadRange {
  const Problem& p;
  const ForwardPlan& plan;
  const BlockRanges<RANGE_L>& ranges;
  int64_t b, h, i0, rows;  // rows: count rounded up to ROW_STEP
  const Packed *qu, *qw;
  TableWindow& table;
  float *out, *reference, *total;  // the result
  float slack;                     // at most SLACK
  TilePrefetcher<T> next;

  // Adds the tile of keys that is packed in s to out (not yet normalized), references and sums.
  void add_tile(int64_t j0, ForwardScratch& s) const {
    const int64_t Dp = plan.Dp, Drp = plan.Drp, Dvp = plan.Dvp;
    const Softcap softcap(p);
    for (int64_t i = 0; i < rows; i += MR) {
      if (p.drop_below && i % QUERY_ALIGN == 0)
        dropout_factors(p, ranges.row + i, min_of(QUERY_ALIGN, rows - i), b * p.H + h, i0 + i, j0, s.factor);
      const Range seen = clip_to_tile(ranges.strip[i / MR], j0);
      if (!seen.any()) continue;
      const int64_t from = seen.low / COLUMN_STEP * COLUMN_STEP, to = round_up(seen.high, KEY_STEP);
      const int64_t strip_rows = min_of(MR, rows - i);
      Softmax softmax(reference + i, slack);
      for (bool updated = true; updated;) {
        const PositionScores positions = strip_scores(p, Dp, Drp, qu + i * Dp, qw + i * Drp, i0 + i, strip_rows, j0,
                                                      from, to, s.k_panels, table, s.content, s.position);
        for (int64_t x = 0; x < strip_rows; ++x) {
          // A few rows at a time, since only few prefetches can be outstanding.
          next.prefetch(j0 + BLOCK_S + (i + x) * BLOCK_S / rows, j0 + BLOCK_S + (i + x + 1) * BLOCK_S / rows);
          const Range own = clip_to_tile(ranges.row[i + x], j0);
          Packed* const weights = s.weights + x * BLOCK_S;
          float* const score = s.content + x * BLOCK_S;
          const float* const position = positions.row(x);
          if (!own.any()) {
            memset(weights + from, 0, sizeof(Packed) * (to - from));
            continue;
          }
          if (softmax.reference[x] == -INF) softmax.reference[x] = initial_reference(score, position, softcap, own);
          const bool full = own.low == from && own.high == to;
          exp_weights_for(p, full)(score, position, softcap, softmax.shift(x),
                                   s.factor + (i % QUERY_ALIGN + x) * BLOCK_S, own.low, own.high, from, to, weights,
                                   softmax.sum[x], softmax.max[x]);
        }
        updated = softmax.update_references();
        for (int64_t x = 0; updated && x < strip_rows; ++x) {
          if (softmax.rescale[x] == 1.f) continue;
          total[i + x] *= softmax.rescale[x];
          for (int64_t d = 0; d < Dvp; d += LANES)
            store(out + (i + x) * Dvp + d, load(out + (i + x) * Dvp + d) * softmax.rescale[x]);
        }
        if (updated) softmax.clear();
      }
      memcpy(reference + i, softmax.reference, sizeof(float) * MR);
      softmax.add_sums(total + i);
      const int64_t first = seen.low / DEPTH * DEPTH;
      gemm_add_rows(strip_rows, s.weights + first, BLOCK_S, s.v_rows + first * Dvp, round_up(seen.high - first, DEPTH),
                    Dvp, out + i * Dvp);
    }
  }
};

// Computes out (not yet normalized), references and sums of queries [i0, i0 + count) over the keys of a part, for the
// item's heads from h0 on. Their results are `stride` floats apart. A tile of keys and values is packed once for all
// heads. slack: at most SLACK.
template <class T>
static void accumulate_range(const Problem& p, const ForwardPlan& plan, const VisibleRows& visible_rows, int64_t b,
                             int64_t h0, int64_t i0, int64_t count, Range part, float slack, ForwardScratch& s,
                             float* result, int64_t stride) {
  const int64_t Dp = plan.Dp, Drp = plan.Drp, Dvp = plan.Dvp, rows = round_up(count, ROW_STEP), hk = kv_head(p, h0);
  const BlockRanges<RANGE_L> ranges(p, b, i0, count, part);
  auto head = [&](int64_t g) {
    float *const out = result + g * stride, *const reference = out + plan.rows * Dvp;
    return HeadRange<T>{p,
                        plan,
                        ranges,
                        b,
                        h0 + g,
                        i0,
                        rows,
                        s.qu + g * plan.rows * Dp,
                        s.qw + g * plan.rows * Drp,
                        s.tables[s.shared_table ? 0 : g],
                        out,
                        reference,
                        reference + plan.rows,
                        slack,
                        {p, b, h0 + g, i0, ranges.all.high, g == 0, p.r.data && (g == 0 || !s.shared_table)}};
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
    const Range tile = clip_to_tile(ranges.all, j0);
    const int64_t first = tile.low / NR * NR, last = round_up(tile.high, NR);
    pack_keys<T>(p, visible_rows, p.k_mem, p.k, b, hk, j0 + first, last - first, p.D, Dp,
                 s.k_panels + first * padded_depth(p.D), nullptr);
    pack_keys<T>(p, visible_rows, p.v_mem, p.v, b, hk, j0 + first, last - first, p.Dv, Dvp, nullptr,
                 s.v_rows + first * Dvp);
    for (int64_t g = 0; g < plan.heads; ++g) {
      const HeadRange<T> it = head(g);
      it.table.template ensure_packed<T>(p, visible_rows, it.h, rho_of(p, i0 + rows - 1, j0 + first),
                                         rho_of(p, i0, j0 + last), Drp);
      it.add_tile(j0, s);
    }
  }
}

// The same for values of any size. Weights are at most e^SLACK, and products with values near the largest float may
// overflow; then it starts again with weights of at most 1.
template <class T>
static void forward_range(const Problem& p, const ForwardPlan& plan, const VisibleRows& visible_rows, int64_t b,
                          int64_t h0, int64_t i0, int64_t count, Range part, ForwardScratch& s, float* result,
                          int64_t stride) {
  accumulate_range<T>(p, plan, visible_rows, b, h0, i0, count, part, SLACK, s, result, stride);
  vf nan_flag = {};  // NaN if any output is not finite, else 0
  for (int64_t g = 0; g < plan.heads; ++g)
    for (int64_t n = 0; n < count * plan.Dvp; n += LANES) nan_flag += load(result + g * stride + n) * 0.f;
  if (!(reduce_add(nan_flag) == 0))
    accumulate_range<T>(p, plan, visible_rows, b, h0, i0, count, part, 0.f, s, result, stride);
}

// Merges a head's results over the parts, `stride` floats apart, into the first one, and writes out and lse.
template <class T>
static void merge_and_write(const Problem& p, const ForwardPlan& plan, int64_t bh, int64_t i0, int64_t count,
                            float* result, int64_t stride) {
  const int64_t references = plan.rows * plan.Dvp, sums = references + plan.rows;
  for (int64_t i = 0; i < count; ++i) {
    float max = -INF, sum = 0;
    for (int64_t n = 0; n < plan.parts; ++n) max = max_of(splat(result[n * stride + references + i]), splat(max))[0];
    float* out = result + i * plan.Dvp;
    for (int64_t n = 0; n < plan.parts; ++n) {
      const float* from = result + n * stride;
      if (from[sums + i] == 0) continue;  // the query sees none of this part's keys
      const float factor = exp_of(from[references + i] - max);
      sum += from[sums + i] * factor;
      if (n == 0 && factor == 1.f) continue;
      for (int64_t d = 0; d < plan.Dvp; d += LANES)
        store(out + d, (n ? load(out + d) : vf{}) + load(from + i * plan.Dvp + d) * factor);
    }
    const bool empty = !visible(p, bh / p.H, i0 + i).any();
    T* to = const_cast<T*>(row_of<T>(p.out, bh / p.H, bh % p.H, i0 + i));
    write_row(to, out, empty ? 0.f : output_scale(p, bh, i0 + i, max, sum), p.Dv);
    if (p.lse) p.lse[bh * p.L + i0 + i] = empty ? -INF : max + log_of(sum);
  }
}

// Forward by tiles, for any number of queries. An item has one batch row and a part of its keys, or several small batch
// rows, which share the packed table.
template <class T>
static void run_tiled(const Problem& p) {
  const ForwardPlan plan(p);
  const VisibleRows visible_rows(p);
  const int64_t pairs = p.B * p.H * plan.ranges, per_thread = scratch_floats<ForwardScratch>(p, plan);
  const int64_t group = plan.parts > 1 ? 1 : batch_rows_per_item(p, FORWARD_ITEMS), groups = div_up(p.B, group);
  const int64_t head_groups = p.H / plan.heads;
  const int64_t stride =
      plan.parts > 1 ? plan.parts * plan.result_floats() : plan.result_floats();  // from head to head
  Buffer scratch(p.threads * per_thread), results(plan.parts > 1 ? pairs * plan.parts * plan.result_floats() : 0);
  // The longest items first: under a causal mask the last range sees the most keys.
  auto range_of = [&](int64_t x) { return (plan.ranges - 1 - x) * plan.range; };
  parallel_for(p.threads, plan.ranges * head_groups * groups * plan.parts, [&](int64_t item, int thread) {
    const int64_t n = item % plan.parts, b0 = item / plan.parts % groups * group;
    const int64_t h0 = item / plan.parts / groups % head_groups * plan.heads,
                  x = item / plan.parts / groups / head_groups;
    const int64_t i0 = range_of(x), count = min_of(plan.range, p.L - i0);
    [[maybe_unused]] const TileConfig tile_config;
    Arena arena(scratch.data + thread * per_thread);
    ForwardScratch s(arena, p, plan);
    for (int64_t b = b0; b < min_of(b0 + group, p.B); ++b) {
      const int64_t bh = b * p.H + h0;  // the first head
      float* result =
          plan.parts > 1 ? results.data + ((x * p.B * p.H + bh) * plan.parts + n) * plan.result_floats() : s.result;
      forward_range<T>(p, plan, visible_rows, b, h0, i0, count, {n * plan.part, (n + 1) * plan.part}, s, result,
                       stride);
      for (int64_t g = 0; plan.parts == 1 && g < plan.heads; ++g)
        merge_and_write<T>(p, plan, bh + g, i0, count, result + g * stride, 0);
    }
  });
  if (plan.parts > 1)
    parallel_for(p.threads, pairs, [&](int64_t pair, int) {
      const int64_t i0 = range_of(pair / (p.B * p.H));
      merge_and_write<T>(p, plan, pair % (p.B * p.H), i0, min_of(plan.range, p.L - i0),
                         results.data + pair * plan.parts * plan.result_floats(), plan.result_floats());
    });
}

template <class T>
static void run_forward(const Problem& p) {
  if (is_decode(p))
    run_decode<T>(p);
  else
    run_tiled<T>(p);
}

}  // namespace
}  // namespace txl::TXL_ISA
