// The float32 microkernel, by vector FMA.
#pragma once
#include "../generic/vector.h"

namespace txl::TXL_ISA {
namespace {

#ifdef TXL_ISA_neon
constexpr int MR = 12;
typedef float vf_half __attribute__((vector_size(8), aligned(4), may_alias));  // unaligned
#else
constexpr int MR = LANES == 16 ? 12 : 6;
#endif
constexpr int NR = 2 * LANES;  // columns: two vectors, so 12 of 16 registers accumulate, or 24 of 32
constexpr int DEPTH = 1;       // the inner dimension is a multiple of it

struct TileConfig {};  // only AMX has one

// c[ROWS][VECTORS * LANES] (+)= a[ROWS][n] . b[n][VECTORS * LANES]; TRANSPOSED: a is stored as [n][ROWS].
template <bool ACCUMULATE, bool TRANSPOSED = false, int ROWS = MR, int VECTORS = 2>
TXL_INLINE void microkernel(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t n, float* c,
                            int64_t ldc) {
  constexpr int last = (VECTORS - 1) * LANES;  // the column of the last vector
  vf acc[ROWS][VECTORS];
  TXL_UNROLL(12)
  for (int i = 0; i < ROWS; ++i) {
    acc[i][0] = ACCUMULATE ? load(c + i * ldc) : vf{};
    acc[i][VECTORS - 1] = ACCUMULATE ? load(c + i * ldc + last) : vf{};
  }
  int64_t k = 0;
#ifdef TXL_ISA_neon  // FMLA multiplies by one lane: a load of a serves two steps, or four rows
  for (; !TRANSPOSED && k + 2 <= n; k += 2) {
    const float *row = a + k, *at = b + k * ldb, *next = at + ldb;
    const vf b00 = load(at), b01 = load(at + last), b10 = load(next), b11 = load(next + last);
    TXL_UNROLL(6)
    for (int i = 0; i < ROWS; i += 2, row += 2 * lda) {
      vf_half x = *reinterpret_cast<const vf_half*>(row), y = *reinterpret_cast<const vf_half*>(row + lda);
      asm volatile("" : "+w"(x));
      asm volatile("" : "+w"(y));  // keeps each load here: 24 sums and b leave four registers
      acc[i][0] += x[0] * b00;
      if (VECTORS == 2) acc[i][VECTORS - 1] += x[0] * b01;
      acc[i + 1][0] += y[0] * b00;
      if (VECTORS == 2) acc[i + 1][VECTORS - 1] += y[0] * b01;
      acc[i][0] += x[1] * b10;
      if (VECTORS == 2) acc[i][VECTORS - 1] += x[1] * b11;
      acc[i + 1][0] += y[1] * b10;
      if (VECTORS == 2) acc[i + 1][VECTORS - 1] += y[1] * b11;
    }
  }
  for (; TRANSPOSED && k < n; ++k) {
    const vf b0 = load(b + k * ldb), b1 = load(b + k * ldb + last);
    TXL_UNROLL(12)
    for (int i = 0; i < ROWS; ++i) {
      const vf x = load(a + k * lda + i / LANES * LANES);
      acc[i][0] += x[i % LANES] * b0;
      if (VECTORS == 2) acc[i][VECTORS - 1] += x[i % LANES] * b1;
    }
  }
  TXL_UNROLL(1)  // the last step
#else
  TXL_UNROLL(2)
#endif
  for (; k < n; ++k) {
    const vf b0 = load(b + k * ldb), b1 = load(b + k * ldb + last);
    TXL_UNROLL(12)
    for (int i = 0; i < ROWS; ++i) {
      const float x = TRANSPOSED ? a[i + k * lda] : a[i * lda + k];
      acc[i][0] += x * b0;
      if (VECTORS == 2) acc[i][VECTORS - 1] += x * b1;
    }
  }
  TXL_UNROLL(12)
  for (int i = 0; i < ROWS; ++i) {
    store(c + i * ldc, acc[i][0]);
    store(c + i * ldc + last, acc[i][VECTORS - 1]);
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
