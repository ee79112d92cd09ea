// How backward's work is cut. An item is one head of keys with the query heads that read it, one chunk of the keys and,
// where there are many batch rows, a group of those. It completes dk and dv of its keys, tile by tile. dr, du and dw
// are partial sums, one for each query head, added up afterwards in a fixed order; so is dq, where there are several
// chunks or heads are grouped. How many items is a function of shapes, so threads change no bit.
#pragma once
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t BACKWARD_ITEMS = 32;   // chunks of keys are made until there are as many items
constexpr int64_t MAX_CHUNKS = 16;       // each has a dq of its own
constexpr int64_t MAX_GROUP_CHUNKS = 4;  // the same for grouped heads, all of which have one

struct BackwardPlan {
  int64_t Dp, Drp, Dvp, heads;                       // heads: query heads that read one head of keys
  int64_t chunk, chunks, group, groups, rows, rhos;  // chunk: keys; group: batch rows
  bool apart;                                        // dq_pos has sums of its own
  bool content, position, dr, dr_bias;  // what is wanted: of queries, by keys and by the table; of the tables

  Range rhos_met;  // by all keys and queries

  BackwardPlan(const Problem& p, const Gradients& g, const InUse& in_use)
      : Dp(round_up(p.D, NR)),
        Drp(round_up(p.Dr, NR)),
        Dvp(round_up(p.Dv, NR)),
        heads(group_of(p)),
        apart(p.q_pos.data),
        content(g.dq.data || g.du.data),
        position(p.r.data && ((apart ? g.dq_pos : g.dq).data || g.dw.data)),
        dr(g.dr.data),
        dr_bias(g.dr_bias.data),
        rhos_met(TXL_ISA::rhos_met(p, in_use)) {
    const int64_t S = p.M + p.L, tiles = div_up(S, BLOCK_S), whole = max_of(p.B * p.Hkv, 1);  // items without chunks
    chunks = clamp(div_up(BACKWARD_ITEMS, whole), 1, clamp(tiles, 1, heads > 1 ? MAX_GROUP_CHUNKS : MAX_CHUNKS));
    chunk = max_of(div_up(tiles, chunks), 1) * BLOCK_S;
    chunks = div_up(S, chunk);
    group = chunks > 1 ? 1 : batch_rows_of_item(p, BACKWARD_ITEMS);
    groups = div_up(p.B, group);
    rows = round_up(p.L, MR);
    rhos = min_of(p.right ? chunk + p.L : min_of(chunk + p.L, S), rhos_met.high - rhos_met.low);
    rhos = dr || dr_bias ? round_up(rhos + 2 * BLOCK_L + 3 * NR, NR) : 0;  // blocks stand out at both ends
  }
  // Whether dq of an item's only head is whole, and no sum over chunks.
  bool own_dq() const { return chunks == 1 && heads == 1; }
  int64_t items(const Problem& p) const { return groups * p.Hkv * chunks; }
  // The first rho of the chunk that starts at key j0.
  int64_t first_rho(const Problem& p, int64_t j0) const {
    return max_of(rho_of(p, p.L - 1 + BLOCK_L - 1, j0), max_of(rhos_met.low - MR - NR, 0)) / NR * NR;
  }
  // The rows of the tables that the keys [low, high) of a chunk meet; the others are never read.
  Range met(const Problem& p, int64_t low, int64_t high) const {
    const int64_t first = first_rho(p, low);
    return {max_of(rho_of(p, p.L - 1, low), rhos_met.low) - first, min_of(rho_of(p, 0, high), rhos_met.high) - first};
  }
  // Sums of a query head: of a batch row's queries; of an item.
  int64_t dq_floats() const { return rows * (apart ? Dp + Drp : Dp); }
  int64_t dr_rows() const { return dr ? rhos : 0; }
  int64_t du_offset() const { return dr_rows() * Drp; }
  int64_t dw_offset() const { return du_offset() + Dp; }
  int64_t dr_bias_offset() const { return dw_offset() + Drp; }
  int64_t item_floats() const { return dr_bias_offset() + (dr_bias ? rhos : 0); }
};

// Where a query head and batch row of an item add up: dq [rows][Dp], dq_pos [rows][Drp] (which is dq if they are not
// apart), dr [rhos][Drp] from first_rho on, du [Dp], dw [Drp], dr_bias [rhos].
struct Sums {
  float *dq, *dq_pos, *dr, *du, *dw, *dr_bias;
  Sums(const BackwardPlan& plan, float* row_dq, float* item)
      : dq(row_dq),
        dq_pos(plan.apart ? dq + plan.rows * plan.Dp : dq),
        dr(item),
        du(item + plan.du_offset()),
        dw(item + plan.dw_offset()),
        dr_bias(item + plan.dr_bias_offset()) {}
};

// Stats of each query, at (b * H + h) * L + i: its weights are norm * e^(score - lse), its dS are weights times (dP -
// delta), with dP of dout times `share`, what a sink leaves to the keys.
struct QueryStats {
  Buffer memory;
  float *lse, *norm, *delta, *share;  // share: null without sinks

  explicit QueryStats(const Problem& p)
      : memory((p.sink.data ? 4 : 3) * p.B * p.H * p.L),
        lse(memory.data),
        norm(lse + p.B * p.H * p.L),
        delta(norm + p.B * p.H * p.L),
        share(p.sink.data ? delta + p.B * p.H * p.L : nullptr) {}
  float share_of(int64_t at) const { return share ? share[at] : 1.f; }
};

// A batch row and head of keys, and the keys of a chunk: [low, high).
struct Part {
  int64_t b, hk, low, high;
};

// A gradient of key row j of the memory or of the segment; null where it is not wanted.
template <class T>
TXL_INLINE T* key_gradient(const Problem& p, const View& memory, const View& segment, const Part& at, int64_t j) {
  const bool wanted = j < p.M ? memory.data : segment.data;
  return wanted ? const_cast<T*>(key_row<T>(p, memory, segment, at.b, at.hk, j)) : nullptr;
}

// Whether a gradient of the memory's and of the segment's rows is wanted for some of the keys [low, high).
TXL_INLINE bool wants_keys(const Problem& p, const View& memory, const View& segment, int64_t low, int64_t high) {
  return (low < p.M && memory.data) || (high > p.M && segment.data);
}

// Whether some of the blocks sees a key of [low, high).
static bool sees_any(const Range* hulls, Range blocks, int64_t low, int64_t high) {
  for (int64_t x = blocks.low; x < blocks.high; ++x)
    if (max_of(hulls[x].low, low) < min_of(hulls[x].high, high)) return true;
  return false;
}

// Which keys each block of queries sees, and which blocks each chunk of keys is seen by.
struct Seen {
  int64_t blocks, chunks;
  Buffer hull_memory, met_memory;
  Range* hulls;  // [B][blocks]: keys
  Range* met;    // [B][chunks]: from the first block to past the last

  Seen(const Problem& p, const BackwardPlan& plan)
      : blocks(div_up(p.L, BLOCK_L)),
        chunks(plan.chunks),
        hull_memory(p.B * blocks * sizeof(Range) / sizeof(float)),
        met_memory(p.B * chunks * sizeof(Range) / sizeof(float)),
        hulls(reinterpret_cast<Range*>(hull_memory.data)),
        met(reinterpret_cast<Range*>(met_memory.data)) {
    for (int64_t x = 0; x < p.B * chunks; ++x) met[x] = {blocks, 0};
    for (int64_t x = 0; x < p.B * blocks; ++x) {
      const int64_t b = x / blocks, block = x % blocks, i0 = block * BLOCK_L;
      const Range keys = BlockRanges<BLOCK_L>(p, b, i0, min_of(BLOCK_L, p.L - i0), {0, p.M + p.L}).all;
      hulls[x] = keys;
      for (int64_t c = keys.low / plan.chunk; keys.any() && c < div_up(keys.high, plan.chunk); ++c) {
        Range& of_chunk = met[b * chunks + c];
        of_chunk = {min_of(of_chunk.low, block), max_of(of_chunk.high, block + 1)};
      }
    }
  }
  Range blocks_of(int64_t b, int64_t chunk) const { return met[b * chunks + chunk]; }
  bool live(int64_t b, int64_t chunk) const { return blocks_of(b, chunk).any(); }
};

// Backward's stats of query i from the largest of its scores and the sum of its weights relative to `top`, which lies
// at most a few e-folds below that: lse, rounded up from no less than the largest, and what that rounding leaves out.
TXL_INLINE void set_stats(const QueryStats& stats, int64_t at, float top, float total) {
  const float lse = top + log_of(total);
  stats.lse[at] = lse;
  stats.norm[at] = 1.f / (total * exp_of(top - lse));
}

// Whether rounding lse to float32 changes the weights of a query that sees keys by more than their own rounding.
TXL_INLINE bool is_large(const Problem& p, int64_t bh, int64_t i) {
  constexpr float LARGE = 64;
  const float lse = p.lse[bh * p.L + i];
  return (lse > LARGE || lse < -LARGE) && visible(p, bh / p.H, i).any();
}

}  // namespace
}  // namespace txl::TXL_ISA
