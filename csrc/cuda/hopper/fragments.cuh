// Fragments: the elements of a warpgroup's operands and accumulators that are in a thread's registers (products.cuh
// says which). Loads of queries, keys and values as A operands.
#pragma once
#include "../visible.cuh"
#include "prefill_problem.h"
#include "tile.cuh"

namespace txl_cuda {

// The first row and column of this thread's elements of an accumulator. warp: its number in the warpgroup.
TXL_DEVICE int accumulator_row(int warp) { return warp * 16 + thread() % WARP / 4; }
TXL_DEVICE int accumulator_column() { return thread() % 4 * 2; }
// The row and first column of word n of an A operand.
TXL_DEVICE int operand_row(int n) { return accumulator_row(thread() % WARPGROUP / WARP) + 8 * (n % 2); }
TXL_DEVICE int operand_column(int n) { return n / 2 * 8 + accumulator_column(); }
// So of each of its two rows a thread has pairs of columns, 8 apart: words 2 m + half of an A operand, and elements
// 4 m + 2 half of an accumulator. In global memory pair m is at a fixed distance from the row's first.

// The two elements of a word.
template <class T>
TXL_DEVICE void unpack(T, uint32_t x, float (&to)[2]) {
  to[0] = to_float(T{static_cast<uint16_t>(x)}), to[1] = to_float(T{static_cast<uint16_t>(x >> 16)});
}
TXL_DEVICE uint32_t pack(Bf16, float low, float high) { return pack_bf16(low, high); }
TXL_DEVICE uint32_t pack(F16, float low, float high) { return pack_f16(low, high); }

// An accumulator [64, 64] as an A operand: P or dS.
template <class T>
TXL_DEVICE void pack_operand(const float (&accumulator)[32], uint32_t (&a)[16]) {
  TXL_UNROLL
  for (int n = 0; n < 16; ++n) a[n] = pack(T(), accumulator[2 * n], accumulator[2 * n + 1]);
}

// The scale of scores in base 2, and that of position queries. Queries are multiplied by it before they are rounded.
constexpr float LOG2_E = 1.4426950408889634f;
TXL_DEVICE float scale_log2(const Problem& p) { return p.scale * LOG2_E; }
TXL_DEVICE float position_scale_log2(const Problem& p) { return p.position_scale * LOG2_E; }

// Loads the pairs of columns of a row of 16 bits: word(m) gets pair m, or 0. begin: address of the first. Columns are a
// multiple of 8.
template <int WIDTH, class Word>
TXL_DEVICE void load_row(const void* begin, int columns, bool exists, const Word& word) {
  unroll<WIDTH / 8>([&](auto number) {
    constexpr int m = decltype(number)::value;
    word(m) = load_word<16 * m>(begin, exists && 8 * m < columns);
  });
}
// Stores them: word(m) is pair m.
template <int WIDTH, class Word>
TXL_DEVICE void store_row(void* begin, int columns, bool exists, const Word& word) {
  unroll<WIDTH / 8>([&](auto number) {
    constexpr int m = decltype(number)::value;
    store_word<16 * m>(begin, word(m), exists && 8 * m < columns);
  });
}
// Stores them as floats: pair(m) points to the two of pair m.
template <int WIDTH, class Pair>
TXL_DEVICE void store_float_row(float* begin, int columns, bool exists, const Pair& pair) {
  unroll<WIDTH / 8>([&](auto number) {
    constexpr int m = decltype(number)::value;
    const float* const x = pair(m);
    store_pair<32 * m>(begin, x[0], x[1], exists && 8 * m < columns);
  });
}

// Sums over a warp's rows of an accumulator. x: the sums of each pair of columns over this thread's rows. The 8 lanes
// that have the same columns share the sums: a step exchanges halves of what is left. Writes them to row `to`.
template <int N>
TXL_DEVICE void store_column_sums(float* to, int columns, float (&x)[N]) {
  int first = 0;  // of the elements that are left
  unroll<3>([&](auto number) {
    constexpr int step = 4 << decltype(number)::value, half = N >> (decltype(number)::value + 1);
    const bool upper = thread() & step;
    TXL_UNROLL
    for (int n = 0; n < half; ++n) {
      const float kept = upper ? x[n + half] : x[n], sent = upper ? x[n] : x[n + half];
      x[n] = kept + shuffle_xor(sent, step);
    }
    first += upper ? half : 0;  // plant: column-sums
  });
  store_float_row<N / 2>(to + first * 4 + accumulator_column(), columns - first * 4, true,
                         [&](int m) { return x + 2 * m; });
}

// Loads rows `first` .. + 63 of `count`, of `columns` each, as an A operand; 0 for rows and columns that do not exist.
// All loads are issued before any is used. columns: a parameter of the kernel, by reference, which takes no register.
template <class T, int WIDTH>
TXL_DEVICE void load_rows(const View& rows, const int64_t& columns, int64_t b, int64_t h, int first, int64_t count,
                          uint32_t (&a)[WIDTH / 4]) {
  TXL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = first + operand_row(half);
    const bool is_row = i >= 0 && i < count;  // plant: rows-beyond-queries
    load_row<WIDTH>(row_of<T>(rows, b, h, is_row ? i : 0) + accumulator_column(), static_cast<int>(columns), is_row,
                    [&](int m) -> uint32_t& { return a[2 * m + half]; });
  }
}
template <class T, int WIDTH>
TXL_DEVICE void load_rows(const Problem& p, const View& rows, int64_t b, int64_t h, int first, int64_t count,
                          uint32_t (&a)[WIDTH / 4]) {
  load_rows<T, WIDTH>(rows, p.D, b, h, first, count, a);
}
// Loads a bias [H, D]: a[n] is what is added to words 2 n and 2 n + 1 of an operand, which have the same columns.
template <class T, int WIDTH>
TXL_DEVICE void load_bias(const Problem& p, const View& bias, int64_t h, uint32_t (&a)[WIDTH / 8]) {
  load_row<WIDTH>(static_cast<const T*>(bias.data) + h * bias.s0 + accumulator_column(), static_cast<int>(p.D), true,
                  [&](int m) -> uint32_t& { return a[m]; });
}
// Adds a bias to queries, and scales the sum.
template <class T, int WIDTH>
TXL_DEVICE void add_bias(const Problem& p, const uint32_t (&queries)[WIDTH / 4], const uint32_t (&bias)[WIDTH / 8],
                         uint32_t (&a)[WIDTH / 4]) {
  TXL_UNROLL
  for (int n = 0; n < WIDTH / 4; ++n) {
    float q[2], u[2];
    unpack(T(), queries[n], q), unpack(T(), bias[n / 2], u);
    a[n] = pack(T(), scale_log2(p) * (q[0] + u[0]), scale_log2(p) * (q[1] + u[1]));
  }
}
// Loads the A operands of 64 queries, q + w and q + u, scaled.
template <class T, int WIDTH>
TXL_DEVICE void load_queries(const Problem& p, int64_t b, int64_t h, int first, uint32_t (&position)[WIDTH / 4],
                             uint32_t (&content)[WIDTH / 4]) {
  uint32_t q[WIDTH / 4], u[WIDTH / 8], w[WIDTH / 8];
  load_rows<T, WIDTH>(p, p.q, b, h, first, p.L, q);
  load_bias<T, WIDTH>(p, p.u, h, u), load_bias<T, WIDTH>(p, p.w, h, w);
  add_bias<T, WIDTH>(p, q, w, position), add_bias<T, WIDTH>(p, q, u, content);
}

// Multiplies the elements of an A operand; the products are rounded.
template <class T, int WORDS>
TXL_DEVICE void scale_operand(const uint32_t (&a)[WORDS], float factor, uint32_t (&scaled)[WORDS]) {
  TXL_UNROLL
  for (int n = 0; n < WORDS; ++n) {
    float x[2];
    unpack(T(), a[n], x);
    scaled[n] = pack(T(), factor * x[0], factor * x[1]);
  }
}
// Loads the A operands of 64 queries and of their position queries, which have a width and a scale of their own.
template <class T, int WIDTH>
TXL_DEVICE void load_queries_and_positions(const Problem& p, int64_t b, int64_t h, int first,
                                           uint32_t (&position)[NARROW / 4], uint32_t (&content)[WIDTH / 4]) {
  uint32_t q[WIDTH / 4], q_pos[NARROW / 4];
  load_rows<T, WIDTH>(p, p.q, b, h, first, p.L, q);
  load_rows<T, NARROW>(p.q_pos, p.Dr, b, h, first, p.L, q_pos);
  scale_operand<T>(q, scale_log2(p), content), scale_operand<T>(q_pos, position_scale_log2(p), position);
}

// Stores an A operand to a narrow tile in shared memory.
TXL_DEVICE void store_narrow_operand(const uint32_t (&a)[NARROW / 4], uint32_t tile) {
  TXL_UNROLL
  for (int n = 0; n < NARROW / 4; ++n) store_shared(tile + narrow_offset(operand_row(n), operand_column(n)), a[n]);
}
// Stores an A operand to a tile in shared memory, K-major.
template <int WIDTH>
TXL_DEVICE void store_operand(const uint32_t (&a)[WIDTH / 4], uint32_t tile) {
  TXL_UNROLL
  for (int n = 0; n < WIDTH / 4; ++n) store_shared(tile + swizzled_offset(operand_row(n), operand_column(n)), a[n]);
}
// Loads a tile [64, 64] transposed as an A operand: row d of the operand is column d of the tile.
TXL_DEVICE void load_operand_transposed(uint32_t tile, uint32_t (&a)[16]) {
  TXL_UNROLL
  for (int n = 0; n < 16; ++n) {
    const int d = operand_row(n), pair = d / 2 * 2, shift = d % 2 * 16;  // plant: transposed-column
    const uint32_t low = float_to_bits(load_shared(tile + swizzled_offset(operand_column(n), pair))) >> shift;
    const uint32_t high = float_to_bits(load_shared(tile + swizzled_offset(operand_column(n) + 1, pair))) >> shift;
    a[n] = (low & 0xFFFF) | high << 16;
  }
}

}  // namespace txl_cuda
