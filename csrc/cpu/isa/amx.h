// The bf16 microkernel for AMX. A tile register has 16 rows of 64 bytes; TDPBF16PS multiplies [16][32] by [16
// pairs][16] and adds to [16][16] float32. Rows that start at multiples of 64 bytes load at full speed.
#pragma once
#include "../generic/vector.h"

namespace txl::TXL_ISA {
namespace {

constexpr int MR = 32;     // rows of a register tile: two tile registers
constexpr int NR = 32;     // columns: two tile registers, so four of the eight accumulate
constexpr int DEPTH = 32;  // the inner dimension is a multiple of it

// Configures this thread's tile registers, and restores the configuration found: oneDNN uses them, too.
struct TileConfig {
  struct alignas(64) Config {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } before;

  TileConfig() {
    Config ours;
    ours.palette = 1;
    for (int t = 0; t < 8; ++t) ours.row_bytes[t] = 64, ours.rows[t] = 16;
    asm volatile("sttilecfg %0" : "=m"(before));
    asm volatile("ldtilecfg %0" ::"m"(ours));
  }
  ~TileConfig() {
    if (before.palette)
      asm volatile("ldtilecfg %0" ::"m"(before));
    else
      asm volatile("tilerelease");
  }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

#define TXL_TILE_LOAD(n, from, bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #n::"r"(from), "r"(static_cast<int64_t>(bytes)) : "memory")
#define TXL_TILE_STORE(n, to, bytes) \
  asm volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(bytes)) : "memory")
#define TXL_TILE_ZERO(n) asm volatile("tilezero %tmm" #n)
#define TXL_TILE_DOT(c, a, b) asm volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)  // c += a . b

// c[MR][NR] (+)= a[MR][n] . b[n][NR], n a multiple of DEPTH; b is packed as [n / 2][ldb][2].
template <bool ACCUMULATE>
TXL_INLINE void microkernel(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
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
    TXL_TILE_DOT(0, 4, 6);
    TXL_TILE_DOT(1, 4, 7);
    TXL_TILE_DOT(2, 5, 6);
    TXL_TILE_DOT(3, 5, 7);
  }
  TXL_TILE_STORE(0, c, 4 * ldc);
  TXL_TILE_STORE(1, c + 16, 4 * ldc);
  TXL_TILE_STORE(2, lower, 4 * ldc);
  TXL_TILE_STORE(3, lower + 16, 4 * ldc);
}

// Products of registers, without loads or stores. A sum has two products, as the scores of a head of width 64: while
// other work shares the core, products of longer sums take longer.
static void peak_loop(int64_t iterations) {
  alignas(64) vu tiles[4][16];
  uint32_t state = 1;
  for (auto& tile : tiles)
    for (vu& row : tile) row = random_operand(state);
  TXL_TILE_LOAD(4, tiles[0], 64);
  TXL_TILE_LOAD(5, tiles[1], 64);
  TXL_TILE_LOAD(6, tiles[2], 64);
  TXL_TILE_LOAD(7, tiles[3], 64);
  for (int64_t n = 0; n < iterations; ++n) {
    TXL_TILE_ZERO(0);
    TXL_TILE_ZERO(1);
    TXL_TILE_ZERO(2);
    TXL_TILE_ZERO(3);
    for (int product = 0; product < 2; ++product) {
      TXL_TILE_DOT(0, 4, 6);
      TXL_TILE_DOT(1, 4, 7);
      TXL_TILE_DOT(2, 5, 6);
      TXL_TILE_DOT(3, 5, 7);
    }
  }
}
static double peak_loop_operations(int64_t iterations) {
  return 2.0 * MR * NR * 2 * DEPTH * static_cast<double>(iterations);
}

}  // namespace
}  // namespace txl::TXL_ISA
