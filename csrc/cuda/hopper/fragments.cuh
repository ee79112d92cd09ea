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

// Stores the pairs of columns of a row of 16 bits, of which there are a multiple of 4: word(m) is pair m. begin:
// address of the first.
template <int WIDTH, class Word>
TXL_DEVICE void store_row(void* begin, int columns, bool exists, const Word& word) {
  unroll<WIDTH / 8>([&](auto number) {
    constexpr int m = decltype(number)::value;
    store_word<16 * m>(begin, word(m), exists && 8 * m < columns);
  });
}
// The same of floats: pair(m) points to the two of pair m.
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

// This thread's two rows among 64 of an operand, and whether they exist.
struct OperandRows {
  int row[2];
  bool exists[2];
  // Rows `first` .. + 63 of `count`.
  TXL_DEVICE OperandRows(int first, int64_t count) {
    for (int half = 0; half < 2; ++half) {
      row[half] = first + operand_row(half);
      exists[half] = row[half] >= 0 && row[half] < count;  // plant: rows-beyond-queries
    }
  }
};
// The words of these rows of a tensor [b, h].
template <class T>
class OperandWords {
 public:
  TXL_DEVICE OperandWords(const View& rows, int64_t b, int64_t h, const OperandRows& given) {
    for (int half = 0; half < 2; ++half)
      begin_[half] = row_of<T>(rows, b, h, given.exists[half] ? given.row[half] : 0) + accumulator_column();
  }
  // Loads word 2 m + half, if it exists, else 0.
  template <int M>
  TXL_DEVICE uint32_t load(int half, bool exists) const {
    return load_word<16 * M>(begin_[half], exists);
  }

 private:
  const T* begin_[2];
};
// load(Number<m>, half, whether the word exists), for all words 2 m + half of an operand: loads of several tensors side
// by side, which share the checks. All are issued before any is used. columns: a parameter of the kernel, by reference,
// which takes no register.
template <int WIDTH, class Load>
TXL_DEVICE void for_each_word(const OperandRows& rows, const int64_t& columns, const Load& load) {
  TXL_UNROLL
  for (int half = 0; half < 2; ++half)
    unroll<WIDTH / 8>([&](auto number) {
      load(number, half, rows.exists[half] && 8 * decltype(number)::value < static_cast<int>(columns));
    });
}

// Adds a bias to queries, of which word m has the columns of words 2 m and 2 m + 1, and scales the sum, by 0 for rows
// that do not exist.
template <class T, int WIDTH>
TXL_DEVICE void add_bias(const float (&scale)[2], const uint32_t (&queries)[WIDTH / 4],
                         const uint32_t (&bias)[WIDTH / 8], uint32_t (&a)[WIDTH / 4]) {
  TXL_UNROLL
  for (int n = 0; n < WIDTH / 4; ++n) {
    float q[2], u[2];
    unpack(T(), queries[n], q), unpack(T(), bias[n / 2], u);
    a[n] = pack(T(), scale[n % 2] * (q[0] + u[0]), scale[n % 2] * (q[1] + u[1]));
  }
}
// Loads the A operands of 64 queries, q + w and q + u, scaled; 0 where they do not exist. beside: loads of other rows
// of these queries, see for_each_word.
template <class T, int WIDTH, class Beside>
TXL_DEVICE void load_queries(const Problem& p, int64_t b, int64_t h, const OperandRows& rows,
                             uint32_t (&position)[WIDTH / 4], uint32_t (&content)[WIDTH / 4], const Beside& beside) {
  uint32_t q[WIDTH / 4], u[WIDTH / 8], w[WIDTH / 8];
  const OperandWords<T> queries(p.q, b, h, rows);
  const T* const content_bias = static_cast<const T*>(p.u.data) + h * p.u.s0 + accumulator_column();
  const T* const position_bias = static_cast<const T*>(p.w.data) + h * p.w.s0 + accumulator_column();
  for_each_word<WIDTH>(rows, p.D, [&](auto number, int half, bool exists) {
    constexpr int m = decltype(number)::value;
    q[2 * m + half] = queries.template load<m>(half, exists);
    beside(number, half, exists);
    if (half) return;
    const bool is_column = 8 * m < static_cast<int>(p.D);
    u[m] = load_word<16 * m>(content_bias, is_column), w[m] = load_word<16 * m>(position_bias, is_column);
  });
  const float scale[2] = {rows.exists[0] ? scale_log2(p) : 0.f, rows.exists[1] ? scale_log2(p) : 0.f};
  add_bias<T, WIDTH>(scale, q, w, position), add_bias<T, WIDTH>(scale, q, u, content);
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
// The same of 64 queries and of their position queries, which have a width and a scale of their own.
template <class T, int WIDTH, class Beside>
TXL_DEVICE void load_queries_and_positions(const Problem& p, int64_t b, int64_t h, const OperandRows& rows,
                                           uint32_t (&position)[NARROW / 4], uint32_t (&content)[WIDTH / 4],
                                           const Beside& beside) {
  uint32_t q[WIDTH / 4], q_pos[NARROW / 4];
  const OperandWords<T> queries(p.q, b, h, rows), positions(p.q_pos, b, h, rows);
  for_each_word<WIDTH>(rows, p.D, [&](auto number, int half, bool exists) {
    constexpr int m = decltype(number)::value;
    q[2 * m + half] = queries.template load<m>(half, exists);
    beside(number, half, exists);
  });
  for_each_word<NARROW>(rows, p.Dr, [&](auto number, int half, bool exists) {
    constexpr int m = decltype(number)::value;
    q_pos[2 * m + half] = positions.template load<m>(half, exists);
  });
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
  // Words 2 m + half are chunk m % 8, of 16 bytes, of a row of 64 columns; the swizzle is an exclusive or.
  const uint32_t first = tile + swizzled_offset(operand_row(0), accumulator_column());
  unroll<WIDTH / 4>([&](auto number) {
    constexpr int n = decltype(number)::value, m = n / 2;
    store_shared<m / 8 * SUBTILE_BYTES + n % 2 * 8 * ROW_BYTES>(first ^ (m % 8 * 16), a[n]);
  });
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
