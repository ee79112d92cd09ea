// The unit for pairs of bfloat16 by BFMMLA (FEAT_BF16): [2][4] times transposed([2][4]) into [2][2] float32. Sums round
// to odd, denormals are zero.
#pragma once
#include "../generic/vector.h"

namespace txl::TXL_ISA {
namespace {

constexpr int MR = 8;     // rows of a register tile
constexpr int NR = 8;     // columns: 16 of 32 registers accumulate, 8 hold b
constexpr int DEPTH = 8;  // a product sums over a multiple of it: a whole register of a row

struct Unit {};  // nothing to prepare

// The first and the second halves of two registers.
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
TXL_INLINE vf load_pairs(const bf16* p) { return (vf) * reinterpret_cast<const vu_any*>(p); }
TXL_INLINE void add_product(vf& c, vf a, vf b) { asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(c) : "w"(a), "w"(b)); }

// c[i][0..NR) (+)= sum over k < n of a[i * lda + k] * b[k][0..NR), for i < MR; b in pairs of rows of
// width ldb, n a multiple of DEPTH.
template <bool ACCUMULATE>
TXL_INLINE void micro(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  vf acc[MR / 2][NR / 2];  // of two rows and two columns
  TXL_UNROLL(4)
  for (int i = 0; i < MR / 2; ++i) TXL_UNROLL(2)
  for (int j = 0; j < NR / 2; j += 2) {
    const float* at = c + 2 * i * ldc + 2 * j;
    acc[i][j] = ACCUMULATE ? first_halves(load(at), load(at + ldc)) : vf{};
    acc[i][j + 1] = ACCUMULATE ? second_halves(load(at), load(at + ldc)) : vf{};
  }
  for (int64_t k = 0; k < n; k += DEPTH) {
    vf right[2][NR / 2];  // of two columns and four rows: pairs of them, interleaved
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
      for (int j = 0; j < NR / 2; ++j) add_product(acc[i][j], left[half], right[half][j]);
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

// Keeps the unit busy: products of registers.
constexpr int BUSY = 24;
static void busy(int64_t iterations) {
  const vf x = (vf)(vu{} + 0x3F803F80), y = (vf)(vu{} + 0x3A003A00);
  vf acc[BUSY];
  TXL_UNROLL(24)
  for (int z = 0; z < BUSY; ++z) acc[z] = vf{};
  for (int64_t n = 0; n < iterations; ++n) {
    TXL_UNROLL(24)
    for (int z = 0; z < BUSY; ++z) {
      add_product(acc[z], x, y);
      asm volatile("" : "+w"(acc[z]));  // used
    }
  }
}
static double operations_of(int64_t iterations) { return 2.0 * 16 * BUSY * static_cast<double>(iterations); }

}  // namespace
}  // namespace txl::TXL_ISA
