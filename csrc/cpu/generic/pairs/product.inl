// Products of pairs of bfloat16 summed in float32: the unit's tile (amx.inl, dot.inl, emulated.inl:
// MR, DEPTH, Unit, micro) and what is built from it.

typedef bf16 Cell;  // what is multiplied

constexpr int64_t BLOCK_L = 96;  // queries of a block in backward: a multiple of MR, of NR and of 4 (dropout)
static_assert(BLOCK_L % MR == 0 && BLOCK_L % NR == 0, "blocks are whole tiles");

// Weights are written so many at a time: whole rows of a tile, or what reads them waits for the halves.
constexpr int WEIGHTS = 2 * LANES;

TXL_INLINE vf weight_of(vf score) { return exp_for_bf16(score); }
TXL_INLINE void store_weights(bf16* p, const vf x[2]) {
#ifdef TXL_ROUNDS_BF16
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
  memcpy(p, &both, 64);
#else
  store(p, x[0]);
  store(p + LANES, x[1]);
#endif
}

// c[MR][panels * NR] = a[MR][Dk] . packed panels of [Dk / 2][NR][2].
static __attribute__((noinline)) void times_panels(const bf16* a, int64_t lda, const bf16* panels, int64_t Dk,
                                                   int64_t count, float* c, int64_t ldc) {
  for (int64_t p = 0; p < count; ++p) micro<false>(a, lda, panels + p * Dk * NR, NR, Dk, c + p * NR, ldc);
}

// c[MR][width] += a[MR][n] . paired rows b[n / 2][width][2], width a multiple of NR, n of DEPTH.
static __attribute__((noinline)) void add_times_rows(const bf16* a, int64_t lda, const bf16* b, int64_t n,
                                                     int64_t width, float* c) {
  for (int64_t x = 0; x < width; x += NR) micro<true>(a, lda, b + 2 * x, width, n, c + x, width);
}
