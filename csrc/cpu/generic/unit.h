// The tile that a unit multiplies at once: its sizes, what must be prepared (Unit) and the product (micro).
// In float32 the vectors are the unit; pairs of bfloat16 have units of their own, summed in float32.
#pragma once
#include "vector.h"

namespace txl::TXL_ISA {
namespace {

#if !defined(TXL_PAIRS)
// In float32: the one register tile everything is built from.

#ifdef TXL_ISA_neon
constexpr int MR = 12;
typedef float vf_half __attribute__((vector_size(8), aligned(4), may_alias));  // at any address
#else
constexpr int MR = LANES == 16 ? 12 : 6;
#endif
constexpr int NR = 2 * LANES;  // columns: two vectors, so 12 of 16 registers accumulate, or 24 of 32
constexpr int DEPTH = 1;       // a product sums over a multiple of it

struct Unit {};  // nothing to prepare

// c[i][0..NR) (+)= sum over k < n of a[i][k] * b[k * ldb + 0..NR), for i < MR; a in rows of length lda, or
// TRANSPOSED: in columns.
template <bool ACCUMULATE, bool TRANSPOSED = false>
TXL_INLINE void micro(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  vf acc[MR][2];
  TXL_UNROLL(12)
  for (int i = 0; i < MR; ++i) {
    acc[i][0] = ACCUMULATE ? load(c + i * ldc) : vf{};
    acc[i][1] = ACCUMULATE ? load(c + i * ldc + LANES) : vf{};
  }
  int64_t k = 0;
#ifdef TXL_ISA_neon  // which multiplies by a lane: a load of a serves two steps, or four rows
  for (; !TRANSPOSED && k + 2 <= n; k += 2) {
    const float *row = a + k, *at = b + k * ldb, *next = at + ldb;
    const vf b00 = load(at), b01 = load(at + LANES), b10 = load(next), b11 = load(next + LANES);
    TXL_UNROLL(6)
    for (int i = 0; i < MR; i += 2, row += 2 * lda) {
      vf_half x = *reinterpret_cast<const vf_half*>(row), y = *reinterpret_cast<const vf_half*>(row + lda);
      asm volatile("" : "+w"(x));
      asm volatile("" : "+w"(y));  // one load each, and no earlier: 24 sums and b leave four registers
      acc[i][0] += x[0] * b00;
      acc[i][1] += x[0] * b01;
      acc[i + 1][0] += y[0] * b00;
      acc[i + 1][1] += y[0] * b01;
      acc[i][0] += x[1] * b10;
      acc[i][1] += x[1] * b11;
      acc[i + 1][0] += y[1] * b10;
      acc[i + 1][1] += y[1] * b11;
    }
  }
  for (; TRANSPOSED && k < n; ++k) {
    const vf b0 = load(b + k * ldb), b1 = load(b + k * ldb + LANES);
    TXL_UNROLL(12)
    for (int i = 0; i < MR; ++i) {
      const vf x = load(a + k * lda + i / LANES * LANES);
      acc[i][0] += x[i % LANES] * b0;
      acc[i][1] += x[i % LANES] * b1;
    }
  }
  TXL_UNROLL(1)  // what is left
#else
  TXL_UNROLL(2)
#endif
  for (; k < n; ++k) {
    const vf b0 = load(b + k * ldb), b1 = load(b + k * ldb + LANES);
    TXL_UNROLL(12)
    for (int i = 0; i < MR; ++i) {
      const float x = TRANSPOSED ? a[i + k * lda] : a[i * lda + k];
      acc[i][0] += x * b0;
      acc[i][1] += x * b1;
    }
  }
  TXL_UNROLL(12)
  for (int i = 0; i < MR; ++i) {
    store(c + i * ldc, acc[i][0]);
    store(c + i * ldc + LANES, acc[i][1]);
  }
}

#elif defined(TXL_ISA_amx)
// The unit's tile by AMX: eight registers of 16 rows of 64 bytes; TDPBF16PS multiplies [16][32] by
// [16 pairs][16] into [16][16] float32. Rows that start at multiples of 64 bytes load at full speed.

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

#elif defined(TXL_ISA_avx512_bf16)
// The unit's tile by VDPBF16PS (AVX512_BF16): 16 sums of two products each. Products are exact, sums
// rounded to nearest, denormals are zero.

constexpr int MR = 8;          // rows of a register tile
constexpr int NR = 2 * LANES;  // columns: two vectors, so 16 of 32 registers accumulate
constexpr int DEPTH = 2;       // a product sums over a multiple of it

struct Unit {};  // nothing to prepare

// c[i][0..NR) (+)= sum over k < n of a[i * lda + k] * b[k][0..NR), for i < MR; b in pairs of rows of
// width ldb, n a multiple of DEPTH.
template <bool ACCUMULATE>
TXL_INLINE void micro(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  vf acc[MR][2];
  TXL_UNROLL(8)
  for (int i = 0; i < MR; ++i) {
    acc[i][0] = ACCUMULATE ? load(c + i * ldc) : vf{};
    acc[i][1] = ACCUMULATE ? load(c + i * ldc + LANES) : vf{};
  }
  for (int64_t k = 0; k < n; k += 2) {
    const __m512bh b0 = (__m512bh) * reinterpret_cast<const vu_any*>(b + k * ldb);
    const __m512bh b1 = (__m512bh) * reinterpret_cast<const vu_any*>(b + k * ldb + NR);
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

// Keeps the unit busy: products of registers.
static void busy(int64_t iterations) {
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3F803F80), y = (__m512bh)_mm512_set1_epi32(0x3A003A00);
  vf acc[2 * MR];
  TXL_UNROLL(16)
  for (int z = 0; z < 2 * MR; ++z) acc[z] = vf{};
  for (int64_t n = 0; n < iterations; ++n) {
    TXL_UNROLL(16)
    for (int z = 0; z < 2 * MR; ++z) {
      acc[z] = _mm512_dpbf16_ps(acc[z], x, y);
      asm volatile("" : "+v"(acc[z]));  // used
    }
  }
}
static double operations_of(int64_t iterations) { return 2.0 * 2 * MR * 2 * LANES * static_cast<double>(iterations); }

#elif defined(TXL_ISA_neon_bf16)
// The unit's tile by BFMMLA (FEAT_BF16): [2][4] times transposed([2][4]) into [2][2] float32. Sums round to odd,
// denormals are zero.

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

#else
// The unit's tile in plain vector code, for any processor: what tests run where the unit is missing.

constexpr int MR = TXL_TILE_ROWS;
constexpr int NR = 2 * LANES < 32 && TXL_TILE_DEPTH == 32 ? 32 : 2 * LANES;
constexpr int DEPTH = TXL_TILE_DEPTH;

struct Unit {};  // nothing to prepare

// c[i][0..NR) (+)= sum over k < n of a[i * lda + k] * b[k][0..NR), for i < MR; b in pairs of rows of
// width ldb, n a multiple of DEPTH.
template <bool ACCUMULATE>
static void micro(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  for (int i = 0; i < MR; i += 4)
    for (int x = 0; x < NR; x += LANES) {
      vf acc[4];
      TXL_UNROLL(4)
      for (int z = 0; z < 4; ++z) acc[z] = ACCUMULATE ? load(c + (i + z) * ldc + x) : vf{};
      for (int64_t k = 0; k < n; k += 2) {
        const vu pair = *reinterpret_cast<const vu_any*>(b + k * ldb + 2 * x);
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

// Keeps the unit busy: products from the first level of the cache, there being no unit.
static void busy(int64_t iterations) {
  alignas(64) bf16 a[MR * DEPTH] = {}, b[DEPTH * NR] = {};
  alignas(64) float c[MR * NR] = {};
  for (int64_t n = 0; n < iterations; ++n) micro<true>(a, DEPTH, b, NR, DEPTH, c, NR);
}
static double operations_of(int64_t iterations) { return 2.0 * MR * NR * DEPTH * static_cast<double>(iterations); }

#endif

}  // namespace
}  // namespace txl::TXL_ISA
