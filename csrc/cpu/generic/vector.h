// Vectors of TXL_LANES floats, conversions from and to element types, exp, tanh and log.
#pragma once
#include "instruction_set.h"

namespace txl::TXL_ISA {
namespace {

constexpr int LANES = TXL_LANES;

typedef float vf __attribute__((vector_size(4 * TXL_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * TXL_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * TXL_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * TXL_LANES)));
typedef vf vf_unaligned __attribute__((aligned(4), may_alias));  // loads and stores at any element
typedef vh vh_unaligned __attribute__((aligned(2), may_alias));
typedef vu vu_unaligned __attribute__((aligned(2), may_alias));  // pairs of bf16 begin at any element

struct bf16 {
  uint16_t bits;
};

TXL_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
TXL_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
TXL_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return min_of(max_of(x, low), high); }
TXL_INLINE int64_t round_up(int64_t x, int64_t m) { return (x + m - 1) / m * m; }
TXL_INLINE int64_t div_up(int64_t x, int64_t m) { return (x + m - 1) / m; }

constexpr float INF = __builtin_inff();

// Conversions between 16 and 32 bits. GCC's own for AVX-512 work on halves of registers.
#ifdef TXL_AVX512
TXL_INLINE vu widen(vh x) { return (vu)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)x); }
TXL_INLINE vh narrow(vu x) { return (vh)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)x); }
#else
TXL_INLINE vu widen(vh x) { return __builtin_convertvector(x, vu); }
TXL_INLINE vh narrow(vu x) { return __builtin_convertvector(x, vh); }
#endif

TXL_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
TXL_INLINE vf load(const bf16* p) { return (vf)(widen(*reinterpret_cast<const vh_unaligned*>(p)) << 16); }
TXL_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
TXL_INLINE void store(bf16* p, vf x) {  // rounds to nearest even; NaN stays NaN
#ifdef TXL_AVX512_BF16
  *reinterpret_cast<vh_unaligned*>(p) = (vh)_mm512_cvtneps_pbh(x);  // flushes values below 2^-126 to 0
#elif defined(TXL_ARM_BF16)
  vh rounded;
  asm("bfcvtn %0.4h, %1.4s" : "=w"(rounded) : "w"(x));
  *reinterpret_cast<vh_unaligned*>(p) = rounded;
#else
  const vu bits = (vu)x;
  const vu rounded = x == x ? (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 : vu{} + 0x7FC0;
  *reinterpret_cast<vh_unaligned*>(p) = narrow(rounded);
#endif
}
TXL_INLINE vf splat(float x) { return x - vf{}; }

// Operands of the loops that measure peak rates, pseudo-random by a xorshift of state != 0. Each word is a float32, and
// two bf16, of either sign and of magnitude 0.5 to 2. Zeros would not do: AMX multiplies them faster than others.
TXL_INLINE vu random_operand(uint32_t& state) {
  vu words;
  for (int z = 0; z < LANES; ++z) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    words[z] = (state & 0x80FF80FF) | 0x3F003F00;
  }
  return words;
}

TXL_INLINE float to_float(float x) { return x; }
TXL_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

TXL_INLINE void put(float* p, float x) { *p = x; }
TXL_INLINE void put(bf16* p, float x) {  // rounds to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  p->bits = x != x ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// interleave_low(a, b) is a0 b0 a1 b1 .. of the lower halves of a and b, interleave_high that of the upper halves.
#if TXL_LANES == 4
#define TXL_LANE_INDEX 0, 1, 2, 3
#define TXL_LOW 0, 4, 1, 5
#define TXL_HIGH 2, 6, 3, 7
#elif TXL_LANES == 8
#define TXL_LANE_INDEX 0, 1, 2, 3, 4, 5, 6, 7
#define TXL_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define TXL_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif TXL_LANES == 16
#define TXL_LANE_INDEX 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define TXL_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define TXL_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif
#ifdef __clang__
TXL_INLINE vf interleave_low(vf a, vf b) { return __builtin_shufflevector(a, b, TXL_LOW); }
TXL_INLINE vf interleave_high(vf a, vf b) { return __builtin_shufflevector(a, b, TXL_HIGH); }
#else
TXL_INLINE vf interleave_low(vf a, vf b) { return __builtin_shuffle(a, b, vi{TXL_LOW}); }
TXL_INLINE vf interleave_high(vf a, vf b) { return __builtin_shuffle(a, b, vi{TXL_HIGH}); }
#endif
#undef TXL_LOW
#undef TXL_HIGH

// A mask with all bits set in the lanes z where low <= n + z < high.
TXL_INLINE vi lane_mask(int64_t n, int64_t low, int64_t high) {
  const vi at = vi{TXL_LANE_INDEX} + static_cast<int32_t>(n);
  return (at >= static_cast<int32_t>(low)) & (at < static_cast<int32_t>(high));
}

// Transposes a square of LANES x LANES floats in registers.
TXL_INLINE void transpose(vf x[LANES]) {
  TXL_UNROLL(4)
  for (int step = 1; step < LANES; step *= 2) {
    vf y[LANES];
    TXL_UNROLL(8)
    for (int i = 0; i < LANES / 2; ++i) {
      y[2 * i] = interleave_low(x[i], x[i + LANES / 2]);
      y[2 * i + 1] = interleave_high(x[i], x[i + LANES / 2]);
    }
    TXL_UNROLL(16)
    for (int i = 0; i < LANES; ++i) x[i] = y[i];
  }
}

// to[c][r] = from[r][c] for r, c < LANES.
TXL_INLINE void transpose(const float* from, int64_t from_ld, float* to, int64_t to_ld) {
  vf x[LANES];
  TXL_UNROLL(16)
  for (int z = 0; z < LANES; ++z) x[z] = load(from + z * from_ld);
  transpose(x);
  TXL_UNROLL(16)
  for (int z = 0; z < LANES; ++z) store(to + z * to_ld, x[z]);
}

TXL_INLINE vf max_of(vf a, vf b) { return a > b ? a : b; }
TXL_INLINE float reduce_max(vf x) {  // no lane is NaN
  for (int n = 1; n < LANES; n *= 2) x = max_of(interleave_low(x, x), interleave_high(x, x));
  return x[0];
}
TXL_INLINE float reduce_add(vf x) {
  for (int n = 1; n < LANES; n *= 2) x = interleave_low(x, x) + interleave_high(x, x);
  return x[0];
}
// Lane i of the result is the sum of the lanes of x[i].
TXL_INLINE vf reduce_add_rows(vf x[LANES]) {
  TXL_UNROLL(4)
  for (int n = LANES / 2; n >= 1; n /= 2) TXL_UNROLL(8)
  for (int i = 0; i < n; ++i) x[i] = interleave_low(x[i], x[i + n]) + interleave_high(x[i], x[i + n]);
  return x[0];
}

// Lane i of the result is the maximum of the lanes of x[i], none of which is NaN.
TXL_INLINE vf reduce_max_rows(vf x[LANES]) {
  TXL_UNROLL(4)
  for (int n = LANES / 2; n >= 1; n /= 2) TXL_UNROLL(8)
  for (int i = 0; i < n; ++i) x[i] = max_of(interleave_low(x[i], x[i + n]), interleave_high(x[i], x[i + n]));
  return x[0];
}

// (2^f - 1) / f for |f| <= 1/2, by a polynomial of degree 5. Its coefficients minimize the relative error of 2^f.
TXL_INLINE vf exp2m1_quotient(vf f) {
  vf y = splat(1.535336207e-4f);
  y = y * f + 1.339887456e-3f;
  y = y * f + 9.618437358e-3f;
  y = y * f + 5.550332471e-2f;
  y = y * f + 2.402264791e-1f;
  return y * f + 6.931472029e-1f;
}

// e^x for x <= 88, as 2^(n + f) with |f| <= 1/2. The relative error is at most (1 + |x|) / 2^24 (tested). The result is
// 0 below -87.7 and NaN for NaN.
constexpr float LOG2E = 1.44269504f;
TXL_INLINE vf exp_of(vf x) {
  const vf t = x * LOG2E;
#ifdef TXL_AVX512
  const vf n = (vf)_mm512_roundscale_ps((__m512)t, 0), f = t - n;
#else
  // Adding 1.5 * 2^23 + 127 rounds to an integer, whose biased exponent is then in the low bits; -127 gives 0.
  const vf magic = splat(12583039.f), low = splat(-127.f);
  const vf clamped = t < low ? low : t, shifted = clamped + magic;
  const vf f = clamped - (shifted - magic);
#endif
  const vf y = exp2m1_quotient(f) * f + 1.f;
#ifdef TXL_AVX512
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)n, (__m512)splat(-127.f), _CMP_NLE_UQ);  // no denormals
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)n);
#else
  return y * (vf)((vi)shifted << 23);
#endif
}
// e^x with a relative error of 9e-5, for results that are rounded to bfloat16 (2e-3): 2^(n + f), 0 <= f < 1, by a
// cubic.
TXL_INLINE vf exp_for_bf16(vf x) {
#ifdef TXL_AVX512_BF16
  const vf t = x * LOG2E, f = (vf)_mm512_reduce_ps((__m512)t, 1);  // t - floor(t)
  vf y = splat(7.706706866e-2f);
  y = y * f + 2.276449618e-1f;
  y = y * f + 6.951167932e-1f;
  y = y * f + 1.f;
  return (vf)_mm512_scalef_ps((__m512)y, (__m512)t);  // y * 2^floor(t)
#else
  return exp_of(x);
#endif
}

// tanh(x) as t / (t + 2) with t = e^|2x| - 1 = 2^n (2^f - 1) + 2^n - 1, without cancellation where x is small. NaN for
// NaN.
TXL_INLINE vf tanh_of(vf x) {
  const vf limit = splat(10.f), abs = (vf)((vi)x & 0x7FFFFFFF), y = (abs > limit ? limit : abs) * (2 * LOG2E);
  const vf magic = splat(12583039.f), shifted = y + magic, f = y - (shifted - magic);
  const vf power = (vf)((vi)shifted << 23);
  const vf t = power * (exp2m1_quotient(f) * f) + (power - 1.f), tanh = t / (t + 2.f);
  return (vf)((vi)tanh | ((vi)x & ~0x7FFFFFFF));
}
TXL_INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }
TXL_INLINE float log_of(float x) { return __builtin_logf(x); }

}  // namespace
}  // namespace txl::TXL_ISA
