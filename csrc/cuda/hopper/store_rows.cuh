// Stores of an accumulator's rows to global memory, 16 bytes a thread. In an accumulator a thread has two neighbouring
// columns, so a warp's 16 rows pass through shared memory, 64 columns at a time, in the type of the result.
#pragma once
#include "fragments.cuh"

namespace txl_cuda {

constexpr int STAGED_BYTES = 16 * SIDE * 4;  // of a warp's rows in shared memory, at most

// The byte of element (row, column) of a warp's staged rows. Half a warp stores pairs of floats of four rows, a warp
// stores pairs of 16 bits of eight: either meets 32 different banks, as do the loads of eight neighbouring chunks of 16
// bytes.
template <class T>
TXL_DEVICE uint32_t staged_offset(int row, int column) {
  constexpr int ROW = SIDE * static_cast<int>(sizeof(T));
  const int chunk = sizeof(T) == 4 ? row % 4 * 2 : row % 8;  // added by exclusive or
  return static_cast<uint32_t>(row * ROW + (column * static_cast<int>(sizeof(T)) ^ chunk * 16));
}

// Stores the first `columns`, a multiple of 8, of a warp's 16 rows of an accumulator as T, 16 bits or float. buffer:
// the warp's STAGED_BYTES of shared memory. to(m): where row m begins, a multiple of 16 bytes, or null if there is no
// such row.
template <class T, int N, class To>
TXL_DEVICE void store_rows(uint32_t buffer, const float (&accumulator)[N], int columns, const To& to) {
  constexpr int COUNT = 16 / sizeof(T);                     // columns of a thread
  constexpr int LANES = SIDE / COUNT, ROWS = WARP / LANES;  // of a row, and rows of a warp's store
  const int lane = opaque(thread() % WARP);  // no address is computed before a persistent block's main loop
  const int column = lane % LANES * COUNT;
  TXL_UNROLL
  for (int begin = 0; begin < 2 * N; begin += SIDE) {
    sync_warp();  // what the buffer held has been read
    TXL_UNROLL
    for (int n = begin / 2; n < begin / 2 + 32; n += 2) {
      const uint32_t at = buffer + staged_offset<T>(lane / 4 + n / 2 % 2 * 8, n % 32 / 4 * 8 + accumulator_column());
      if constexpr (sizeof(T) == 4) {
        store_shared_pair(at, accumulator[n], accumulator[n + 1]);
      } else {
        store_shared(at, pack(T(), accumulator[n], accumulator[n + 1]));
      }
    }
    sync_warp();  // plant: staged-rows-barrier
    TXL_UNROLL
    for (int n = 0; n < 16; n += ROWS) {
      const int row = n + lane / LANES;
      const Chunk chunk = load_shared_chunk(buffer + staged_offset<T>(row, column));
      T* const out = to(row);
      if (out && begin + column < columns) *reinterpret_cast<Chunk*>(out + begin + column) = chunk;
    }
  }
}

}  // namespace txl_cuda
