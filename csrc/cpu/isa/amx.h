// The unit for pairs of bfloat16 by AMX: eight registers of 16 rows of 64 bytes; TDPBF16PS multiplies [16][32] by
// [16 pairs][16] into [16][16] float32. Rows that start at multiples of 64 bytes load at full speed.
#pragma once
#include "../generic/vector.h"

namespace txl::TXL_ISA {
namespace {

constexpr int MR = 32;     // rows of a tile: two registers
constexpr int NR = 32;     // columns: two registers, so four accumulate
constexpr int DEPTH = 32;  // a product sums over a multiple of it

// Sets up the tile registers of this thread, and afterwards leaves them as others had them.
struct Unit {
  struct alignas(64) Shape {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } before;

  Unit() {
    Shape ours;
    ours.palette = 1;
    for (int z = 0; z < 8; ++z) ours.row_bytes[z] = 64, ours.rows[z] = 16;
    asm volatile("sttilecfg %0" : "=m"(before));
    asm volatile("ldtilecfg %0" ::"m"(ours));
  }
  ~Unit() {
    if (before.palette)
      asm volatile("ldtilecfg %0" ::"m"(before));
    else
      asm volatile("tilerelease");
  }
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
};

#define TXL_TILE_LOAD(n, from, bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #n::"r"(from), "r"(static_cast<int64_t>(bytes)) : "memory")
#define TXL_TILE_STORE(n, to, bytes) \
  asm volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(bytes)) : "memory")
#define TXL_TILE_ZERO(n) asm volatile("tilezero %tmm" #n)
#define TXL_TILE_TIMES(c, a, b) asm volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)  // c += a . b

// c[i][0..NR) (+)= sum over k < n of a[i * lda + k] * b[k][0..NR), for i < MR; b in pairs of rows of
// width ldb, n a multiple of DEPTH.
template <bool ACCUMULATE>
TXL_INLINE void micro(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  float* const lower = c + 16 * ldc;
  if (ACCUMULATE) {
    TXL_TILE_LOAD(0, c, 4 * ldc);
    TXL_TILE_LOAD(1, c + 16, 4 * ldc);
    TXL_TILE_LOAD(2, lower, 4 * ldc);
    TXL_TILE_LOAD(3, lower + 16, 4 * ldc);
  } else {
    TXL_TILE_ZERO(0);
    TXL_TILE_ZERO(1);
    TXL_TILE_ZERO(2);
    TXL_TILE_ZERO(3);
  }
  for (int64_t k = 0; k < n; k += DEPTH) {
    TXL_TILE_LOAD(4, a + k, 2 * lda);
    TXL_TILE_LOAD(6, b + k * ldb, 4 * ldb);
    TXL_TILE_LOAD(5, a + 16 * lda + k, 2 * lda);
    TXL_TILE_LOAD(7, b + k * ldb + 32, 4 * ldb);
    TXL_TILE_TIMES(0, 4, 6);
    TXL_TILE_TIMES(1, 4, 7);
    TXL_TILE_TIMES(2, 5, 6);
    TXL_TILE_TIMES(3, 5, 7);
  }
  TXL_TILE_STORE(0, c, 4 * ldc);
  TXL_TILE_STORE(1, c + 16, 4 * ldc);
  TXL_TILE_STORE(2, lower, 4 * ldc);
  TXL_TILE_STORE(3, lower + 16, 4 * ldc);
}

// Keeps the unit busy: products of registers.
static void busy(int64_t iterations) {
  TXL_TILE_ZERO(4);
  TXL_TILE_ZERO(5);
  TXL_TILE_ZERO(6);
  TXL_TILE_ZERO(7);
  for (int64_t n = 0; n < iterations; ++n) {
    TXL_TILE_TIMES(0, 4, 6);
    TXL_TILE_TIMES(1, 4, 7);
    TXL_TILE_TIMES(2, 5, 6);
    TXL_TILE_TIMES(3, 5, 7);
  }
}
static double operations_of(int64_t iterations) { return 2.0 * MR * NR * DEPTH * static_cast<double>(iterations); }

}  // namespace
}  // namespace txl::TXL_ISA
