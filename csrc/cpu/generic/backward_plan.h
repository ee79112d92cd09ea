// The split of backward's work into items. An item has one key-value head with its query heads, one chunk of the keys
// and one batch row, or several small ones. It completes dk and dv of its keys, tile by tile. dr, du and dw are partial
// sums, one for each query head, which are reduced afterwards in a fixed order; so is dq if there are several chunks or
// grouped heads. The split depends on shapes alone, so results have the same bits at any number of threads.
#pragma once
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t BACKWARD_ITEMS = 32;   // keys are split into chunks until there are as many items
constexpr int64_t MAX_CHUNKS = 16;       // each has a partial dq
constexpr int64_t MAX_GROUP_CHUNKS = 4;  // the same for grouped heads, each of which has one

struct BackwardPlan {
  int64_t Dp, Drp, Dvp, heads;                       // heads: query heads of a key-value head
  int64_t chunk, chunks, group, groups, rows, rhos;  // chunk: keys; group: batch rows; rows: L rounded up to MR
  bool separate_dq_pos;                              // dq_pos is not part of dq
  bool wants_content, wants_position;                // products of dS with the keys (dq, du), with r (dq or dq_pos, dw)
  bool wants_dr, wants_dr_bias;
  Range visible_rhos;

  BackwardPlan(const Problem& p, const Gradients& g, const VisibleRows& visible_rows)
      : Dp(round_up(p.D, NR)),
        Drp(round_up(p.Dr, NR)),
        Dvp(round_up(p.Dv, NR)),
        heads(group_size(p)),
        separate_dq_pos(p.q_pos.data),
        wants_content(g.dq.data || g.du.data),
        wants_position(p.r.data && ((separate_dq_pos ? g.dq_pos : g.dq).data || g.dw.data)),
        wants_dr(g.dr.data),
        wants_dr_bias(g.dr_bias.data),
        visible_rhos(TXL_ISA::find_visible_rhos(p, visible_rows)) {
    const int64_t S = p.M + p.L, tiles = div_up(S, BLOCK_S), items_without_chunks = max_of(p.B * p.Hkv, 1);
    chunks = clamp(div_up(BACKWARD_ITEMS, items_without_chunks), 1,
                   clamp(tiles, 1, heads > 1 ? MAX_GROUP_CHUNKS : MAX_CHUNKS));
    chunk = max_of(div_up(tiles, chunks), 1) * BLOCK_S;
    chunks = div_up(S, chunk);
    group = chunks > 1 ? 1 : batch_rows_per_item(p, BACKWARD_ITEMS);
    groups = div_up(p.B, group);
    rows = round_up(p.L, MR);
    rhos = min_of(p.right ? chunk + p.L : min_of(chunk + p.L, S), visible_rhos.high - visible_rhos.low);
    rhos = wants_dr || wants_dr_bias ? round_up(rhos + 2 * BLOCK_L + 3 * NR, NR) : 0;  // blocks extend over both ends
  }
  // Whether an item completes dq of its query head: there is one chunk and one head, so nothing is left to reduce.
  bool completes_dq() const { return chunks == 1 && heads == 1; }
  int64_t items(const Problem& p) const { return groups * p.Hkv * chunks; }
  // The first rho of the partial dr of the chunk that starts at key j0.
  int64_t first_rho(const Problem& p, int64_t j0) const {
    return max_of(rho_of(p, p.L - 1 + BLOCK_L - 1, j0), max_of(visible_rhos.low - MR - NR, 0)) / NR * NR;
  }
  // The rows of the partial dr that the keys [low, high) of a chunk contribute to; the others are never read.
  Range visible_table_rows(const Problem& p, int64_t low, int64_t high) const {
    const int64_t first = first_rho(p, low);
    return {max_of(rho_of(p, p.L - 1, low), visible_rhos.low) - first,
            min_of(rho_of(p, 0, high), visible_rhos.high) - first};
  }
  // Sizes of the partial sums of a query head: dq of a batch row; dr, du, dw and dr_bias of an item, in this order.
  int64_t dq_floats() const { return rows * (separate_dq_pos ? Dp + Drp : Dp); }
  int64_t dr_rows() const { return wants_dr ? rhos : 0; }
  int64_t du_offset() const { return dr_rows() * Drp; }
  int64_t dw_offset() const { return du_offset() + Dp; }
  int64_t dr_bias_offset() const { return dw_offset() + Drp; }
  int64_t item_floats() const { return dr_bias_offset() + (wants_dr_bias ? rhos : 0); }
};

// The partial sums of a query head and batch row of an item: dq [rows][Dp], dq_pos [rows][Drp] (which is dq unless
// separate_dq_pos), dr [rhos][Drp] from first_rho on, du [Dp], dw [Drp], dr_bias [rhos].
struct GradientSums {
  float *dq, *dq_pos, *dr, *du, *dw, *dr_bias;
  GradientSums(const BackwardPlan& plan, float* row_dq, float* item)
      : dq(row_dq),
        dq_pos(plan.separate_dq_pos ? dq + plan.rows * plan.Dp : dq),
        dr(item),
        du(item + plan.du_offset()),
        dw(item + plan.dw_offset()),
        dr_bias(item + plan.dr_bias_offset()) {}
};

// Statistics of each query, at index (b * H + h) * L + i. Its weights are norm * e^(score - lse), and its dS is weight
// * (dP - delta), where dP is computed from share * dout; share is the part of the softmax that a sink leaves to the
// keys.
struct QueryStats {
  Buffer memory;
  float *lse, *norm, *delta, *share;  // share: null without sinks

  explicit QueryStats(const Problem& p)
      : memory((p.sink.data ? 4 : 3) * p.B * p.H * p.L),
        lse(memory.data),
        norm(lse + p.B * p.H * p.L),
        delta(norm + p.B * p.H * p.L),
        share(p.sink.data ? delta + p.B * p.H * p.L : nullptr) {}
  float key_share(int64_t at) const { return share ? share[at] : 1.f; }
};

// A chunk of the keys, [low, high), of a batch row and key-value head.
struct KeyChunk {
  int64_t b, hk, low, high;
};

// Row j of the gradient of keys (or values), in memory or segment; null if that gradient is not wanted.
template <class T>
TXL_INLINE T* key_gradient_row(const Problem& p, const View& memory, const View& segment, const KeyChunk& chunk,
                               int64_t j) {
  const bool wanted = j < p.M ? memory.data : segment.data;
  return wanted ? const_cast<T*>(key_row<T>(p, memory, segment, chunk.b, chunk.hk, j)) : nullptr;
}

// Whether the gradient of keys (or values) is wanted for some of the keys [low, high).
TXL_INLINE bool wants_key_gradients(const Problem& p, const View& memory, const View& segment, int64_t low,
                                    int64_t high) {
  return (low < p.M && memory.data) || (high > p.M && segment.data);
}

// Whether some of the blocks sees a key of [low, high).
static bool any_block_sees(const Range* block_keys, Range blocks, int64_t low, int64_t high) {
  for (int64_t x = blocks.low; x < blocks.high; ++x)
    if (max_of(block_keys[x].low, low) < min_of(block_keys[x].high, high)) return true;
  return false;
}

// For each block of queries the hull of the keys that it sees, and for each chunk of keys that of the blocks that see
// it.
struct BlockVisibility {
  int64_t blocks, chunks;
  Buffer key_memory, block_memory;
  Range* block_keys;    // [B][blocks]: keys
  Range* chunk_blocks;  // [B][chunks]: blocks

  BlockVisibility(const Problem& p, const BackwardPlan& plan)
      : blocks(div_up(p.L, BLOCK_L)),
        chunks(plan.chunks),
        key_memory(p.B * blocks * sizeof(Range) / sizeof(float)),
        block_memory(p.B * chunks * sizeof(Range) / sizeof(float)),
        block_keys(reinterpret_cast<Range*>(key_memory.data)),
        chunk_blocks(reinterpret_cast<Range*>(block_memory.data)) {
    for (int64_t x = 0; x < p.B * chunks; ++x) chunk_blocks[x] = {blocks, 0};
    for (int64_t x = 0; x < p.B * blocks; ++x) {
      const int64_t b = x / blocks, block = x % blocks, i0 = block * BLOCK_L;
      const Range keys = BlockRanges<BLOCK_L>(p, b, i0, min_of(BLOCK_L, p.L - i0), {0, p.M + p.L}).all;
      block_keys[x] = keys;
      for (int64_t c = keys.low / plan.chunk; keys.any() && c < div_up(keys.high, plan.chunk); ++c) {
        Range& hull = chunk_blocks[b * chunks + c];
        hull = {min_of(hull.low, block), max_of(hull.high, block + 1)};
      }
    }
  }
  Range blocks_of(int64_t b, int64_t chunk) const { return chunk_blocks[b * chunks + chunk]; }
  bool is_seen(int64_t b, int64_t chunk) const { return blocks_of(b, chunk).any(); }
};

// Sets lse and norm of the query at index `at`, whose weights e^(score - reference) have the sum `sum`. norm corrects
// the weights for the rounding of lse.
TXL_INLINE void set_stats(const QueryStats& stats, int64_t at, float reference, float sum) {
  const float lse = reference + log_of(sum);
  stats.lse[at] = lse;
  stats.norm[at] = 1.f / (sum * exp_of(reference - lse));
}

// Whether a query sees keys and its lse is so large that rounding it to float32 changes weights by more than their own
// rounding does.
TXL_INLINE bool has_large_lse(const Problem& p, int64_t bh, int64_t i) {
  constexpr float LARGE = 64;
  const float lse = p.lse[bh * p.L + i];
  return (lse > LARGE || lse < -LARGE) && visible(p, bh / p.H, i).any();
}

}  // namespace
}  // namespace txl::TXL_ISA
