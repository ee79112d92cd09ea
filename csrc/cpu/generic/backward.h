// Backward by tiles. P and dS are recomputed from lse once for each tile, for dq, dk, dv and dr: 8 products of width D
// for each visible pair.
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
  float *content, *position, *dp, *factor, *product, *dq;
  Weights weights;
  KeyGradients keys;
  TableWindow table;

  BackwardScratch(Arena& a, const Problem& p, const BackwardPlan& plan)
      : k_panels(a.allocate<Packed>(BLOCK_S * padded_depth(p.D))),
        k_rows(a.allocate<Packed>(BLOCK_S * plan.Dp)),
        v_panels(a.allocate<Packed>(BLOCK_S * padded_depth(p.Dv))),
        qu(a.allocate<Packed>(BLOCK_L * plan.Dp)),
        qw(a.allocate<Packed>(BLOCK_L * plan.Drp)),
        dout(a.allocate<Packed>(BLOCK_L * plan.Dvp)),
        content(a.allocate(MR * BLOCK_S)),
        position(a.allocate(MR * POSITION_LD)),
        dp(a.allocate(MR * BLOCK_S)),
        factor(a.allocate(BLOCK_L * BLOCK_S)),
        product(a.allocate(MR * max_of(plan.Dp, plan.Drp))),
        dq(plan.completes_dq() ? a.allocate(plan.dq_floats()) : nullptr),
        weights(a),
        keys(a, plan),
        table(a, TableWindow::capacity_for(BLOCK_S + BLOCK_L), p, plan.Drp) {}
};

// Computes P (with dropout) and dS of one row for the keys [from, to) of a tile, both zero outside [low, high). FULL:
// low is from and high is to.
template <bool FULL, bool DROPOUT, bool SOFTCAP>
static void gradient_row(const float* score, const float* position, const Softcap& softcap, const float* dp,
                         const float* factor, float lse, float norm, float delta, int64_t low, int64_t high,
                         int64_t from, int64_t to, const WeightRow& row) {
  for (int64_t n = from; n < to; n += WEIGHTS_PER_STORE) {
    vf weight[WEIGHTS_PER_STORE / LANES], gradient[WEIGHTS_PER_STORE / LANES];
    TXL_UNROLL(2)
    for (int z = 0; z < WEIGHTS_PER_STORE / LANES; ++z) {
      const int64_t at = n + z * LANES;
      vf x = load(score + at) + load(position + at), derivative;
      if (SOFTCAP) x = softcap(x, derivative);
      const vf exponent = x - splat(lse);  // positive only by rounding; NaN stays NaN
      const vf e = exp_weight(exponent > 0 ? vf{} : exponent) * norm;
      vf dropped = load(dp + at);
      weight[z] = e;
      if (DROPOUT) dropped *= load(factor + at), weight[z] *= load(factor + at);
      gradient[z] = e * (dropped - splat(delta));
      if (SOFTCAP) gradient[z] *= derivative;
      if (!FULL) {  // hidden pairs may hold NaN
        const vi seen = lane_mask(at, low, high);
        weight[z] = seen ? weight[z] : vf{};
        gradient[z] = seen ? gradient[z] : vf{};
      }
    }
    row.put(n, weight, gradient);
  }
}

// The instance of gradient_row for a call.
TXL_INLINE auto* gradient_row_for(const Problem& p, bool full) {
  if (p.softcap) return p.drop_below ? gradient_row<false, true, true> : gradient_row<false, false, true>;
  if (p.drop_below) return full ? gradient_row<true, true, false> : gradient_row<false, true, false>;
  return full ? gradient_row<true, false, false> : gradient_row<false, false, false>;
}

// c[rows][width] += a[rows][n] . b[n][width], rows at most MR; adds the sum of the product's rows to sum[width].
// product: room for MR rows.
static void gemm_add_and_sum(int64_t rows, const Packed* a, int64_t lda, const Packed* b, int64_t n, int64_t width,
                             float* product, float* c, float* sum) {
  memset(product, 0, sizeof(float) * MR * width);
  gemm_add_rows(rows, a, lda, b, n, width, product);
  for (int64_t d = 0; d < width; d += LANES) {
    vf total = load(sum + d);
    for (int64_t x = 0; x < rows; ++x) {
      const vf added = load(product + x * width + d);
      store(c + x * width + d, load(c + x * width + d) + added);
      total += added;
    }
    store(sum + d, total);
  }
}

// Packs a row of dout, null for zeros, times `share`, which QueryStats describes.
template <class T>
TXL_INLINE void pack_dout(const T* row, float share, int64_t Dv, int64_t Dvp, Packed* out) {
  pack_row<T>(row, Dv, Dvp, out);
  for (int64_t d = 0; row && share != 1.f && d < Dvp; d += LANES) store(out + d, load(out + d) * share);
}

// Adds the gradients from the block of queries from i0 on, of the chunk's query head g0, and the tile of keys from j0
// on. next: prefetches the next tile, or null.
template <class T>
static void backward_block(const Problem& p, const Gradients& g, const BackwardPlan& plan,
                           const VisibleRows& visible_rows, const QueryStats& stats, const KeyChunk& chunk, int64_t g0,
                           int64_t j0, const BlockRanges<BLOCK_L>& ranges, int64_t i0, const TilePrefetcher<T>* next,
                           BackwardScratch& s, const GradientSums& sums) {
  const int64_t b = chunk.b, h = chunk.hk * plan.heads + g0, bh = b * p.H + h;
  const int64_t Dp = plan.Dp, Drp = plan.Drp, Dvp = plan.Dvp, rows = round_up(min_of(BLOCK_L, p.L - i0), ROW_STEP);
  const Softcap softcap(p);
  const Range block = clip_to_tile(ranges.all, j0);
  const int64_t end = s.weights.end_of_keys(block.high);
  auto sees = [&](int64_t i) { return ranges.row[i].any(); };
  pack_queries<T>(p, b, h, i0, rows, sees, Dp, Drp, s.qu, s.qw);
  for (int64_t i = 0; i < rows; ++i)
    pack_dout<T>(sees(i) ? row_of<T>(g.dout, b, h, i0 + i) : nullptr,
                 sees(i) ? stats.key_share(bh * p.L + i0 + i) : 1.f,  // rows past the last query have no statistics
                 p.Dv, Dvp, s.dout + i * Dvp);
  const int64_t rho0 = rho_of(p, i0 + BLOCK_L - 1, j0);  // of column 0 of unskewed dS, a multiple of NR
  const Range columns = {max_of(block.low, plan.visible_rhos.low - rho0),  // columns of pairs with rows in the tables
                         min_of(block.high + BLOCK_L - 1, plan.visible_rhos.high - rho0)};
  s.table.template ensure_packed<T>(p, visible_rows, h, rho0, rho_of(p, i0, j0 + BLOCK_S), Drp);
  if (p.drop_below) dropout_factors(p, ranges.row, rows, bh, i0, j0, s.factor);

  for (int64_t i = 0; i < rows; i += MR) {
    const Range seen = clip_to_tile(ranges.strip[i / MR], j0);
    const int64_t strip_rows = min_of(MR, rows - i);
    if (!seen.any()) {
      for (int64_t x = i; x < i + strip_rows; ++x) s.weights.clear(x, 0, end);
      continue;
    }
    const int64_t from = seen.low / COLUMN_STEP * COLUMN_STEP, to = round_up(seen.high, KEY_STEP);
    const PositionScores positions = strip_scores(p, Dp, Drp, s.qu + i * Dp, s.qw + i * Drp, i0 + i, strip_rows, j0,
                                                  from, to, s.k_panels, s.table, s.content, s.position);
    gemm_panels(strip_rows, s.dout + i * Dvp, Dvp, s.v_panels, padded_depth(p.Dv), from, round_up(to, COLUMN_STEP),
                s.dp + from, BLOCK_S);
    for (int64_t x = 0; x < strip_rows; ++x) {
      // A few rows at a time, since only few prefetches can be outstanding.
      if (next) next->prefetch(j0 + BLOCK_S + (i + x) * BLOCK_S / rows, j0 + BLOCK_S + (i + x + 1) * BLOCK_S / rows);
      const Range own = clip_to_tile(ranges.row[i + x], j0);
      s.weights.clear(i + x, 0, from);
      s.weights.clear(i + x, to, end);
      if (!own.any()) {
        s.weights.clear(i + x, from, to);
        continue;
      }
      const int64_t row = bh * p.L + i0 + i + x;
      const bool full = own.low == from && own.high == to;
      gradient_row_for(p, full)(s.content + x * BLOCK_S, positions.row(x), softcap, s.dp + x * BLOCK_S,
                                s.factor + (i + x) * BLOCK_S, stats.lse[row], stats.norm[row], stats.delta[row],
                                own.low, own.high, from, to, s.weights.row(i + x, columns.any()));
    }
    if (plan.wants_content) {
      const int64_t key = seen.low / DEPTH * DEPTH;
      gemm_add_and_sum(strip_rows, s.weights.by_key(i) + key, Weights::KEY_LD, s.k_rows + key * Dp,
                       round_up(seen.high - key, DEPTH), Dp, s.product, sums.dq + (i0 + i) * Dp, sums.du);
    }
    if (plan.wants_position) {  // the strip's columns at which some query sees a key
      const int64_t low = max_of(BLOCK_L - strip_rows - i + seen.low, plan.visible_rhos.low - rho0);
      const int64_t past = min_of(BLOCK_L - 1 - i + seen.high, plan.visible_rhos.high - rho0);
      if (low < past) {  // compared before rounding: without such a column unskewed dS may not be written
        const int64_t column = low / DEPTH * DEPTH;
        gemm_add_and_sum(strip_rows, s.weights.unskewed + i * UNSKEWED_LD + column, UNSKEWED_LD,
                         s.table.rows + (rho0 + column - s.table.first) * Drp, round_up(past - column, DEPTH), Drp,
                         s.product, sums.dq_pos + (i0 + i) * Drp, sums.dw);
      }
    }
  }
  s.keys.add(s.weights, s.qu, s.dout, rows, block.low, block.high);
  if (!columns.any()) return;
  const int64_t row0 = rho0 - plan.first_rho(p, chunk.low);  // the row of the item's dr for column 0; may be negative
  if (plan.wants_dr) s.keys.add_to_table(s.weights, s.qw, rows, block.low, block.high, columns, g0, sums.dr, row0);
  if (plan.wants_dr_bias) add_unskewed(s.weights, rows, columns, sums.dr_bias + row0);
}

// Computes dk and dv of a chunk's keys, and adds the gradients of its batch row to the sums of each query head,
// sums_of(g). block_keys: the keys that each block of the batch row sees; blocks: those that see the chunk.
template <class T, class SumsOf>
static void backward_chunk(const Problem& p, const Gradients& g, const BackwardPlan& plan,
                           const VisibleRows& visible_rows, const Range* block_keys, Range blocks,
                           const QueryStats& stats, const KeyChunk& chunk, BackwardScratch& s, const SumsOf& sums_of) {
  const int64_t D = p.D, Dv = p.Dv, Dp = plan.Dp, Dvp = plan.Dvp;
  for (int64_t j0 = chunk.low; j0 < chunk.high; j0 += BLOCK_S) {
    const int64_t keys = min_of(BLOCK_S, chunk.high - j0), packed = round_up(keys, NR);
    const bool is_seen = any_block_sees(block_keys, blocks, j0, j0 + keys);
    const bool dk = wants_key_gradients(p, g.dk_mem, g.dk, j0, j0 + keys),
               dv = wants_key_gradients(p, g.dv_mem, g.dv, j0, j0 + keys);
    s.keys.start_tile(is_seen && dk, is_seen && dv, packed);
    if (is_seen) {
      pack_keys<T>(p, visible_rows, p.k_mem, p.k, chunk.b, chunk.hk, j0, packed, D, Dp, s.k_panels, s.k_rows);
      pack_keys<T>(p, visible_rows, p.v_mem, p.v, chunk.b, chunk.hk, j0, packed, Dv, Dvp, s.v_panels, nullptr);
    }
    for (int64_t g0 = 0; is_seen && g0 < plan.heads; ++g0) {
      const GradientSums sums = sums_of(g0);
      if (plan.heads > 1) s.table.reset();  // it holds another head's rows
      const TilePrefetcher<T> next{p,          chunk.b, chunk.hk * plan.heads + g0, 0,
                                   chunk.high, g0 == 0, p.r.data && plan.heads == 1};
      // From the last block to the first, so that the table's window moves upwards.
      for (int64_t block = blocks.high - 1; block >= blocks.low; --block) {
        if (!clip_to_tile(block_keys[block], j0).any()) continue;
        const int64_t i0 = block * BLOCK_L;
        const BlockRanges<BLOCK_L> ranges(p, chunk.b, i0, min_of(BLOCK_L, p.L - i0), {j0, j0 + BLOCK_S});
        if (ranges.all.any())
          backward_block<T>(p, g, plan, visible_rows, stats, chunk, g0, j0, ranges, i0,
                            block == blocks.low ? &next : nullptr, s, sums);
      }
    }
    s.keys.finish_tile(packed);
    for (int64_t n = 0; n < keys; ++n) {
      T* const dk_row = key_gradient_row<T>(p, g.dk_mem, g.dk, chunk, j0 + n);
      T* const dv_row = key_gradient_row<T>(p, g.dv_mem, g.dv, chunk, j0 + n);
      if (dk_row) is_seen ? write_row(dk_row, s.keys.dk + n * Dp, 1.f, D) : clear_row(dk_row, D);
      if (dv_row) is_seen ? write_row(dv_row, s.keys.dv + n * Dvp, 1.f, Dv) : clear_row(dv_row, Dv);
    }
  }
}

// The product dout_i . out_i of a query that sees keys.
template <class T>
static float dout_times_out(const Problem& p, const Gradients& g, int64_t b, int64_t h, int64_t i) {
  const T *out = row_of<T>(p.out, b, h, i), *dout = row_of<T>(g.dout, b, h, i);
  vf sum = {};
  float tail = 0;
  int64_t d = 0;
  for (; d + LANES <= p.Dv; d += LANES) sum += load(out + d) * load(dout + d);
  for (; d < p.Dv; ++d) tail += to_float(out[d]) * to_float(dout[d]);
  return reduce_add(sum) + tail;
}

// Computes a query's statistics from forward's lse, and its sink's gradient. Let P be the weights without the sink.
// With it they are share * P, share = e^lse / (e^lse + e^sink), and dS = P * (share * (dP - dout . out) + dlse).
template <class T>
static void compute_query_stats(const Problem& p, const Gradients& g, int64_t bh, int64_t i, const QueryStats& stats) {
  const int64_t b = bh / p.H, h = bh % p.H, at = bh * p.L + i;
  const bool sees = visible(p, b, i).any();
  const float product = sees ? dout_times_out<T>(p, g, b, h, i) : 0.f, dlse = sees && g.dlse ? g.dlse[at] : 0.f;
  stats.lse[at] = p.lse[at], stats.norm[at] = 1.f, stats.delta[at] = product - dlse;
  if (!p.sink.data) return;
  const float difference = sees ? p.lse[at] - sink_of(p, bh, i) : 0.f;
  const float ratio = exp_of(difference > 0 ? -difference : difference);
  const float smaller = ratio / (1.f + ratio), larger = 1.f / (1.f + ratio);  // the shares of keys and sink
  stats.share[at] = difference > 0 ? larger : smaller, stats.delta[at] = stats.share[at] * product - dlse;
  if (g.dsink.data)
    const_cast<float*>(row_of<float>(g.dsink, b, h, 0))[i] =
        sees ? -(difference > 0 ? smaller : larger) * product : 0.f;
}

// Recomputes lse and norm of those queries [i0, i0 + count) of an item's heads whose lse is large. scores: the call
// without values and dropout; plan: its plan.
template <class T>
static void recompute_large_lse(const Problem& scores, const ForwardPlan& plan, const VisibleRows& visible_rows,
                                int64_t b, int64_t h0, int64_t i0, int64_t count, ForwardScratch& s,
                                const QueryStats& stats) {
  accumulate_range<T>(scores, plan, visible_rows, b, h0, i0, count, {0, scores.M + scores.L}, SLACK, s, s.result,
                      plan.result_floats());
  for (int64_t g = 0; g < plan.heads; ++g) {
    const int64_t bh = b * scores.H + h0 + g;
    const float *references = s.result + g * plan.result_floats() + plan.rows * plan.Dvp,
                *totals = references + plan.rows;
    for (int64_t i = 0; i < count; ++i)
      if (has_large_lse(scores, bh, i0 + i)) set_stats(stats, bh * scores.L + i0 + i, references[i], totals[i]);
  }
}

// Computes the statistics of all queries, and the sinks' gradients. Forward's lse has an error of half a unit in the
// last place, which scales all of the query's weights by its exponential. Where lse is large it is recomputed.
template <class T>
static void compute_stats(const Problem& p, const Gradients& g, const VisibleRows& visible_rows,
                          const QueryStats& stats) {
  if (p.B * p.H * p.L == 0) return;
  Problem scores = p;
  scores.Dv = 0, scores.drop_below = 0;
  const ForwardPlan plan(scores);
  const int64_t items = p.B * p.H / plan.heads * plan.ranges;
  Buffer large(items);
  parallel_for(p.threads, items, [&](int64_t item, int) {
    const int64_t first = item / plan.ranges * plan.heads, i0 = item % plan.ranges * plan.range;
    float has_large = 0;
    for (int64_t bh = first; bh < first + plan.heads; ++bh)
      for (int64_t i = i0; i < min_of(i0 + plan.range, p.L); ++i) {
        compute_query_stats<T>(p, g, bh, i, stats);
        if (has_large_lse(p, bh, i)) has_large = 1;
      }
    large.data[item] = has_large;
  });
  bool any = false;
  for (int64_t item = 0; item < items; ++item) any |= large.data[item] != 0;
  if (!any) return;
  const int64_t per_thread = is_decode(p) ? p.L * (p.D + p.Dr) : scratch_floats<ForwardScratch>(scores, plan);
  Buffer scratch(p.threads * per_thread);
  parallel_for(p.threads, items, [&](int64_t item, int thread) {
    if (large.data[item] == 0) return;
    const int64_t first = item / plan.ranges * plan.heads, i0 = item % plan.ranges * plan.range;
    Arena arena(scratch.data + thread * per_thread);
    if (is_decode(p)) {
      for (int64_t bh = first; bh < first + plan.heads; ++bh)
        decode_recompute_large_lse<T>(scores, bh, reinterpret_cast<Packed*>(scratch.data + thread * per_thread), stats);
      return;
    }
    [[maybe_unused]] const TileConfig tile_config;
    ForwardScratch s(arena, scores, plan);
    recompute_large_lse<T>(scores, plan, visible_rows, first / p.H, first % p.H, i0, min_of(plan.range, p.L - i0), s,
                           stats);
  });
}

// Writes to `out` the sum of rows of D elements times a factor. Row n < count is at item(n) + offset; it is skipped
// where item(n) is null. sum: room for it.
template <class T, class Item>
TXL_INLINE void reduce_rows(const Item& item, int64_t count, int64_t offset, float factor, int64_t D, float* sum,
                            T* out) {
  const int64_t padded = round_up(D, NR);
  memset(sum, 0, sizeof(float) * padded);
  for (int64_t n = 0; n < count; ++n)
    if (const float* from = item(n))
      for (int64_t d = 0; d < padded; d += LANES) store(sum + d, load(sum + d) + load(from + offset + d));
  write_row(out, sum, factor, D);
}

// Reduces the partial sums of the items: dq over chunks, unless items complete it; dr, dr_bias, du and dw over groups
// of batch rows and chunks.
template <class T>
static void reduce_items(const Problem& p, const Gradients& g, const BackwardPlan& plan,
                         const BlockVisibility& visibility, const float* dq_parts, const float* items, float* scratch,
                         int64_t per_thread) {
  const int64_t queries = !plan.completes_dq() && (g.dq.data || g.dq_pos.data) ? p.B * p.H * visibility.blocks : 0;
  const int64_t table_tiles = plan.rhos ? div_up(p.T, BLOCK_S) : 0, head_tasks = p.H * (table_tiles + 1),
                parts = plan.groups * plan.chunks;
  // The sums of head h of the n-th group of batch rows and chunk; null if no query sees the chunk.
  auto head_sums = [&](int64_t h, int64_t n) {
    const int64_t first = n / plan.chunks * plan.group, chunk = n % plan.chunks;
    bool is_seen = false;
    for (int64_t b = first; b < min_of(first + plan.group, p.B); ++b) is_seen |= visibility.is_seen(b, chunk);
    return is_seen ? items + ((n / plan.chunks * p.H + h) * plan.chunks + chunk) * plan.item_floats() : nullptr;
  };
  parallel_for(p.threads, queries + head_tasks, [&](int64_t x, int thread) {
    float* sum = scratch + thread * per_thread;
    if (x < queries) {
      const int64_t bh = x / visibility.blocks, block = x % visibility.blocks, i0 = block * BLOCK_L;
      auto part = [&](int64_t c) {
        const Range blocks = visibility.blocks_of(bh / p.H, c);
        return block >= blocks.low && block < blocks.high ? dq_parts + (bh * plan.chunks + c) * plan.dq_floats()
                                                          : nullptr;
      };
      for (int64_t i = i0; i < min_of(i0 + BLOCK_L, p.L); ++i) {
        if (g.dq.data)
          reduce_rows(part, plan.chunks, i * plan.Dp, p.scale, p.D, sum,
                      const_cast<T*>(row_of<T>(g.dq, bh / p.H, bh % p.H, i)));
        if (g.dq_pos.data)
          reduce_rows(part, plan.chunks, plan.rows * plan.Dp + i * plan.Drp, p.position_scale, p.Dr, sum,
                      const_cast<T*>(row_of<T>(g.dq_pos, bh / p.H, bh % p.H, i)));
      }
      return;
    }
    const int64_t h = (x - queries) / (table_tiles + 1), tile = (x - queries) % (table_tiles + 1);
    if (tile == table_tiles) {
      auto item = [&](int64_t n) { return head_sums(h, n); };
      if (g.du.data)
        reduce_rows(item, parts, plan.du_offset(), p.scale, p.D, sum, const_cast<T*>(row_of<T>(g.du, h, 0, 0)));
      if (g.dw.data)
        reduce_rows(item, parts, plan.dw_offset(), p.position_scale, p.Dr, sum,
                    const_cast<T*>(row_of<T>(g.dw, h, 0, 0)));
      return;
    }
    for (int64_t t = tile * BLOCK_S; t < min_of((tile + 1) * BLOCK_S, p.T); ++t) {
      const int64_t rho = p.M + rho_origin(p) - (t - p.zero_row);
      auto row_of_item = [&](int64_t n, int64_t width) -> const float* {  // null: the item has no row for rho
        const int64_t low = n % plan.chunks * plan.chunk, row = rho - plan.first_rho(p, low);
        const Range rows = plan.visible_table_rows(p, low, min_of(low + plan.chunk, p.M + p.L));
        const float* item = row >= rows.low && row < rows.high ? head_sums(h, n) : nullptr;
        return item ? item + row * width : nullptr;
      };
      if (plan.wants_dr) {
        auto row = [&](int64_t n) { return row_of_item(n, plan.Drp); };
        reduce_rows(row, parts, 0, 1.f, p.Dr, sum, const_cast<T*>(row_of<T>(g.dr, h, t, 0)));
      }
      if (plan.wants_dr_bias) {
        float total = 0;
        for (int64_t n = 0; n < parts; ++n)
          if (const float* from = row_of_item(n, 1)) total += from[plan.dr_bias_offset()];
        put(const_cast<T*>(row_of<T>(g.dr_bias, h, 0, 0)) + t, total * p.position_scale);
      }
    }
  });
}

template <class T>
static void run_backward(const Problem& p, const Gradients& g) {
  const VisibleRows visible_rows(p);
  const BackwardPlan plan(p, g, visible_rows);
  const BlockVisibility visibility(p, plan);
  const int64_t S = p.M + p.L, Dp = plan.Dp, Drp = plan.Drp, BH = p.B * p.H;
  const bool decode = is_decode(p);
  const int64_t per_thread =
      max_of(decode ? scratch_floats<DecodeBackwardScratch>(p, plan) : scratch_floats<BackwardScratch>(p, plan),
             max_of(Dp, Drp));
  const QueryStats stats(p);
  compute_stats<T>(p, g, visible_rows, stats);
  Buffer scratch(p.threads * per_thread), items(plan.items(p) * plan.heads * plan.item_floats()),
      dq_parts(plan.completes_dq() ? 0 : BH * plan.chunks * plan.dq_floats());

  // Runs the batch rows of an item, each by run_chunk(chunk, sums_of), whether or not queries see its keys. start and
  // finish are called once for an item if queries see its keys and dr is wanted; finish for each head.
  auto run_item = [&](int64_t item, float* own_dq, const auto& start, const auto& run_chunk, const auto& finish) {
    const int64_t c = item % plan.chunks, hk = item / plan.chunks % p.Hkv, h0 = hk * plan.heads;
    const int64_t n = item / plan.chunks / p.Hkv, b0 = n * plan.group, b1 = min_of(b0 + plan.group, p.B);
    auto item_of = [&](int64_t x) { return items.data + ((n * p.H + h0 + x) * plan.chunks + c) * plan.item_floats(); };
    bool any = false;
    for (int64_t b = b0; b < b1; ++b) any |= visibility.is_seen(b, c);
    const int64_t low = c * plan.chunk, high = min_of((c + 1) * plan.chunk, S);
    const Range dr_rows = plan.visible_table_rows(p, low, high);
    for (int64_t x = 0; any && x < plan.heads; ++x) {
      float* const item_sums = item_of(x);
      if (plan.wants_dr && dr_rows.any())
        memset(item_sums + dr_rows.low * Drp, 0, sizeof(float) * (dr_rows.high - dr_rows.low) * Drp);
      memset(item_sums + plan.du_offset(), 0, sizeof(float) * (plan.item_floats() - plan.du_offset()));
    }
    if (any && plan.wants_dr) start();
    for (int64_t b = b0; b < b1; ++b) {
      const KeyChunk chunk{b, hk, low, high};
      auto sums_of = [&](int64_t x) {
        const int64_t bh = b * p.H + h0 + x;
        return GradientSums(plan, own_dq ? own_dq : dq_parts.data + (bh * plan.chunks + c) * plan.dq_floats(),
                            item_of(x));
      };
      const Range blocks = own_dq ? Range{0, visibility.blocks} : visibility.blocks_of(b, c);  // whose dq is written
      const int64_t first = blocks.low * BLOCK_L, past = min_of(blocks.high * BLOCK_L, plan.rows);
      for (int64_t x = 0; blocks.any() && x < plan.heads; ++x) {
        const GradientSums sums = sums_of(x);
        memset(sums.dq + first * Dp, 0, sizeof(float) * (past - first) * Dp);
        if (plan.separate_dq_pos) memset(sums.dq_pos + first * Drp, 0, sizeof(float) * (past - first) * Drp);
      }
      run_chunk(chunk, sums_of);
      for (int64_t x = 0; own_dq && x < plan.heads; ++x) {
        const GradientSums sums = sums_of(x);
        for (int64_t i = 0; g.dq.data && i < p.L; ++i)
          write_row(const_cast<T*>(row_of<T>(g.dq, b, h0 + x, i)), sums.dq + i * Dp, p.scale, p.D);
        for (int64_t i = 0; g.dq_pos.data && i < p.L; ++i)
          write_row(const_cast<T*>(row_of<T>(g.dq_pos, b, h0 + x, i)), sums.dq_pos + i * Drp, p.position_scale, p.Dr);
      }
    }
    for (int64_t x = 0; any && plan.wants_dr && x < plan.heads; ++x) finish(x, item_of(x));
  };
  parallel_for(p.threads, plan.items(p), [&](int64_t item, int thread) {
    Arena arena(scratch.data + thread * per_thread);
    if (decode) {
      DecodeBackwardScratch s(arena, p, plan);
      run_item(
          item, s.dq, [] {},
          [&](const KeyChunk& chunk, const auto& sums_of) {
            decode_backward_chunk<T>(p, g, plan, stats, chunk, s, sums_of);
          },
          [](int64_t, float*) {});
      return;
    }
    [[maybe_unused]] const TileConfig tile_config;
    BackwardScratch s(arena, p, plan);
    s.weights.clear_margins(min_of(BLOCK_L, round_up(p.L, MR)));
    run_item(
        item, s.dq, [&] { s.keys.start_item(); },
        [&](const KeyChunk& chunk, const auto& sums_of) {
          backward_chunk<T>(p, g, plan, visible_rows, visibility.block_keys + chunk.b * visibility.blocks,
                            visibility.blocks_of(chunk.b, chunk.low / plan.chunk), stats, chunk, s, sums_of);
        },
        [&](int64_t x, float* item_sums) { s.keys.finish_item(x, item_sums); });
  });
  reduce_items<T>(p, g, plan, visibility, dq_parts.data, items.data, scratch.data, per_thread);
}

}  // namespace
}  // namespace txl::TXL_ISA
