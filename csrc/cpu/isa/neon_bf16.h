// The bf16 microkernel for FEAT_BF16. BFMMLA adds [2][4] . transposed([2][4]) to [2][2] float32. Sums are rounded to
// odd, denormals are flushed to zero.
#pragma once
#include "../generic/vector.h"

namespace txl::TXL_ISA {
namespace {

constexpr int MR = 8;     // rows of a register tile
constexpr int NR = 8;     // columns: 16 of 32 registers accumulate, 8 hold b
constexpr int DEPTH = 8;  // the inner dimension is a multiple of it: a register of a row

struct TileConfig {};  // only AMX has one

// The first halves of two registers, side by side, and the second halves.
TXL_INLINE vf first_halves(vf x, vf y) {
  vf both;
  asm("zip1 %0.2d, %1.2d, %2.2d" : "=w"(both) : "w"(x), "w"(y));
  return both;
}
TXL_INLINE vf second_halves(vf x, vf y) {
  vf both;
  asm("zip2 %0.2d, %1.2d, %2.2d" : "=w"(both) : "w"(x), "w"(y));
  return both;
}
TXL_INLINE vf load_pairs(const bf16* p) { return (vf) * reinterpret_cast<const vu_unaligned*>(p); }
TXL_INLINE void bfmmla(vf& c, vf a, vf b) { asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(c) : "w"(a), "w"(b)); }

// c[MR][NR] (+)= a[MR][n] . b[n][NR], n a multiple of DEPTH; b is packed as [n / 2][ldb][2].
template <bool ACCUMULATE>
TXL_INLINE void microkernel(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  vf acc[MR / 2][NR / 2];  // each of 2 rows and 2 columns
  TXL_UNROLL(4)
  for (int i = 0; i < MR / 2; ++i) TXL_UNROLL(2)
  for (int j = 0; j < NR / 2; j += 2) {
    const float* at = c + 2 * i * ldc + 2 * j;
    acc[i][j] = ACCUMULATE ? first_halves(load(at), load(at + ldc)) : vf{};
    acc[i][j + 1] = ACCUMULATE ? second_halves(load(at), load(at + ldc)) : vf{};
  }
  for (int64_t k = 0; k < n; k += DEPTH) {
    vf right[2][NR / 2];  // each of 2 columns and 4 rows, from interleaved pairs of rows
    TXL_UNROLL(2)
    for (int half = 0; half < 2; ++half) TXL_UNROLL(2)
    for (int j = 0; j < NR / 2; j += 2) {
      const bf16* at = b + (k + 4 * half) * ldb + 4 * j;
      const vf upper = load_pairs(at), lower = load_pairs(at + 2 * ldb);
      right[half][j] = interleave_low(upper, lower);
      right[half][j + 1] = interleave_high(upper, lower);
    }
    TXL_UNROLL(4)
    for (int i = 0; i < MR / 2; ++i) {
      const vf upper = load_pairs(a + 2 * i * lda + k), lower = load_pairs(a + (2 * i + 1) * lda + k);
      const vf left[2] = {first_halves(upper, lower), second_halves(upper, lower)};
      TXL_UNROLL(2)
      for (int half = 0; half < 2; ++half) TXL_UNROLL(4)
      for (int j = 0; j < NR / 2; ++j) bfmmla(acc[i][j], left[half], right[half][j]);
    }
  }
  TXL_UNROLL(4)
  for (int i = 0; i < MR / 2; ++i) TXL_UNROLL(2)
  for (int j = 0; j < NR / 2; j += 2) {
    float* at = c + 2 * i * ldc + 2 * j;
    store(at, first_halves(acc[i][j], acc[i][j + 1]));
    store(at + ldc, second_halves(acc[i][j], acc[i][j + 1]));
  }
}

constexpr int PEAK_LOOP_SUMS = 24;
// Products of registers, without loads or stores.
static void peak_loop(int64_t iterations) {
  uint32_t state = 1;
  const vf x[2] = {(vf)random_operand(state), (vf)random_operand(state)};
  const vf y[2] = {(vf)random_operand(state), (vf)random_operand(state)};
  vf acc[PEAK_LOOP_SUMS];
  TXL_UNROLL(24)
  for (int z = 0; z < PEAK_LOOP_SUMS; ++z) acc[z] = vf{};
  for (int64_t n = 0; n < iterations; ++n) {
    TXL_UNROLL(24)
    for (int z = 0; z < PEAK_LOOP_SUMS; ++z) {
      bfmmla(acc[z], x[z / 2 % 2], y[z % 2]);
      asm volatile("" : "+w"(acc[z]));  // keeps the product
    }
  }
}
static double peak_loop_operations(int64_t iterations) {
  return 2.0 * 16 * PEAK_LOOP_SUMS * static_cast<double>(iterations);
}

}  // namespace
}  // namespace txl::TXL_ISA
