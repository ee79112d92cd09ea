// The bf16 microkernel for AVX512_BF16. VDPBF16PS adds two products to each of 16 float32 sums. Products are exact,
// sums are rounded to nearest, denormals are flushed to zero.
#pragma once
#include "../generic/vector.h"

namespace txl::TXL_ISA {
namespace {

constexpr int MR = 8;          // rows of a register tile
constexpr int NR = 2 * LANES;  // columns: two vectors, so 16 of 32 registers accumulate
constexpr int DEPTH = 2;       // the inner dimension is a multiple of it

struct TileConfig {};  // only AMX has one

// c[MR][NR] (+)= a[MR][n] . b[n][NR], n a multiple of DEPTH; b is packed as [n / 2][ldb][2].
template <bool ACCUMULATE>
TXL_INLINE void microkernel(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  vf acc[MR][2];
  TXL_UNROLL(8)
  for (int i = 0; i < MR; ++i) {
    acc[i][0] = ACCUMULATE ? load(c + i * ldc) : vf{};
    acc[i][1] = ACCUMULATE ? load(c + i * ldc + LANES) : vf{};
  }
  for (int64_t k = 0; k < n; k += 2) {
    const __m512bh b0 = (__m512bh) * reinterpret_cast<const vu_unaligned*>(b + k * ldb);
    const __m512bh b1 = (__m512bh) * reinterpret_cast<const vu_unaligned*>(b + k * ldb + NR);
    TXL_UNROLL(8)
    for (int i = 0; i < MR; ++i) {
      int32_t word;
      memcpy(&word, a + i * lda + k, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(word);
      acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
      acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
    }
  }
  TXL_UNROLL(8)
  for (int i = 0; i < MR; ++i) {
    store(c + i * ldc, acc[i][0]);
    store(c + i * ldc + LANES, acc[i][1]);
  }
}

// Products of registers, without loads or stores.
static void peak_loop(int64_t iterations) {
  uint32_t state = 1;
  __m512bh x[MR], y[2];
  TXL_UNROLL(8)
  for (int i = 0; i < MR; ++i) x[i] = (__m512bh)random_operand(state);
  TXL_UNROLL(2)
  for (int i = 0; i < 2; ++i) y[i] = (__m512bh)random_operand(state);
  vf acc[2 * MR];
  TXL_UNROLL(16)
  for (int z = 0; z < 2 * MR; ++z) acc[z] = vf{};
  for (int64_t n = 0; n < iterations; ++n) {
    TXL_UNROLL(16)
    for (int z = 0; z < 2 * MR; ++z) {
      acc[z] = _mm512_dpbf16_ps(acc[z], x[z / 2], y[z % 2]);
      asm volatile("" : "+v"(acc[z]));  // keeps the product
    }
  }
}
static double peak_loop_operations(int64_t iterations) {
  return 2.0 * 2 * MR * 2 * LANES * static_cast<double>(iterations);
}

}  // namespace
}  // namespace txl::TXL_ISA
