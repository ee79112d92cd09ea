// Backward by tiles: scores are recomputed from lse, and each tile's recomputation serves dq, dk, dv and
// dr at once: 8 products of width D a visible pair, none wasted.
#pragma once
#include "backward_plan.h"
#include "decode_backward.h"
#include "forward.h"
#include "gradients.h"

namespace txl::TXL_ISA {
namespace {

// One thread's working memory.
struct BackwardScratch {
  Packed *k_panels, *k_rows, *v_panels, *qu, *qw, *dout;
  float *content, *position, *dp, *factor, *step, *dq;
  Weights weights;
  KeyGradients keys;
  Table table;

  BackwardScratch(Arena& a, const Problem& p, const BackwardPlan& plan)
      : k_panels(a.take<Packed>(BLOCK_S * deep(p.D))),
        k_rows(a.take<Packed>(BLOCK_S * plan.Dp)),
        v_panels(a.take<Packed>(BLOCK_S * deep(p.Dv))),
        qu(a.take<Packed>(BLOCK_L * plan.Dp)),
        qw(a.take<Packed>(BLOCK_L * plan.Drp)),
        dout(a.take<Packed>(BLOCK_L * plan.Dvp)),
        content(a.take(MR * BLOCK_S)),
        position(a.take(MR * POSITION_LD)),
        dp(a.take(MR * BLOCK_S)),
        factor(a.take(BLOCK_L * BLOCK_S)),
        step(a.take(MR * max_of(plan.Dp, plan.Drp))),
        dq(plan.own_dq() ? a.take(plan.dq_floats()) : nullptr),
        weights(a),
        keys(a, plan),
        table(a, Table::room(BLOCK_S + BLOCK_L), p, plan.Drp) {}
};

// One row over [from, to) of a tile: p (with dropout) and dS, both zero outside [low, high).
// WHOLE: low is from and high is to.
template <bool WHOLE, bool DROP, bool CAPPED>
static void gradient_row(const float* score, const float* position, const Cap& cap, const float* dp,
                         const float* factor, float lse, float norm, float delta, int64_t low, int64_t high,
                         int64_t from, int64_t to, const WeightRow& row) {
  for (int64_t n = from; n < to; n += WEIGHTS) {
    vf kept[WEIGHTS / LANES], gradient[WEIGHTS / LANES];
    TXL_UNROLL(2)
    for (int z = 0; z < WEIGHTS / LANES; ++z) {
      const int64_t at = n + z * LANES;
      vf x = load(score + at) + load(position + at), slope;
      if (CAPPED) x = cap(x, slope);
      const vf below = x - splat(lse);  // at most 0, but for rounding: NaN stays
      const vf e = weight_of(below > 0 ? vf{} : below) * norm;
      vf dropped = load(dp + at);
      kept[z] = e;
      if (DROP) dropped *= load(factor + at), kept[z] *= load(factor + at);
      gradient[z] = e * (dropped - splat(delta));
      if (CAPPED) gradient[z] *= slope;
      if (!WHOLE) {  // a hidden pair may hold anything
        const vi seen = lanes_within(at, low, high);
        kept[z] = seen ? kept[z] : vf{};
        gradient[z] = seen ? gradient[z] : vf{};
      }
    }
    row.put(n, kept, gradient);
  }
}

// gradient_row of a call.
TXL_INLINE auto* gradient_of(const Problem& p, bool whole) {
  if (p.softcap) return p.drop_below ? gradient_row<false, true, true> : gradient_row<false, false, true>;
  if (p.drop_below) return whole ? gradient_row<true, true, false> : gradient_row<false, true, false>;
  return whole ? gradient_row<true, false, false> : gradient_row<false, false, false>;
}

// c[MR][width] += a[MR][n] . b[n][width], and the sum over the MR rows of what was added, to `sum`.
static void add_and_sum(const Packed* a, int64_t lda, const Packed* b, int64_t n, int64_t width, float* step, float* c,
                        float* sum) {
  memset(step, 0, sizeof(float) * MR * width);
  add_times_rows(a, lda, b, n, width, step);
  for (int64_t d = 0; d < width; d += LANES) {
    vf total = load(sum + d);
    TXL_UNROLL(8)
    for (int x = 0; x < MR; ++x) {
      const vf added = load(step + x * width + d);
      store(c + x * width + d, load(c + x * width + d) + added);
      total += added;
    }
    store(sum + d, total);
  }
}

// A row of dout, null for zeros, times the share of the weights that a sink leaves to the keys.
template <class T>
TXL_INLINE void pack_dout(const T* row, float share, int64_t Dv, int64_t Dvp, Packed* out) {
  pack_row<T>(row, Dv, Dvp, out);
  for (int64_t d = 0; row && share != 1.f && d < Dvp; d += LANES) store(out + d, load(out + d) * share);
}

// A block of queries from i0 on of head g0 of a group against the tile of keys at j0. next: the tile after it, or null.
template <class T>
static void backward_block(const Problem& p, const Gradients& g, const BackwardPlan& plan, const InUse& in_use,
                           const QueryStats& stats, const Part& at, int64_t g0, int64_t j0,
                           const BlockRanges<BLOCK_L>& ranges, int64_t i0, const NextTile<T>* next, BackwardScratch& s,
                           const Sums& sums) {
  const int64_t b = at.b, h = at.hk * plan.heads + g0, bh = b * p.H + h;
  const int64_t Dp = plan.Dp, Drp = plan.Drp, Dvp = plan.Dvp, rows = round_up(min_of(BLOCK_L, p.L - i0), MR);
  const Cap cap(p);
  const Range block = within(ranges.all, j0);
  const int64_t end = s.weights.reach(block.high);
  auto sees = [&](int64_t i) { return ranges.row[i].any(); };
  pack_queries<T>(p, b, h, i0, rows, sees, Dp, Drp, s.qu, s.qw);
  for (int64_t i = 0; i < rows; ++i)
    pack_dout<T>(sees(i) ? row_of<T>(g.dout, b, h, i0 + i) : nullptr,
                 sees(i) ? stats.share_of(bh * p.L + i0 + i) : 1.f,  // rows past the last query have no stats
                 p.Dv, Dvp, s.dout + i * Dvp);
  const int64_t rho0 = rho_of(p, i0 + BLOCK_L - 1, j0);  // of column 0 of the unskewed tile, a multiple of NR
  const Range columns = {max_of(block.low, plan.rhos_met.low - rho0),  // of pairs with rows in the tables
                         min_of(block.high + BLOCK_L - 1, plan.rhos_met.high - rho0)};
  s.table.template cover<T>(p, in_use, h, rho0, rho_of(p, i0, j0 + BLOCK_S), Drp);
  if (p.drop_below) dropout_factors(p, ranges.row, rows, bh, i0, j0, s.factor);

  for (int64_t i = 0; i < rows; i += MR) {
    const Range seen = within(ranges.strip[i / MR], j0);
    if (!seen.any()) {
      for (int64_t x = i; x < i + MR; ++x) s.weights.clear(x, 0, end);
      continue;
    }
    const int64_t from = seen.low / NR * NR, to = round_up(seen.high, STEP);
    const Positions positions = strip_scores(p, Dp, Drp, s.qu + i * Dp, s.qw + i * Drp, i0 + i, j0, from, to,
                                             s.k_panels, s.table, s.content, s.position);
    times_panels(s.dout + i * Dvp, Dvp, s.v_panels + from * deep(p.Dv), deep(p.Dv), div_up(to - from, NR), s.dp + from,
                 BLOCK_S);
    for (int64_t x = 0; x < MR; ++x) {
      // A few rows at a time: the processor waits where many loads are outstanding.
      if (next) next->fetch(j0 + BLOCK_S + (i + x) * BLOCK_S / rows, j0 + BLOCK_S + (i + x + 1) * BLOCK_S / rows);
      const Range own = within(ranges.row[i + x], j0);
      s.weights.clear(i + x, 0, from);
      s.weights.clear(i + x, to, end);
      if (!own.any()) {
        s.weights.clear(i + x, from, to);
        continue;
      }
      const int64_t row = bh * p.L + i0 + i + x;
      const bool whole = own.low == from && own.high == to;
      gradient_of(p, whole)(s.content + x * BLOCK_S, positions.row(x), cap, s.dp + x * BLOCK_S,
                            s.factor + (i + x) * BLOCK_S, stats.lse[row], stats.norm[row], stats.delta[row], own.low,
                            own.high, from, to, s.weights.row(i + x, columns.any()));
    }
    if (plan.content) {
      const int64_t key = seen.low / DEPTH * DEPTH;
      add_and_sum(s.weights.by_key(i) + key, Weights::KEY_LD, s.k_rows + key * Dp, round_up(seen.high - key, DEPTH), Dp,
                  s.step, sums.dq + (i0 + i) * Dp, sums.du);
    }
    if (plan.position) {  // the columns of the strip's rho that some query meets
      const int64_t low = max_of(BLOCK_L - MR - i + seen.low, plan.rhos_met.low - rho0);
      const int64_t past = min_of(BLOCK_L - 1 - i + seen.high, plan.rhos_met.high - rho0);
      if (low < past) {  // before rounding: otherwise the block's unskewed dS may not be written
        const int64_t column = low / DEPTH * DEPTH;
        add_and_sum(s.weights.unskewed + i * UNSKEWED_LD + column, UNSKEWED_LD,
                    s.table.rows + (rho0 + column - s.table.first) * Drp, round_up(past - column, DEPTH), Drp, s.step,
                    sums.dq_pos + (i0 + i) * Drp, sums.dw);
      }
    }
  }
  s.keys.add(s.weights, s.qu, s.dout, rows, block.low, block.high);
  if (!columns.any()) return;
  const int64_t row0 = rho0 - plan.first_rho(p, at.low);  // the item's row of the tables for column 0; may be negative
  if (plan.dr) s.keys.add_to_table(s.weights, s.qw, rows, block.low, block.high, columns, g0, sums.dr, row0);
  if (plan.dr_bias) add_unskewed(s.weights, rows, columns, sums.dr_bias + row0);
}

// dk and dv of a chunk's keys, and what its batch row adds to the sums of each head of the group, of_head(g). hulls:
// the keys each block of the batch row sees; met_by: the blocks that see the chunk.
template <class T, class OfHead>
static void backward_part(const Problem& p, const Gradients& g, const BackwardPlan& plan, const InUse& in_use,
                          const Range* hulls, Range met_by, const QueryStats& stats, const Part& at, BackwardScratch& s,
                          const OfHead& of_head) {
  const int64_t D = p.D, Dv = p.Dv, Dp = plan.Dp, Dvp = plan.Dvp;
  for (int64_t j0 = at.low; j0 < at.high; j0 += BLOCK_S) {
    const int64_t keys = min_of(BLOCK_S, at.high - j0), packed = round_up(keys, NR);
    const bool met = sees_any(hulls, met_by, j0, j0 + keys);
    const bool dk = wants_keys(p, g.dk_mem, g.dk, j0, j0 + keys), dv = wants_keys(p, g.dv_mem, g.dv, j0, j0 + keys);
    s.keys.start_tile(met && dk, met && dv, packed);
    if (met) {
      pack_keys<T>(p, in_use, p.k_mem, p.k, at.b, at.hk, j0, packed, D, Dp, s.k_panels, s.k_rows);
      pack_keys<T>(p, in_use, p.v_mem, p.v, at.b, at.hk, j0, packed, Dv, Dvp, s.v_panels, nullptr);
    }
    for (int64_t g0 = 0; met && g0 < plan.heads; ++g0) {
      const Sums sums = of_head(g0);
      if (plan.heads > 1) s.table.forget();  // it is of another head
      const NextTile<T> next{p, at.b, at.hk * plan.heads + g0, 0, at.high, g0 == 0, p.r.data && plan.heads == 1};
      // Downwards, so that the table moves upwards.
      for (int64_t block = met_by.high - 1; block >= met_by.low; --block) {
        if (!within(hulls[block], j0).any()) continue;
        const int64_t i0 = block * BLOCK_L;
        const BlockRanges<BLOCK_L> ranges(p, at.b, i0, min_of(BLOCK_L, p.L - i0), {j0, j0 + BLOCK_S});
        if (ranges.all.any())
          backward_block<T>(p, g, plan, in_use, stats, at, g0, j0, ranges, i0, block == met_by.low ? &next : nullptr, s,
                            sums);
      }
    }
    s.keys.finish_tile(packed);
    for (int64_t n = 0; n < keys; ++n) {
      T* const dk_row = key_gradient<T>(p, g.dk_mem, g.dk, at, j0 + n);
      T* const dv_row = key_gradient<T>(p, g.dv_mem, g.dv, at, j0 + n);
      if (dk_row) met ? write_row(dk_row, s.keys.dk + n * Dp, 1.f, D) : clear_row(dk_row, D);
      if (dv_row) met ? write_row(dv_row, s.keys.dv + n * Dvp, 1.f, Dv) : clear_row(dv_row, Dv);
    }
  }
}

// dout_i . out_i of a query that sees keys.
template <class T>
static float dout_times_out(const Problem& p, const Gradients& g, int64_t b, int64_t h, int64_t i) {
  const T *out = row_of<T>(p.out, b, h, i), *dout = row_of<T>(g.dout, b, h, i);
  vf sum = {};
  float tail = 0;
  int64_t d = 0;
  for (; d + LANES <= p.Dv; d += LANES) sum += load(out + d) * load(dout + d);
  for (; d < p.Dv; ++d) tail += to_float(out[d]) * to_float(dout[d]);
  return sum_lanes(sum) + tail;
}

// Stats of a query from forward's lse, and its sink's gradient. A sink leaves the keys the share e^lse / (e^lse +
// e^sink) of their weights P without one, so that dS = P * (share * (dP - dout . out) + dlse), where out is beside the
// sink.
template <class T>
static void find_stats_of(const Problem& p, const Gradients& g, int64_t bh, int64_t i, const QueryStats& stats) {
  const int64_t b = bh / p.H, h = bh % p.H, at = bh * p.L + i;
  const bool sees = visible(p, b, i).any();
  const float product = sees ? dout_times_out<T>(p, g, b, h, i) : 0.f, dlse = sees && g.dlse ? g.dlse[at] : 0.f;
  stats.lse[at] = p.lse[at], stats.norm[at] = 1.f, stats.delta[at] = product - dlse;
  if (!p.sink.data) return;
  const float above = sees ? p.lse[at] - sink_of(p, bh, i) : 0.f, below = exp_of(above > 0 ? -above : above);
  const float less = below / (1.f + below), more = 1.f / (1.f + below);  // the two shares, of the keys and of the sink
  stats.share[at] = above > 0 ? more : less, stats.delta[at] = stats.share[at] * product - dlse;
  if (g.dsink.data)
    const_cast<float*>(row_of<float>(g.dsink, b, h, 0))[i] = sees ? -(above > 0 ? less : more) * product : 0.f;
}

// lse and norm of the queries [i0, i0 + count) of a group of heads whose lse is large, from their scores. plan: of
// `scores`, the call without values and dropout.
template <class T>
static void sum_weights(const Problem& scores, const ForwardPlan& plan, const InUse& in_use, int64_t b, int64_t h0,
                        int64_t i0, int64_t count, ForwardScratch& s, const QueryStats& stats) {
  sum_range<T>(scores, plan, in_use, b, h0, i0, count, {0, scores.M + scores.L}, SLACK, s, s.result, plan.entry());
  for (int64_t g = 0; g < plan.heads; ++g) {
    const int64_t bh = b * scores.H + h0 + g;
    const float *references = s.result + g * plan.entry() + plan.rows * plan.Dvp, *totals = references + plan.rows;
    for (int64_t i = 0; i < count; ++i)
      if (is_large(scores, bh, i0 + i)) set_stats(stats, bh * scores.L + i0 + i, references[i], totals[i]);
  }
}

// Stats of all queries, and the sinks' gradients. Forward's lse has half a unit in its last place of error, and all of
// a query's weights the factor e^that: of large ones the sum is formed anew.
template <class T>
static void find_stats(const Problem& p, const Gradients& g, const InUse& in_use, const QueryStats& stats) {
  if (p.B * p.H * p.L == 0) return;
  Problem scores = p;
  scores.Dv = 0, scores.drop_below = 0;
  const ForwardPlan plan(scores);
  const int64_t items = p.B * p.H / plan.heads * plan.ranges;
  Buffer large(items);
  parallel_for(p.threads, items, [&](int64_t item, int) {
    const int64_t first = item / plan.ranges * plan.heads, i0 = item % plan.ranges * plan.range;
    float some = 0;
    for (int64_t bh = first; bh < first + plan.heads; ++bh)
      for (int64_t i = i0; i < min_of(i0 + plan.range, p.L); ++i) {
        find_stats_of<T>(p, g, bh, i, stats);
        if (is_large(p, bh, i)) some = 1;
      }
    large.data[item] = some;
  });
  bool any = false;
  for (int64_t item = 0; item < items; ++item) any |= large.data[item] != 0;
  if (!any) return;
  const int64_t per_thread = decode_fits(p) ? p.L * (p.D + p.Dr) : floats_of<ForwardScratch>(scores, plan);
  Buffer scratch(p.threads * per_thread);
  parallel_for(p.threads, items, [&](int64_t item, int thread) {
    if (large.data[item] == 0) return;
    const int64_t first = item / plan.ranges * plan.heads, i0 = item % plan.ranges * plan.range;
    Arena arena(scratch.data + thread * per_thread);
    if (decode_fits(p)) {
      for (int64_t bh = first; bh < first + plan.heads; ++bh)
        decode_stats<T>(scores, bh, reinterpret_cast<Packed*>(scratch.data + thread * per_thread), stats);
      return;
    }
    [[maybe_unused]] const Unit unit;
    ForwardScratch s(arena, scores, plan);
    sum_weights<T>(scores, plan, in_use, first / p.H, first % p.H, i0, min_of(plan.range, p.L - i0), s, stats);
  });
}

// Adds up the row of D elements at `offset` of several items, item(n) for n < count (null: not there), times a
// factor, into `out`.
template <class T, class Item>
TXL_INLINE void add_up(const Item& item, int64_t count, int64_t offset, float factor, int64_t D, float* sum, T* out) {
  const int64_t padded = round_up(D, NR);
  memset(sum, 0, sizeof(float) * padded);
  for (int64_t n = 0; n < count; ++n)
    if (const float* from = item(n))
      for (int64_t d = 0; d < padded; d += LANES) store(sum + d, load(sum + d) + load(from + offset + d));
  write_row(out, sum, factor, D);
}

// Adds up the sums of the items: dq over the chunks, unless an item has it whole; dr, dr_bias, du, dw over groups and
// chunks.
template <class T>
static void add_up_items(const Problem& p, const Gradients& g, const BackwardPlan& plan, const Seen& seen,
                         const float* dq_parts, const float* items, float* scratch, int64_t per_thread) {
  const int64_t queries = !plan.own_dq() && (g.dq.data || g.dq_pos.data) ? p.B * p.H * seen.blocks : 0;
  const int64_t table_tiles = plan.rhos ? div_up(p.T, BLOCK_S) : 0, of_heads = p.H * (table_tiles + 1),
                parts = plan.groups * plan.chunks;
  auto of_head = [&](int64_t h, int64_t n) {
    const int64_t first = n / plan.chunks * plan.group, chunk = n % plan.chunks;
    bool live = false;
    for (int64_t b = first; b < min_of(first + plan.group, p.B); ++b) live |= seen.live(b, chunk);
    return live ? items + ((n / plan.chunks * p.H + h) * plan.chunks + chunk) * plan.item_floats() : nullptr;
  };
  parallel_for(p.threads, queries + of_heads, [&](int64_t x, int thread) {
    float* sum = scratch + thread * per_thread;
    if (x < queries) {
      const int64_t bh = x / seen.blocks, block = x % seen.blocks, i0 = block * BLOCK_L;
      auto part = [&](int64_t c) {
        const Range blocks = seen.blocks_of(bh / p.H, c);
        return block >= blocks.low && block < blocks.high ? dq_parts + (bh * plan.chunks + c) * plan.dq_floats()
                                                          : nullptr;
      };
      for (int64_t i = i0; i < min_of(i0 + BLOCK_L, p.L); ++i) {
        if (g.dq.data)
          add_up(part, plan.chunks, i * plan.Dp, p.scale, p.D, sum,
                 const_cast<T*>(row_of<T>(g.dq, bh / p.H, bh % p.H, i)));
        if (g.dq_pos.data)
          add_up(part, plan.chunks, plan.rows * plan.Dp + i * plan.Drp, p.position_scale, p.Dr, sum,
                 const_cast<T*>(row_of<T>(g.dq_pos, bh / p.H, bh % p.H, i)));
      }
      return;
    }
    const int64_t h = (x - queries) / (table_tiles + 1), tile = (x - queries) % (table_tiles + 1);
    if (tile == table_tiles) {
      auto item = [&](int64_t n) { return of_head(h, n); };
      if (g.du.data) add_up(item, parts, plan.du_offset(), p.scale, p.D, sum, const_cast<T*>(row_of<T>(g.du, h, 0, 0)));
      if (g.dw.data)
        add_up(item, parts, plan.dw_offset(), p.position_scale, p.Dr, sum, const_cast<T*>(row_of<T>(g.dw, h, 0, 0)));
      return;
    }
    for (int64_t t = tile * BLOCK_S; t < min_of((tile + 1) * BLOCK_S, p.T); ++t) {
      const int64_t rho = p.M + rho_origin(p) - (t - p.zero_row);
      auto with_rho = [&](int64_t n, int64_t width) -> const float* {  // the row of an item's table; null: not there
        const int64_t low = n % plan.chunks * plan.chunk, row = rho - plan.first_rho(p, low);
        const Range met = plan.met(p, low, min_of(low + plan.chunk, p.M + p.L));
        const float* item = row >= met.low && row < met.high ? of_head(h, n) : nullptr;
        return item ? item + row * width : nullptr;
      };
      if (plan.dr) {
        auto row = [&](int64_t n) { return with_rho(n, plan.Drp); };
        add_up(row, parts, 0, 1.f, p.Dr, sum, const_cast<T*>(row_of<T>(g.dr, h, t, 0)));
      }
      if (plan.dr_bias) {
        float total = 0;
        for (int64_t n = 0; n < parts; ++n)
          if (const float* from = with_rho(n, 1)) total += from[plan.dr_bias_offset()];
        put(const_cast<T*>(row_of<T>(g.dr_bias, h, 0, 0)) + t, total * p.position_scale);
      }
    }
  });
}

template <class T>
static void run_backward(const Problem& p, const Gradients& g) {
  const InUse in_use(p);
  const BackwardPlan plan(p, g, in_use);
  const Seen seen(p, plan);
  const int64_t S = p.M + p.L, Dp = plan.Dp, Drp = plan.Drp, BH = p.B * p.H;
  const bool decode = decode_fits(p);
  const int64_t per_thread =
      max_of(decode ? floats_of<DecodeBackwardScratch>(p, plan) : floats_of<BackwardScratch>(p, plan), max_of(Dp, Drp));
  const QueryStats stats(p);
  find_stats<T>(p, g, in_use, stats);
  Buffer scratch(p.threads * per_thread), items(plan.items(p) * plan.heads * plan.item_floats()),
      dq_parts(plan.own_dq() ? 0 : BH * plan.chunks * plan.dq_floats());

  // Batch row by batch row of an item; part(at, sums of a head) does one, of an item that sees its keys or not.
  auto run_item = [&](int64_t item, float* own_dq, const auto& start, const auto& part, const auto& finish) {
    const int64_t chunk = item % plan.chunks, hk = item / plan.chunks % p.Hkv, h0 = hk * plan.heads;
    const int64_t n = item / plan.chunks / p.Hkv, b0 = n * plan.group, b1 = min_of(b0 + plan.group, p.B);
    auto item_of = [&](int64_t x) {
      return items.data + ((n * p.H + h0 + x) * plan.chunks + chunk) * plan.item_floats();
    };
    bool any = false;
    for (int64_t b = b0; b < b1; ++b) any |= seen.live(b, chunk);
    const Range met = plan.met(p, chunk * plan.chunk, min_of((chunk + 1) * plan.chunk, S));
    for (int64_t x = 0; any && x < plan.heads; ++x) {
      float* const item_sums = item_of(x);
      if (plan.dr && met.any()) memset(item_sums + met.low * Drp, 0, sizeof(float) * (met.high - met.low) * Drp);
      memset(item_sums + plan.du_offset(), 0, sizeof(float) * (plan.item_floats() - plan.du_offset()));
    }
    if (any && plan.dr) start();
    for (int64_t b = b0; b < b1; ++b) {
      const Part at{b, hk, chunk * plan.chunk, min_of((chunk + 1) * plan.chunk, S)};
      auto of_head = [&](int64_t x) {
        const int64_t bh = b * p.H + h0 + x;
        return Sums(plan, own_dq ? own_dq : dq_parts.data + (bh * plan.chunks + chunk) * plan.dq_floats(), item_of(x));
      };
      const Range blocks = own_dq ? Range{0, seen.blocks} : seen.blocks_of(b, chunk);  // of which dq is written
      const int64_t first = blocks.low * BLOCK_L, past = min_of(blocks.high * BLOCK_L, plan.rows);
      for (int64_t x = 0; blocks.any() && x < plan.heads; ++x) {
        const Sums sums = of_head(x);
        memset(sums.dq + first * Dp, 0, sizeof(float) * (past - first) * Dp);
        if (plan.apart) memset(sums.dq_pos + first * Drp, 0, sizeof(float) * (past - first) * Drp);
      }
      part(at, of_head);
      for (int64_t x = 0; own_dq && x < plan.heads; ++x) {
        const Sums sums = of_head(x);
        for (int64_t i = 0; g.dq.data && i < p.L; ++i)
          write_row(const_cast<T*>(row_of<T>(g.dq, b, h0 + x, i)), sums.dq + i * Dp, p.scale, p.D);
        for (int64_t i = 0; g.dq_pos.data && i < p.L; ++i)
          write_row(const_cast<T*>(row_of<T>(g.dq_pos, b, h0 + x, i)), sums.dq_pos + i * Drp, p.position_scale, p.Dr);
      }
    }
    for (int64_t x = 0; any && plan.dr && x < plan.heads; ++x) finish(x, item_of(x));
  };
  parallel_for(p.threads, plan.items(p), [&](int64_t item, int thread) {
    Arena arena(scratch.data + thread * per_thread);
    if (decode) {
      DecodeBackwardScratch s(arena, p, plan);
      run_item(
          item, s.dq, [] {},
          [&](const Part& at, const auto& of_head) { decode_backward_part<T>(p, g, plan, stats, at, s, of_head); },
          [](int64_t, float*) {});
      return;
    }
    [[maybe_unused]] const Unit unit;
    BackwardScratch s(arena, p, plan);
    s.weights.start(min_of(BLOCK_L, round_up(p.L, MR)));
    run_item(
        item, s.dq, [&] { s.keys.start_item(); },
        [&](const Part& at, const auto& of_head) {
          backward_part<T>(p, g, plan, in_use, seen.hulls + at.b * seen.blocks,
                           seen.blocks_of(at.b, at.low / plan.chunk), stats, at, s, of_head);
        },
        [&](int64_t x, float* item_sums) { s.keys.finish_item(x, item_sums); });
  });
  add_up_items<T>(p, g, plan, seen, dq_parts.data, items.data, scratch.data, per_thread);
}

}  // namespace
}  // namespace txl::TXL_ISA
