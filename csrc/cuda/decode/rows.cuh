// Reading rows of k, v and r: 16 bytes for each load, one tile of rows in flight while the one before is used.
#pragma once
#include "../element.cuh"
#include "decode_problem.h"
#include "layout.h"

namespace txl_cuda {

constexpr int ROWS = 4;  // consecutive rows of a tile that a group of lanes reads

// The sizes of an instance of the kernel: LANES lanes share a row, each with CHUNKS loads of 16 bytes; at most Q
// queries, in an instance with TERMS of all query heads of the block together.
template <class T_, int LANES_, int CHUNKS_, int Q_, bool ALIGNED_, bool TERMS_ = false>
struct Shape {
  using T = T_;
  static constexpr int LANES = LANES_, CHUNKS = CHUNKS_, Q = Q_;
  static constexpr bool ALIGNED = ALIGNED_;              // all rows start at multiples of 16 bytes
  static constexpr bool TERMS = TERMS_;                  // takes calls with `with_terms`
  static constexpr int QUERIES_AT_ONCE = Q < 4 ? Q : 4;  // queries handled together
  static constexpr int E = 16 / sizeof(T);               // elements of a load
  static constexpr int WIDTH = LANES * CHUNKS * E;       // D, rounded up
  static constexpr int GROUPS = THREADS / LANES;         // of lanes in a block
  static constexpr int STEP = GROUPS * ROWS;             // rows of a tile
  static constexpr int PER_LANE = CHUNKS * E;            // elements of a row in a lane
};

template <class S>
struct Tile {
  Chunk chunk[ROWS][S::CHUNKS];
};

template <class S>
TXL_DEVICE int lane() {
  return thread() % S::LANES;
}

// The first of this thread's rows, relative to the tile's first row.
template <class S>
TXL_DEVICE int first_row() {
  return thread() / S::LANES * ROWS;
}

// The first column of this lane's load `chunk` of a row.
template <class S>
TXL_DEVICE int column(int chunk) {
  return (chunk * S::LANES + lane<S>()) * S::E;
}

// Issues the loads of this thread's part of the tile that begins at row `first`; what lies beyond D or outside
// rows [from, to) is 0.
template <class S, class RowAt>
TXL_DEVICE void fetch(Tile<S>& tile, int D, int first, int from, int to, const RowAt& row_at) {
  unsigned rows[S::CHUNKS];  // number of rows, from `from` on, that each load of this lane reads
  TXL_UNROLL
  for (int c = 0; c < S::CHUNKS; ++c) rows[c] = column<S>(c) < D && to > from ? to - from : 0;
  TXL_UNROLL
  for (int z = 0; z < ROWS; ++z) {
    const int row = first + first_row<S>() + z;
    const typename S::T* const data = row_at(row);
    TXL_UNROLL
    for (int c = 0; c < S::CHUNKS; ++c) {
      tile.chunk[z][c] = Chunk{};
      if (static_cast<unsigned>(row - from) < rows[c]) tile.chunk[z][c] = load_chunk<S::ALIGNED>(data + column<S>(c));
    }
  }
}

template <class S>
TXL_DEVICE void widen(const Tile<S>& tile, float (&x)[ROWS][S::PER_LANE]) {
  TXL_UNROLL
  for (int z = 0; z < ROWS; ++z) TXL_UNROLL
  for (int d = 0; d < S::PER_LANE; ++d) x[z][d] = element<typename S::T>(tile.chunk[z][d / S::E], d % S::E);
}

// Reduces each of four values over the lanes of a group: lane l gets the sum of x[l / (LANES / 4)]. In each step a lane
// sends half of its values to its partner, so four reductions cost little more than one.
template <int LANES>
TXL_DEVICE float group_reduce_add(float (&x)[4]) {
  const bool upper = thread() & (LANES / 2), odd = thread() & (LANES / 4);
  TXL_UNROLL
  for (int k = 0; k < 2; ++k) {
    // plant: group-sum-halves
    const float sent = upper ? x[k] : x[k + 2], kept = upper ? x[k + 2] : x[k];
    x[k] = kept + shuffle_xor(sent, LANES / 2);  // plant: group-sum-diverging
  }
  const float sent = odd ? x[0] : x[1], kept = odd ? x[1] : x[0];
  float sum = kept + shuffle_xor(sent, LANES / 4);  // plant: group-sum-partner
  TXL_UNROLL
  // plant: group-sum-steps
  for (int step = LANES / 8; step; step /= 2) sum += shuffle_xor(sum, step);
  return sum;
}

// The offset of element d of a query in shared memory: four floats of each lane are contiguous, so that the lanes of a
// group read from different banks.
template <class S>
TXL_DEVICE int query_offset(int d) {
  const int chunk = d / (S::LANES * S::E), owner = d / S::E % S::LANES, e = d % S::E;
  return ((chunk * (S::E / 4) + e / 4) * S::LANES + owner) * 4 + e % 4;
}

// Computes the dot products of the rows [from, to) with `count` queries, [Q][WIDTH] in the order of query_offset, 0
// beyond D and count. One lane calls use(row, q, product) for each. `tile` is the first tile, whose loads have been
// issued.
template <class S, class RowAt, class Use>
TXL_DEVICE void products(int D, int count, const float* queries, Tile<S>& tile, int from, int to, const RowAt& row_at,
                         const Use& use) {
  static_assert(ROWS == 4 && S::LANES >= 8, "group_reduce_add needs four rows and eight lanes");
  constexpr int SHARE = S::LANES / ROWS;  // lanes that end up with the same sum
  const int mine = lane<S>() / SHARE;
  for (int first = from; first < to; first += S::STEP) {  // the same number of rounds in all lanes, as shuffles need
    float x[ROWS][S::PER_LANE];
    widen<S>(tile, x);
    fetch<S>(tile, D, first + S::STEP, from, to, row_at);
    const int row = first + first_row<S>() + mine;
    TXL_ROLLED
    for (int q = 0; q < count; q += S::QUERIES_AT_ONCE) {
      float sum[S::QUERIES_AT_ONCE][ROWS] = {};
      TXL_UNROLL
      for (int d = 0; d < S::PER_LANE; d += 4) TXL_UNROLL
      for (int n = 0; n < S::QUERIES_AT_ONCE; ++n) {
        const Float4 query = load_float4(queries + (q + n) * S::WIDTH + (d / 4 * S::LANES + lane<S>()) * 4);
        TXL_UNROLL
        for (int z = 0; z < ROWS; ++z) TXL_UNROLL
        for (int e = 0; e < 4; ++e) sum[n][z] += query.x[e] * x[z][d + e];
      }
      TXL_UNROLL
      for (int n = 0; n < S::QUERIES_AT_ONCE; ++n) {
        const float product = group_reduce_add<S::LANES>(sum[n]);
        // plant: group-sum-absent-lanes
        if (lane<S>() % SHARE == 0 && row < to && q + n < count) use(row, q + n, product);
      }
    }
  }
}

}  // namespace txl_cuda
