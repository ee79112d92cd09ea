// Positional terms of the scores, in two ways. Both issue the loads of their first rows of r before scores are
// computed.
#pragma once
#include "block.cuh"

namespace txl_cuda {

constexpr float LOG2_E = 1.4426950408889634f;

// The first rows of r of a thread, in flight. Without TERMS rows of r are as wide as q, and lanes share a row, as they
// share a row of k.
template <class S, bool TERMS = S::TERMS>
struct FirstRows : Tile<S> {};

// With TERMS rows of r have their own width Dr, usually 16, and a row is one thread's, for all queries of its table.
// This is a piece of it, of 32 bytes.
template <class S>
struct FirstRows<S, true> {
  static constexpr int LOADS = 2, ELEMENTS = LOADS * S::E;
  Chunk chunk[LOADS];
};

// The rows of r that the block's pairs have, by index relative to the row of query 0 and the part's first key; with
// TERMS those in the table.
template <class S>
struct TableRows {
  using T = typename S::T;
  const T* row;  // 0, of the block's first query head; it need not exist
  int64_t step;
  int low, high;  // [low, high)

  TXL_DEVICE explicit TableRows(const Block<S>& block) : step(block.p.r.s1) {
    const int64_t zero = block.p.zero_row + block.p.M - block.first_key;  // index of row 0 in the table
    row = row_of<T>(block.p.r, block.heads.first, zero, 0);
    low = block.hull.r_low, high = block.hull.r_high;
    if constexpr (S::TERMS) {
      low = static_cast<int>(max_of(low, min_of(-zero, high)));              // plant: table-begin
      high = static_cast<int>(max_of(low, min_of(high, block.p.T - zero)));  // plant: table-end
    }
  }

  TXL_DEVICE const T* operator()(int n) const { return row + n * step; }
};

// Issues the loads of row n from element d on; none from row rows.high on.
template <class S>
TXL_DEVICE void fetch_piece(const TableRows<S>& rows, FirstRows<S, true>& piece, const Block<S>& block, int n, int d) {
  TXL_UNROLL
  for (int c = 0; c < piece.LOADS; ++c) {
    const int element = d + c * S::E;
    piece.chunk[c] = Chunk{};
    if (n < rows.high && element < block.p.Dr) piece.chunk[c] = load_chunk<S::ALIGNED>(rows(n) + element);
  }
}

// Adds the products of a piece of row n with the queries [from, to) to their scores.
template <class S>
TXL_DEVICE void add_piece(const Block<S>& block, const FirstRows<S, true>& piece, int n, int d, int from, int to) {
  const int width = static_cast<int>(block.p.Dr);
  const float factor = block.p.position_scale * LOG2_E;
  float r[piece.ELEMENTS];
  TXL_UNROLL
  for (int e = 0; e < piece.ELEMENTS; ++e) r[e] = element<typename S::T>(piece.chunk[e / S::E], e % S::E);
  TXL_ROLLED
  for (int first = from; first < to; first += S::QUERIES_AT_ONCE) {
    float sum[S::QUERIES_AT_ONCE] = {};
    TXL_UNROLL
    for (int e = 0; e < piece.ELEMENTS; e += 4) {
      if (d + e >= width) break;
      TXL_UNROLL
      for (int m = 0; m < S::QUERIES_AT_ONCE; ++m) {
        const int q = first + m < to ? first + m : to - 1;
        const Float4 query = load_float4(block.shared + block.at.position + q * width + d + e);
        TXL_UNROLL
        for (int z = 0; z < 4; ++z) sum[m] += query.x[z] * r[e + z];
      }
    }
    TXL_UNROLL
    for (int m = 0; m < S::QUERIES_AT_ONCE; ++m) {
      const int q = first + m, key = block.query(q) - n;  // at this row's distance from the query
      if (q < to && key >= block.hull.low && key < block.hull.high) block.scores(q)[key] += factor * sum[m];
    }
  }
}

// Issues the loads of this thread's first rows.
template <class S>
TXL_DEVICE void fetch_positions(const TableRows<S>& rows, FirstRows<S>& first, const Block<S>& block) {
  if constexpr (S::TERMS) {
    fetch_piece(rows, first, block, rows.low + thread(), 0);
  } else {
    fetch<S>(first, block.D, rows.low, rows.low, rows.high, rows);
  }
}

// Adds to the scores. `first`: the rows whose loads have been issued.
template <class S>
TXL_DEVICE void add_positions(TableRows<S>& rows, FirstRows<S>& first, const Block<S>& block) {
  if constexpr (S::TERMS) {
    // A table is of all heads, or each head has its own.
    const int tables = block.p.r.s0 == 0 ? 1 : block.heads.count, queries = block.queries / tables;
    const int begin = rows.low + thread();
    TXL_ROLLED
    for (int table = 0; table < tables; ++table) {
      if (table) rows.row += block.p.r.s0, fetch_piece(rows, first, block, begin, 0);  // plant: next-table
      TXL_ROLLED
      for (int n = begin; n < rows.high; n += THREADS) {
        TXL_ROLLED
        for (int d = 0; d < block.p.Dr; d += first.ELEMENTS) {
          const FirstRows<S> piece = first;
          const bool row_ends = d + first.ELEMENTS >= block.p.Dr;
          fetch_piece(rows, first, block, row_ends ? n + THREADS : n, row_ends ? 0 : d + first.ELEMENTS);
          const int from = table * queries;  // plant: position-of-a-head
          add_piece(block, piece, n, d, from, from + queries);
        }
      }
    }
  } else {
    const Hull& hull = block.hull;
    products<S>(block.D, block.queries, block.shared + block.at.position, first, rows.low, rows.high, rows,
                [&](int n, int q, float x) {
                  const int key = q - n;  // at this row's distance from query q
                  if (key >= hull.low && key < hull.high) block.scores(q)[key] += x;
                });
  }
}

// Writes the position queries with their bias, [queries][Dr].
template <class S>
TXL_DEVICE void add_position_bias(const Block<S>& block) {
  using T = typename S::T;
  const DecodeProblem& p = block.p;
  const View& queries = p.q_pos.data ? p.q_pos : p.q;
  const int width = static_cast<int>(p.Dr);
  TXL_ROLLED
  for (int x = thread(); x < block.queries * width; x += THREADS) {
    const int n = x / width, d = x % width, h = block.head(n);
    const float q = to_float(row_of<T>(queries, block.b, h, block.query(n))[d]);
    block.shared[block.at.position + x] = q + to_float(row_of<T>(p.w, h, 0, 0)[d]);
  }
}

}  // namespace txl_cuda
