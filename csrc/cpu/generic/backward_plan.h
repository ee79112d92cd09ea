// How backward's work is cut. An item is a head, a chunk of its keys and, where there are many batch
// rows, a group of those: it finishes dk and dv of its keys, tile by tile, while dr, du and dw are sums
// over its batch rows, added up afterwards in a fixed order; so is dq where there are several chunks.
// How many items is a function of shapes, so threads change no bit.
#pragma once
#include "scores.h"

namespace txl::TXL_ISA {
namespace {

constexpr int64_t BACKWARD_ITEMS = 32;  // chunks of keys are made until there are as many items
constexpr int64_t MAX_CHUNKS = 16;      // each has a dq of its own

struct BackwardPlan {
  int64_t Dp, Dvp, chunk, chunks, group, groups, rows, rhos;  // chunk: keys; group: batch rows
  bool content, position, dr, dr_bias;                        // what is wanted: of q, by its two halves; of the tables

  BackwardPlan(const Problem& p, const Gradients& g)
      : Dp(round_up(p.D, NR)),
        Dvp(round_up(p.Dv, NR)),
        content(g.dq.data || g.du.data),
        position(p.r.data && (g.dq.data || g.dw.data)),
        dr(g.dr.data),
        dr_bias(g.dr_bias.data) {
    const int64_t S = p.M + p.L, tiles = div_up(S, BLOCK_S), BH = max_of(p.B * p.H, 1);
    chunks = clamp(div_up(BACKWARD_ITEMS, BH), 1, clamp(tiles, 1, MAX_CHUNKS));
    chunk = max_of(div_up(tiles, chunks), 1) * BLOCK_S;
    chunks = div_up(S, chunk);
    group = chunks > 1 ? 1 : batch_rows_of_item(p, BACKWARD_ITEMS);
    groups = div_up(p.B, group);
    rows = round_up(p.L, MR);
    rhos = p.ahead ? chunk + p.L : min_of(chunk + p.L, S);
    rhos = dr || dr_bias ? round_up(rhos + 2 * BLOCK_L + 3 * NR, NR) : 0;  // blocks stand out at both ends
  }
  int64_t items(const Problem& p) const { return groups * p.H * chunks; }
  // Of the chunk that starts at key j0.
  int64_t first_rho(const Problem& p, int64_t j0) const { return rho_of(p, p.L - 1 + BLOCK_L - 1, j0) / NR * NR; }
  // The rows of the tables that the keys [low, high) of a chunk meet; the others are never read.
  Range met(const Problem& p, int64_t low, int64_t high) const {
    const int64_t first = first_rho(p, low), nearest = p.M + rho_origin(p) + p.ahead;  // rho of distance -ahead
    return {rho_of(p, p.L - 1, low) - first, min_of(rho_of(p, 0, high), nearest + 1) - first};
  }
  int64_t dq_floats() const { return rows * Dp; }
  int64_t dr_rows() const { return dr ? rhos : 0; }
  int64_t item_floats() const { return (dr_rows() + 2) * Dp + (dr_bias ? rhos : 0); }
};

// Where a batch row of an item adds up: dq [rows][Dp], dr [rhos][Dp] from first_rho on, du, dw [Dp], dr_bias [rhos].
struct Sums {
  float *dq, *dr, *du, *dw, *dr_bias;
  Sums(const BackwardPlan& z, float* row_dq, float* item)
      : dq(row_dq), dr(item), du(item + z.dr_rows() * z.Dp), dw(du + z.Dp), dr_bias(dw + z.Dp) {}
};

// A batch row and head against the keys of a chunk: [low, high).
struct Part {
  int64_t b, h, low, high;
  int64_t bh(const Problem& p) const { return b * p.H + h; }
};

// A gradient of key row j of the memory or of the segment; null where it is not wanted.
template <class T>
TXL_INLINE T* key_gradient(const Problem& p, const View& memory, const View& segment, const Part& at, int64_t j) {
  const bool wanted = j < p.M ? memory.data : segment.data;
  return wanted ? const_cast<T*>(key_row<T>(p, memory, segment, at.b, at.h, j)) : nullptr;
}

// Whether a gradient of the memory's and of the segment's rows is wanted for some of the keys [low, high).
TXL_INLINE bool wants_keys(const Problem& p, const View& memory, const View& segment, int64_t low, int64_t high) {
  return (low < p.M && memory.data) || (high > p.M && segment.data);
}

// Whether some block sees a key of [low, high).
static bool sees_any(const Range* hulls, int64_t blocks, int64_t low, int64_t high) {
  for (int64_t x = 0; x < blocks; ++x)
    if (max_of(hulls[x].low, low) < min_of(hulls[x].high, high)) return true;
  return false;
}

// Which chunks of keys each batch row sees, and which keys each block of its queries.
struct Seen {
  int64_t blocks;
  Buffer hull_memory, live_memory;
  Range* hulls;   // [B][blocks]
  int32_t* live;  // [B][chunks]

  Seen(const Problem& p, const BackwardPlan& z)
      : blocks(div_up(p.L, BLOCK_L)),
        hull_memory(p.B * blocks * sizeof(Range) / sizeof(float)),
        live_memory(p.B * z.chunks),
        hulls(reinterpret_cast<Range*>(hull_memory.data)),
        live(reinterpret_cast<int32_t*>(live_memory.data)) {
    for (int64_t x = 0; x < p.B * blocks; ++x) {
      const int64_t i0 = x % blocks * BLOCK_L;
      hulls[x] = BlockRanges<BLOCK_L>(p, x / blocks, i0, min_of(BLOCK_L, p.L - i0), {0, p.M + p.L}).all;
    }
    for (int64_t x = 0; x < p.B * z.chunks; ++x)
      live[x] = sees_any(hulls + x / z.chunks * blocks, blocks, x % z.chunks * z.chunk, (x % z.chunks + 1) * z.chunk);
  }
};

}  // namespace
}  // namespace txl::TXL_ISA
