// Tiles in shared memory: sizes and swizzled addresses. Loops that are unrolled over constants.
#pragma once
#include <type_traits>
#include <utility>

#include "products.cuh"

namespace txl_cuda {

constexpr int WARPGROUP_WARPS = WARPGROUP / WARP;
constexpr int MAX_SHARED = 227 * 1024;  // bytes that a block can have

// body(Number<0>()), .. body(Number<N - 1>()): a loop whose counter is a constant.
template <int N>
struct Number {
  static constexpr int value = N;
};
template <class Body, int... NS>
TXL_DEVICE void unroll(const Body& body, std::integer_sequence<int, NS...>) {
  (body(Number<NS>()), ...);
}
template <int N, class Body>
TXL_DEVICE void unroll(const Body& body) {
  unroll(body, std::make_integer_sequence<int, N>());
}

// The byte of element (row, column), column even, in a tile of 64 rows: subtiles of 64 columns, each with the 128-byte
// swizzle, which adds the row modulo 8 to the number of a chunk of 16 bytes by exclusive or.
TXL_DEVICE uint32_t swizzled_offset(int row, int column) {
  const uint32_t straight = static_cast<uint32_t>(row * ROW_BYTES + column % SIDE * 2);
  return static_cast<uint32_t>(column / SIDE * SUBTILE_BYTES) +
         (straight ^ (straight >> 7 & 7) << 4);  // plant: swizzle
}

// The byte of element (row, column), column even, in a narrow tile: rows of 16 columns with the 32-byte swizzle, which
// adds bit 2 of the row to the number of a chunk of 16 bytes.
TXL_DEVICE uint32_t narrow_offset(int row, int column) {
  const int chunk = column / 8 ^ (row >> 2 & 1);  // plant: narrow-swizzle
  return static_cast<uint32_t>(row * NARROW_ROW_BYTES + chunk * 16 + column % 8 * 2);
}

// A barrier of the threads of consumer warpgroup 0, 1 or 2.
TXL_DEVICE void sync_warpgroup(int warpgroup) {
  if (warpgroup == 0) return named_barrier_sync<1, WARPGROUP>();
  if (warpgroup == 1) return named_barrier_sync<2, WARPGROUP>();
  named_barrier_sync<3, WARPGROUP>();
}

}  // namespace txl_cuda
