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
TXL_DEVICE int operand_column(int n) { return n / 4 * 16 + n / 2 % 2 * 8 + accumulator_column(); }

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

// Loads rows `first` .. + 63 of `count`, of `columns` each, as an A operand; 0 for rows and columns that do not exist.
// All loads are issued before any is used. columns: a parameter of the kernel, by reference, which takes no register.
template <class T, int WIDTH>
TXL_DEVICE void load_rows(const View& rows, const int64_t& columns, int64_t b, int64_t h, int first, int64_t count,
                          uint32_t (&a)[WIDTH / 4]) {
  TXL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = first + operand_row(half);
    const bool is_row = i >= 0 && i < count;
    const T* const row = row_of<T>(rows, b, h, is_row ? i : 0);
    TXL_UNROLL
    for (int n = half; n < WIDTH / 4; n += 2)
      // plant: rows-beyond-queries
      a[n] = load_word(row + operand_column(n), is_row && operand_column(n) < static_cast<int>(columns));
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
  const T* const row = static_cast<const T*>(bias.data) + h * bias.s0;
  TXL_UNROLL
  for (int n = 0; n < WIDTH / 8; ++n)
    a[n] = load_word(row + operand_column(2 * n), operand_column(2 * n) < static_cast<int>(p.D));
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
