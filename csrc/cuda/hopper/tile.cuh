// Where things lie in shared memory.
#pragma once
#include <type_traits>
#include <utility>

#include "products.cuh"

namespace txl_cuda {

constexpr int WARPGROUP_WARPS = 4;
constexpr int MAX_SHARED = 227 * 1024;  // bytes that a block can have
constexpr int RING = 16 * 128 * 4;      // bytes: a warp's two blocks of 16 x 64 position scores

// each(Number<0>()), .. each(Number<N - 1>()): a loop whose counter is a constant.
template <int N>
struct Number {
  static constexpr int value = N;
};
template <class Each, int... NS>
TXL_DEVICE void unroll(const Each& each, std::integer_sequence<int, NS...>) {
  (each(Number<NS>()), ...);
}
template <int N, class Each>
TXL_DEVICE void unroll(const Each& each) {
  unroll(each, std::make_integer_sequence<int, N>());
}

// Byte of column x (even) of a row of a tile that begins at a multiple of 1024 bytes.
TXL_DEVICE uint32_t swizzled_offset(int row, int x) {
  const uint32_t at = static_cast<uint32_t>(row * ROW_BYTES + x % SIDE * 2);
  return static_cast<uint32_t>(x / SIDE * SUBTILE_BYTES) + (at ^ (at >> 7 & 7) << 4);  // plant: swizzle
}

// This thread's first row and column of a product; warp: its number in the warpgroup.
TXL_DEVICE int accumulator_row(int warp) { return warp * 16 + thread() % WARP / 4; }
TXL_DEVICE int accumulator_column() { return thread() % 4 * 2; }

// The threads of a warpgroup meet; group: up to 2.
TXL_DEVICE void sync_warpgroup(int group) {
  if (group == 0) return named_barrier_sync<1, WARPGROUP>();
  if (group == 1) return named_barrier_sync<2, WARPGROUP>();
  named_barrier_sync<3, WARPGROUP>();
}

}  // namespace txl_cuda
