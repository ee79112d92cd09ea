// Vectors of TXL_LANES floats, element types, exp and log.

constexpr int LANES = TXL_LANES;

typedef float vf __attribute__((vector_size(4 * TXL_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * TXL_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * TXL_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * TXL_LANES)));
typedef vf vf_any __attribute__((aligned(4), may_alias));  // at any address
typedef vh vh_any __attribute__((aligned(2), may_alias));

#define TXL_INLINE static inline __attribute__((always_inline))

struct bf16 {
  uint16_t bits;
};

TXL_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
TXL_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
TXL_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return min_of(max_of(x, low), high); }
TXL_INLINE int64_t round_up(int64_t x, int64_t m) { return (x + m - 1) / m * m; }
TXL_INLINE int64_t div_up(int64_t x, int64_t m) { return (x + m - 1) / m; }

constexpr float INF = __builtin_inff();

TXL_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
TXL_INLINE vf load(const bf16* p) {
  const vh half = *reinterpret_cast<const vh_any*>(p);
  return (vf)(__builtin_convertvector(half, vu) << 16);
}
TXL_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
TXL_INLINE vf splat(float x) { return x - vf{}; }

TXL_INLINE float to_float(float x) { return x; }
TXL_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

TXL_INLINE void put(float* p, float x) { *p = x; }
TXL_INLINE void put(bf16* p, float x) {  // round to nearest even; a NaN stays one
  uint32_t bits;
  memcpy(&bits, &x, 4);
  p->bits = x != x ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// All bits set in the lanes z with low <= n + z < high.
TXL_INLINE vi lanes_within(int64_t n, int64_t low, int64_t high) {
  vi at;
  for (int z = 0; z < LANES; ++z) at[z] = static_cast<int32_t>(n) + z;
  return (at >= static_cast<int32_t>(low)) & (at < static_cast<int32_t>(high));
}

TXL_INLINE float max_lane(vf x) {
  float m = x[0];
  for (int z = 1; z < LANES; ++z) m = x[z] > m || x[z] != x[z] ? x[z] : m;
  return m;
}
TXL_INLINE float sum_lanes(vf x) {
  float s = x[0];
  for (int z = 1; z < LANES; ++z) s += x[z];
  return s;
}
TXL_INLINE vf max_of(vf a, vf b) { return a > b ? a : b; }

// e^x for x <= 88, within 2 ulp; 0 below -87, NaN for NaN. Cephes' polynomial after x = n ln 2 + f, |f| <= ln 2 / 2.
TXL_INLINE vf exp_of(vf x) {
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const vf low = splat(-87.f);
  const vf clamped = x < low ? low : x;
  const vf shifted = clamped * 1.44269504f + magic;
  const vf n = shifted - magic;
  vf f = clamped - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * f * f + f + 1.f;
  const vf result = (vf)((vi)y + ((vi)shifted << 23));
  // The integer addition above could turn a NaN with payload into a number.
  return x < low ? vf{} : (x == x ? result : x);
}

TXL_INLINE float exp_of(float x) { return __builtin_expf(x); }
TXL_INLINE float log_of(float x) { return __builtin_logf(x); }
