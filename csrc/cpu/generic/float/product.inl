// Products in float32: the one register tile everything is built from.

typedef float Cell;  // what is multiplied

constexpr int MR = LANES == 16 ? 12 : 6;
constexpr int NR = 2 * LANES;    // columns: two vectors, so 12 of 16 registers accumulate
constexpr int DEPTH = 1;         // a product sums over a multiple of it
constexpr int64_t BLOCK_L = 48;  // queries of a block in backward: a multiple of MR and of 4 (dropout)

struct Unit {};  // nothing to prepare

// Weights are written so many at a time.
constexpr int WEIGHTS = LANES;

TXL_INLINE vf weight_of(vf score) { return exp_of(score); }
TXL_INLINE void store_weights(float* p, const vf x[1]) { store(p, x[0]); }

// c[i][0..NR) (+)= sum over k < n of a[i * a_row + k * a_step] * b[k * ldb + 0..NR), for i < MR.
template <bool ACCUMULATE>
TXL_INLINE void micro(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t ldb, int64_t n, float* c,
                      int64_t ldc) {
  vf acc[MR][2];
  TXL_UNROLL(12)
  for (int i = 0; i < MR; ++i) {
    acc[i][0] = ACCUMULATE ? load(c + i * ldc) : vf{};
    acc[i][1] = ACCUMULATE ? load(c + i * ldc + LANES) : vf{};
  }
  TXL_UNROLL(2)
  for (int64_t k = 0; k < n; ++k) {
    const vf b0 = load(b + k * ldb), b1 = load(b + k * ldb + LANES);
    TXL_UNROLL(12)
    for (int i = 0; i < MR; ++i) {
      const float x = a[i * a_row + k * a_step];
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

// c[MR][panels * NR] = a[MR][D] . packed panels of [D][NR].
static __attribute__((noinline)) void times_panels(const float* a, int64_t lda, const float* panels, int64_t D,
                                                   int64_t count, float* c, int64_t ldc) {
  for (int64_t p = 0; p < count; ++p) micro<false>(a, lda, 1, panels + p * D * NR, NR, D, c + p * NR, ldc);
}

// c[MR][width] += a[MR][n] . b[n][width], width a multiple of NR.
static __attribute__((noinline)) void add_times_rows(const float* a, int64_t lda, const float* b, int64_t n,
                                                     int64_t width, float* c) {
  for (int64_t x = 0; x < width; x += NR) micro<true>(a, lda, 1, b + x, width, n, c + x, width);
}

// c[MR][width] += transposed(a[n][MR]) . b[n][width], width a multiple of NR.
static __attribute__((noinline)) void add_transposed_times_rows(const float* a, int64_t lda, const float* b, int64_t n,
                                                                int64_t width, float* c) {
  for (int64_t x = 0; x < width; x += NR) micro<true>(a, 1, lda, b + x, width, n, c + x, width);
}
