// The instances of the three kernels: sizes of a block, registers, and where things are in shared memory.
#pragma once
#include "pipeline.cuh"
#include "skew.cuh"
#include "skew_transposed.cuh"

namespace txl_cuda {

constexpr int SWIZZLE_PERIOD = 1024;  // bytes: tiles begin at multiples

// Forward: a block of GROUPS consumer warpgroups of 64 queries each, and a producer warpgroup. WIDTH: of a row in
// tiles, 64 or 128, at least D. q + u is in registers, q + w in shared memory. INTERLEAVED: scores of the next tile are
// skewed during the softmax of this one. HAS_Q_POS: positions have queries of their own, of width 8 or 16, and tiles of
// r and of these queries are narrow; such instances take grouped heads, sinks and distances without a row of r, and no
// biases.
template <class T_, int WIDTH_, int GROUPS_, int STAGES_, int R_STAGES_, bool INTERLEAVED_, bool HAS_Q_POS_ = false>
struct ForwardShape {
  using T = T_;
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_;
  static constexpr int STAGES = STAGES_;  // of tiles of k, and of v
  static constexpr int V_STAGES = STAGES;
  static constexpr int R_STAGES = R_STAGES_;  // the last warpgroup uses a tile of r GROUPS - 1 steps after the first
  static constexpr bool INTERLEAVED = INTERLEAVED_, HAS_Q_POS = HAS_Q_POS_;
  static constexpr int THREADS = (GROUPS + 1) * WARPGROUP, QUERY_GROUPS = GROUPS, QUERIES = QUERY_GROUPS * SIDE;
  // Of a thread.
  static constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 240, PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
  static constexpr int TILE_BYTES = WIDTH / SIDE * SUBTILE_BYTES;             // of 64 rows
  static constexpr int R_TILE_BYTES = HAS_Q_POS ? NARROW_BYTES : TILE_BYTES;  // the same, of r or position queries
  static_assert(R_STAGES > GROUPS);

  // Bytes from the start of shared memory.
  static constexpr int skew = 0, k = skew + GROUPS * WARPGROUP_WARPS * Skew::BYTES, v = k + STAGES * TILE_BYTES;
  static constexpr int r = v + STAGES * TILE_BYTES, q_position = r + R_STAGES * R_TILE_BYTES;
  static constexpr int barriers = q_position + GROUPS * R_TILE_BYTES;
  static constexpr int BARRIERS = 3 * (2 * STAGES + R_STAGES);
  static constexpr int key_bounds = barriers + BARRIERS * 8, SHARED_BYTES = key_bounds + QUERIES * 8;
  static_assert(SHARED_BYTES <= MAX_SHARED && (k | v | r | q_position) % SWIZZLE_PERIOD == 0);
};

// Backward, dq and dr: a block of GROUPS consumer warpgroups of 64 queries each, and a producer warpgroup. IN_SHARED:
// q + u, q + w and dout are in shared memory, else in registers.
template <class T_, int WIDTH_, int GROUPS_, int STAGES_, int V_STAGES_, int R_STAGES_, bool IN_SHARED_,
          bool HAS_Q_POS_ = false>
struct QueriesShape {
  using T = T_;
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_;
  static constexpr int STAGES = STAGES_, V_STAGES = V_STAGES_;  // of tiles of k, of v
  static constexpr int R_STAGES = R_STAGES_;                    // a tile of r is used again two tiles of keys later
  static constexpr bool IN_SHARED = IN_SHARED_, HAS_Q_POS = HAS_Q_POS_;
  // An A operand (q + w)^T is in registers, and gives dr transposed, [D, distances]; else dr is G^T (q + w). Each has
  // an epilogue of its own: dr_transposed.cuh, dr_in_halves.cuh; with HAS_Q_POS, dr_narrow.cuh.
  static constexpr bool DR_TRANSPOSED = !IN_SHARED && !HAS_Q_POS;
  static constexpr int THREADS = (GROUPS + 1) * WARPGROUP, QUERY_GROUPS = GROUPS, QUERIES = QUERY_GROUPS * SIDE;
  static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;  // where there are two consumer warpgroups
  static constexpr int TILE_BYTES = WIDTH / SIDE * SUBTILE_BYTES;
  static constexpr int R_TILE_BYTES = HAS_Q_POS ? NARROW_BYTES : TILE_BYTES;
  // Of a box of a TMA reduction of dr, which has 32 columns of float32.
  static constexpr int DR_ROWS = DR_TRANSPOSED ? SIDE : 16, DR_BOX = DR_ROWS * ROW_BYTES;  // rows, bytes
  static_assert(R_STAGES > GROUPS + 2);

  // Bytes from the start of shared memory. ds: dS by distance, two tiles of each warpgroup.
  static constexpr int ds = 0, skew = ds + GROUPS * 2 * SUBTILE_BYTES;
  static constexpr int k = skew + GROUPS * WARPGROUP_WARPS * Skew::BYTES, v = k + STAGES * TILE_BYTES;
  static constexpr int r = v + V_STAGES * TILE_BYTES, q_position = r + R_STAGES * R_TILE_BYTES;
  static constexpr int q_content = q_position + GROUPS * R_TILE_BYTES;
  static constexpr int dout = q_content + (IN_SHARED ? GROUPS * TILE_BYTES : 0);
  static constexpr int dr = dout + (IN_SHARED ? GROUPS * TILE_BYTES : 0);
  static constexpr int DR_BYTES = HAS_Q_POS ? 0 : DR_TRANSPOSED ? DR_BOX : WARPGROUP_WARPS * 2 * DR_BOX;
  static constexpr int barriers = dr + GROUPS * DR_BYTES;
  static constexpr int BARRIERS = 3 * (STAGES + V_STAGES + R_STAGES);
  static constexpr int key_bounds = barriers + BARRIERS * 8, SHARED_BYTES = key_bounds + QUERIES * 8;
  static_assert(SHARED_BYTES <= MAX_SHARED && (k | v | r | q_position | q_content | dout | dr) % SWIZZLE_PERIOD == 0);
};

// Backward, dq and dr at width 128, by two consumer warpgroups with the same 64 queries (queries_halves.cuh).
// q + u and dout are in registers, q + w in shared memory.
template <class T_, int WIDTH_, int GROUPS_, int STAGES_, int V_STAGES_, int R_STAGES_>
struct QueriesHalvesShape {
  using T = T_;
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_;
  static constexpr int STAGES = STAGES_, V_STAGES = V_STAGES_;  // of tiles of k, of v
  static constexpr int R_STAGES = R_STAGES_;                    // a tile of r is used again two tiles of keys later
  static constexpr bool IN_SHARED = false, HAS_Q_POS = false, DR_TRANSPOSED = false;
  static constexpr int THREADS = (GROUPS + 1) * WARPGROUP, QUERY_GROUPS = 1, QUERIES = SIDE;
  static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
  static constexpr int TILE_BYTES = WIDTH / SIDE * SUBTILE_BYTES, R_TILE_BYTES = TILE_BYTES;
  static constexpr int DR_ROWS = 16, DR_BOX = DR_ROWS * ROW_BYTES;  // rows, bytes
  static_assert(WIDTH == 2 * SIDE && GROUPS == 2 && R_STAGES > 3);

  // Bytes from the start of shared memory. ds: dS by distance, two tiles, then dS by key.
  static constexpr int ds = 0, ds_by_key = ds + 2 * SUBTILE_BYTES, skew = ds_by_key + SUBTILE_BYTES;
  static constexpr int k = skew + WARPGROUP_WARPS * Skew::BYTES, v = k + STAGES * TILE_BYTES;
  static constexpr int r = v + V_STAGES * TILE_BYTES, q_position = r + R_STAGES * R_TILE_BYTES;
  static constexpr int q_content = q_position, dout = q_position;  // in registers
  static constexpr int dr = q_position + TILE_BYTES;
  static constexpr int barriers = dr + GROUPS * WARPGROUP_WARPS * 2 * DR_BOX;
  static constexpr int BARRIERS = 3 * (STAGES + V_STAGES + R_STAGES);
  static constexpr int key_bounds = barriers + BARRIERS * 8, SHARED_BYTES = key_bounds + QUERIES * 8;
  static_assert(SHARED_BYTES <= MAX_SHARED && (k | v | r | q_position | dr) % SWIZZLE_PERIOD == 0);
};

// Backward, dk and dv: a block of GROUPS consumer warpgroups of 64 keys each, and a producer warpgroup. IN_SHARED: k
// and v are in shared memory, else in registers.
template <class T_, int WIDTH_, int GROUPS_, int STAGES_, int R_STAGES_, bool IN_SHARED_, bool HAS_Q_POS_ = false>
struct KeysShape {
  using T = T_;
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_;
  static constexpr int STAGES = STAGES_;  // of tiles of queries: q + w, q + u, dout and statistics
  static constexpr int R_STAGES = R_STAGES_;
  static constexpr bool IN_SHARED = IN_SHARED_, HAS_Q_POS = HAS_Q_POS_;
  // Room for two warpgroups at width 128: q + w and dout have one stage each and pipelines of their own, and the skew
  // has one buffer a warpgroup.
  static constexpr bool COMPACT = (WIDTH > SIDE) && GROUPS > 1 && !HAS_Q_POS;
  static constexpr int ONE_OR_STAGES = COMPACT ? 1 : STAGES;  // of q + w, and of dout
  static constexpr int THREADS = (GROUPS + 1) * WARPGROUP;
  static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;  // where there are two consumer warpgroups
  static constexpr int TILE_BYTES = WIDTH / SIDE * SUBTILE_BYTES, STATS_BYTES = SIDE * 16;
  static constexpr int R_TILE_BYTES = HAS_Q_POS ? NARROW_BYTES : TILE_BYTES;
  static_assert(R_STAGES > GROUPS + 1);
  // The stages of r are contiguous, columns from 64 on after all of columns 0 to 63. Before the first stage is a copy
  // of the last: two successive tiles are one operand of 128 rows. COMPACT: two operands, without a copy.
  static constexpr int R_SUBTILE = HAS_Q_POS ? NARROW_BYTES : SUBTILE_BYTES;
  static constexpr int R_COPIES = COMPACT ? 0 : 1, R_SUBTILE_STRIDE = (R_STAGES + R_COPIES) * R_SUBTILE;
  static constexpr int SKEW_BUFFERS = COMPACT ? 1 : 2;  // of a warpgroup

  // Bytes from the start of shared memory.
  static constexpr int skew = 0, q_position = skew + GROUPS * SKEW_BUFFERS * SkewTransposed::BYTES;
  static constexpr int q_content = q_position + ONE_OR_STAGES * R_TILE_BYTES, dout = q_content + STAGES * TILE_BYTES;
  static constexpr int r = dout + ONE_OR_STAGES * TILE_BYTES, k = r + R_TILE_BYTES / R_SUBTILE * R_SUBTILE_STRIDE;
  static constexpr int v = k + (IN_SHARED ? GROUPS * TILE_BYTES : 0);
  static constexpr int stats = v + (IN_SHARED ? GROUPS * TILE_BYTES : 0);  // of a stage: lse, delta, low, high, [4][64]
  static constexpr int common_bounds = stats + STAGES * STATS_BYTES;       // of a stage: its largest low, smallest high
  static constexpr int barriers = common_bounds + STAGES * 8;
  static constexpr int BARRIERS = 3 * (STAGES + R_STAGES + (COMPACT ? 2 : 0));
  static constexpr int SHARED_BYTES = barriers + BARRIERS * 8;
  static_assert(SHARED_BYTES <= MAX_SHARED && (q_position | q_content | dout | r | k | v) % SWIZZLE_PERIOD == 0);
};

// With TXL_TWO_WARPGROUPS, which no device has timed, width 128 has two consumer warpgroups in backward, and the merge
// of split keys and backward's kernels begin while the one before ends (EARLY_START).
#ifdef TXL_TWO_WARPGROUPS
constexpr bool EARLY_START = true;
#else
constexpr bool EARLY_START = false;
#endif

// The instances, by the width of tiles. Arguments: width, consumer warpgroups, stages of tiles (of k and v, or of
// queries; QueriesShape has those of v apart), stages of r, and the flag.
template <class T>
using Forward64 = ForwardShape<T, 64, 3, 3, 5, false>;
template <class T>
using Forward128 = ForwardShape<T, 128, 2, 2, 4, true>;
template <class T>
using Queries64 = QueriesShape<T, 64, 2, 3, 3, 5, false>;
#ifdef TXL_TWO_WARPGROUPS
template <class T>
using Queries128 = QueriesHalvesShape<T, 128, 2, 2, 1, 4>;
template <class T>
using Keys128 = KeysShape<T, 128, 2, 2, 4, true>;
#else
template <class T>
using Queries128 = QueriesShape<T, 128, 1, 2, 1, 4, true>;
template <class T>
using Keys128 = KeysShape<T, 128, 1, 2, 3, true>;
#endif
template <class T>
using Keys64 = KeysShape<T, 64, 2, 3, 4, false>;

// With position queries.
template <class T>
using ForwardQPos64 = ForwardShape<T, 64, 3, 3, 6, false, true>;
template <class T>
using ForwardQPos128 = ForwardShape<T, 128, 2, 3, 6, false, true>;
template <class T>
using QueriesQPos64 = QueriesShape<T, 64, 2, 3, 3, 6, false, true>;
template <class T>
using QueriesQPos128 = QueriesShape<T, 128, 2, 2, 1, 6, true, true>;
template <class T>
using KeysQPos64 = KeysShape<T, 64, 2, 3, 5, false, true>;
template <class T>
using KeysQPos128 = KeysShape<T, 128, 2, 2, 5, true, true>;

}  // namespace txl_cuda
