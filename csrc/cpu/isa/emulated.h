// The bf16 microkernels emulated in plain vector code: tests run them on processors without the instructions.
#pragma once
#include "../generic/vector.h"

namespace txl::TXL_ISA {
namespace {

constexpr int MR = TXL_TILE_ROWS;
constexpr int NR = 2 * LANES < 32 && TXL_TILE_DEPTH == 32 ? 32 : 2 * LANES;
constexpr int DEPTH = TXL_TILE_DEPTH;

struct TileConfig {};  // only AMX has one

int64_t multiply_count = 0;  // multiplications so far, in all threads: tests count those that a call skips

// c[MR][NR] (+)= a[MR][n] . b[n][NR], n a multiple of DEPTH; b is packed as [n / 2][ldb][2].
template <bool ACCUMULATE>
static void microkernel(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  __atomic_fetch_add(&multiply_count, MR * NR * n, __ATOMIC_RELAXED);
  for (int i = 0; i < MR; i += 4)
    for (int x = 0; x < NR; x += LANES) {
      vf acc[4];
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) acc[z] = ACCUMULATE ? load(c + (i + z) * ldc + x) : vf{};
      for (int64_t k = 0; k < n; k += 2) {
        const vu pair = *reinterpret_cast<const vu_unaligned*>(b + k * ldb + 2 * x);
        const vf low = (vf)(pair << 16), high = (vf)(pair & 0xFFFF0000u);
        TXL_UNROLL(4)
        for (int z = 0; z < 4; ++z) {
          acc[z] += to_float(a[(i + z) * lda + k]) * low;
          acc[z] += to_float(a[(i + z) * lda + k + 1]) * high;
        }
      }
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) store(c + (i + z) * ldc + x, acc[z]);
    }
}

// Products of operands in the L1 cache.
static void peak_loop(int64_t iterations) {
  alignas(64) bf16 a[MR * DEPTH], b[DEPTH * NR];
  alignas(64) float c[MR * NR] = {};
  uint32_t state = 1;
  for (int n = 0; n < MR * DEPTH; n += LANES) store(a + n, (vf)random_operand(state));
  for (int n = 0; n < DEPTH * NR; n += LANES) store(b + n, (vf)random_operand(state));
  for (int64_t n = 0; n < iterations; ++n) microkernel<true>(a, DEPTH, b, NR, DEPTH, c, NR);
}
static double peak_loop_operations(int64_t iterations) {
  return 2.0 * MR * NR * DEPTH * static_cast<double>(iterations);
}

}  // namespace
}  // namespace txl::TXL_ISA
