// Stores of an accumulator's rows to global memory, 16 bytes a thread. In an accumulator a thread has two neighbouring
// columns, so a warp's 16 rows pass through shared memory, 64 columns at a time.
#pragma once
#include "fragments.cuh"

namespace txl_cuda {

// Of a row in shared memory, and of a warp's 16 rows.
constexpr int STAGED_ROW_BYTES = SIDE * 4, STAGED_BYTES = 16 * STAGED_ROW_BYTES;

// Writes 32 elements of an accumulator, 64 columns of the warp's 16 rows, to `buffer`, at a multiple of 256 bytes. Row
// m has its column c at c ^ 8 (m % 4): half a warp stores pairs of four rows, which then meet 32 different banks.
TXL_DEVICE void stage_rows(uint32_t buffer, const float* accumulator) {
  const int row = thread() % WARP / 4, pair = thread() % 4;
  const uint32_t address = buffer + static_cast<uint32_t>(row * STAGED_ROW_BYTES + row % 4 * 32 + pair * 8);
  sync_warp();  // what the buffer held has been read
  unroll<16>([&](auto number) {
    constexpr int n = 2 * decltype(number)::value;  // 4 k + 2 h
    store_shared_pair<n / 2 % 2 * 8 * STAGED_ROW_BYTES>(address ^ (n / 4 * 32), accumulator[n], accumulator[n + 1]);
  });
  sync_warp();  // plant: staged-rows-barrier
}

TXL_DEVICE Chunk pack_chunk(float, const float (&x)[4]) {
  return {{float_to_bits(x[0]), float_to_bits(x[1]), float_to_bits(x[2]), float_to_bits(x[3])}};
}
template <class T>
TXL_DEVICE Chunk pack_chunk(T, const float (&x)[8]) {
  return {{pack(T(), x[0], x[1]), pack(T(), x[2], x[3]), pack(T(), x[4], x[5]), pack(T(), x[6], x[7])}};
}

// Stores the first `columns`, a multiple of 8, of a warp's 16 rows of an accumulator as T, 16 bits or float. buffer:
// the warp's STAGED_BYTES of shared memory. to(m): where row m begins, a multiple of 16 bytes, or null if there is no
// such row.
template <class T, int N, class To>
TXL_DEVICE void store_rows(uint32_t buffer, const float (&accumulator)[N], int columns, const To& to) {
  constexpr int COUNT = 16 / sizeof(T);                     // columns of a thread
  constexpr int LANES = SIDE / COUNT, ROWS = WARP / LANES;  // of a row, and rows of a warp's store
  const int first_row = thread() % WARP / LANES, column = thread() % LANES * COUNT;
  TXL_UNROLL
  for (int begin = 0; begin < 2 * N; begin += SIDE) {
    stage_rows(buffer, accumulator + begin / 2);
    TXL_UNROLL
    for (int n = 0; n < 16; n += ROWS) {
      const int row = n + first_row;
      float x[COUNT];
      TXL_UNROLL
      for (int c = 0; c < COUNT; c += 4)
        load_shared_quad(buffer + static_cast<uint32_t>(row * STAGED_ROW_BYTES + ((column + c) * 4 ^ row % 4 * 32)),
                         x + c);
      T* const out = to(row);
      if (out && begin + column < columns) *reinterpret_cast<Chunk*>(out + begin + column) = pack_chunk(T(), x);
    }
  }
}

}  // namespace txl_cuda
