// Sizes of an instance of the forward kernel, and its shared memory.
#pragma once
#include "tile.cuh"

namespace txl_cuda {

// GROUPS warpgroups of 64 queries each, and one that loads. WIDTH: of a row in tiles, D at most. INTERLEAVED: scores
// of the next tile are skewed during the softmax of this one. q + u stays in registers, q + w in shared memory.
template <class T_, int WIDTH_, int GROUPS_, int STAGES_, int R_STAGES_, bool INTERLEAVED_>
struct ForwardShape {
  using T = T_;
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_;
  static constexpr int STAGES = STAGES_;  // of tiles of k, and of v
  static constexpr int V_STAGES = STAGES;
  static constexpr int R_STAGES = R_STAGES_;  // a group lags GROUPS - 1 tiles of r behind the first
  static constexpr bool INTERLEAVED = INTERLEAVED_;
  static constexpr int THREADS = (GROUPS + 1) * WARPGROUP, QUERIES = GROUPS * SIDE;
  // Registers of a thread of the consumers, of the producer.
  static constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 240, PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
  static constexpr int TILE_BYTES = WIDTH / SIDE * SUBTILE_BYTES;  // of a tile
  static_assert(R_STAGES > GROUPS);

  // Bytes from the start of shared memory.
  static constexpr int ring = 0, k = ring + GROUPS * WARPGROUP_WARPS * RING, v = k + STAGES * TILE_BYTES;
  static constexpr int r = v + STAGES * TILE_BYTES, position = r + R_STAGES * TILE_BYTES;
  static constexpr int barriers = position + GROUPS * TILE_BYTES;
  static constexpr int BARRIERS = 3 * (2 * STAGES + R_STAGES);
  static constexpr int seen = barriers + BARRIERS * 8, shared = seen + QUERIES * 8;
  static_assert(shared <= MAX_SHARED);
};

}  // namespace txl_cuda
