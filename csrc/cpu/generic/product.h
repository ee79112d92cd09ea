// Matrix products of packed rows, and packing.
#pragma once
#include "instruction_set.h"
#include TXL_MICROKERNEL

namespace txl::TXL_ISA {
namespace {

// Keys of a tile: a multiple of MR, NR and DEPTH (which is 32 for AMX and its emulation).
constexpr int64_t BLOCK_S = LANES == 16 || DEPTH == 32 ? 288 : 192;

// The width of a row in panels.
TXL_INLINE int64_t padded_depth(int64_t D) { return round_up(D, DEPTH); }

#ifndef TXL_BF16_DOT
// Products in float32. The right factor is packed as
//
//   panels  [rows / NR][D][NR]   for a sum over D    (gemm_panels)
//   rows    [rows][Dp]           for a sum over rows (gemm_add_rows)

typedef float Packed;  // an element of packed rows

constexpr int64_t BLOCK_L = 48;  // queries of a block in backward: a multiple of MR and DROPOUT_ROWS

// The number of weights that are stored at a time.
constexpr int WEIGHTS_PER_STORE = LANES;

TXL_INLINE vf exp_weight(vf score) { return exp_of(score); }
TXL_INLINE void store_weights(float* p, const vf x[1]) { store(p, x[0]); }

// Products compute the rows that a strip has, and whole vectors of columns.
constexpr int64_t ROW_STEP = 1, COLUMN_STEP = LANES;

template <int ROWS>
struct TileRows {
  static constexpr int value = ROWS;
};

// Calls f with the fewest thirds of a register tile's rows that hold `rows`.
template <class F>
TXL_INLINE void with_tile_rows(int64_t rows, const F& f) {
  if (rows > 2 * MR / 3) return f(TileRows<MR>());
  if (rows > MR / 3) return f(TileRows<2 * MR / 3>());
  f(TileRows<MR / 3>());
}

// c[rows][high - low] = a[rows][D] . columns [low, high) of panels [D][NR].
static __attribute__((noinline)) void gemm_panels(int64_t rows, const float* a, int64_t lda, const float* panels,
                                                  int64_t D, int64_t low, int64_t high, float* c, int64_t ldc) {
  with_tile_rows(rows, [=](auto tile) {
    int64_t n = low;
    auto half = [&] {
      microkernel<false, false, tile.value, 1>(a, lda, panels + n / NR * NR * D + n % NR, NR, D, c + (n - low), ldc);
      n += LANES;
    };
    if (n % NR && n < high) half();
    for (; n + NR <= high; n += NR)
      microkernel<false, false, tile.value>(a, lda, panels + n * D, NR, D, c + (n - low), ldc);
    if (n < high) half();
  });
}

// c[rows][width] += a[rows][n] . b[n][width], width a multiple of NR.
static __attribute__((noinline)) void gemm_add_rows(int64_t rows, const float* a, int64_t lda, const float* b,
                                                    int64_t n, int64_t width, float* c) {
  with_tile_rows(rows, [=](auto tile) {
    for (int64_t x = 0; x < width; x += NR) microkernel<true, false, tile.value>(a, lda, b + x, width, n, c + x, width);
  });
}

// c[MR][width] += transposed(a[n][MR]) . b[n][width], width a multiple of NR.
static __attribute__((noinline)) void gemm_add_transposed_rows(const float* a, int64_t lda, const float* b, int64_t n,
                                                               int64_t width, float* c) {
  for (int64_t x = 0; x < width; x += NR) microkernel<true, true>(a, lda, b + x, width, n, c + x, width);
}

template <class T>
static void pack_panel(const T* const source[NR], int64_t D, float* panel) {
  int64_t d = 0;
  for (; d + LANES <= D; d += LANES) {
    TXL_UNROLL(2)
    for (int n = 0; n < NR; n += LANES) {
      vf x[LANES];
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) x[z] = source[n + z] ? load(source[n + z] + d) : vf{};
      transpose(x);
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) store(panel + (d + z) * NR + n, x[z]);
    }
  }
  for (; d < D; ++d)
    for (int n = 0; n < NR; ++n) panel[d * NR + n] = source[n] ? to_float(source[n][d]) : 0.f;
}

template <class T>
static void pack_row(const T* row, int64_t D, int64_t Dp, float* out) {
  int64_t d = 0;
  if (row) {
    for (; d + LANES <= D; d += LANES) store(out + d, load(row + d));
    for (; d < D; ++d) out[d] = to_float(row[d]);
  }
  for (; d < Dp; ++d) out[d] = 0.f;
}

template <class T>
TXL_INLINE void pack_rows(const T* const source[NR], int64_t D, int64_t Dp, float* rows) {
  for (int n = 0; n < NR; ++n) pack_row<T>(source[n], D, Dp, rows + n * Dp);
}

#else
// bf16 dot products. Dk: D rounded up to DEPTH. The right factor is packed as
//
//   panels  [rows / NR][Dk / 2][NR][2]   for a sum over D
//   rows    [rows / 2][Dp][2]            for a sum over rows

typedef bf16 Packed;  // an element of packed rows

constexpr int64_t BLOCK_L = 96;  // queries of a block in backward: a multiple of MR, NR and DROPOUT_ROWS
static_assert(BLOCK_L % MR == 0 && BLOCK_L % NR == 0, "blocks are whole tiles");

// The number of weights that are stored at a time: whole rows of a tile register, since a load that spans two stores
// waits for both.
constexpr int WEIGHTS_PER_STORE = 2 * LANES;

TXL_INLINE vf exp_weight(vf score) { return exp_for_bf16(score); }
TXL_INLINE void store_weights(bf16* p, const vf x[2]) {
#ifdef TXL_AVX512_BF16
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
  memcpy(p, &both, 64);
#elif defined(TXL_ARM_BF16)
  vf both;
  asm("bfcvtn %0.4h, %1.4s\n\tbfcvtn2 %0.8h, %2.4s" : "=&w"(both) : "w"(x[0]), "w"(x[1]));
  memcpy(p, &both, 16);
#else
  store(p, x[0]);
  store(p + LANES, x[1]);
#endif
}

constexpr int64_t ROW_STEP = MR, COLUMN_STEP = NR;  // products compute whole register tiles

// c[MR][high - low] = a[MR][Dk] . columns [low, high) of panels [Dk / 2][NR][2].
static __attribute__((noinline)) void gemm_panels(int64_t, const bf16* a, int64_t lda, const bf16* panels, int64_t Dk,
                                                  int64_t low, int64_t high, float* c, int64_t ldc) {
  for (int64_t n = low; n < high; n += NR) microkernel<false>(a, lda, panels + n * Dk, NR, Dk, c + (n - low), ldc);
}

// c[MR][width] += a[MR][n] . b[n / 2][width][2], width a multiple of NR, n of DEPTH.
static __attribute__((noinline)) void gemm_add_rows(int64_t, const bf16* a, int64_t lda, const bf16* b, int64_t n,
                                                    int64_t width, float* c) {
  for (int64_t x = 0; x < width; x += NR) microkernel<true>(a, lda, b + 2 * x, width, n, c + x, width);
}

static_assert(sizeof(bf16) == 2 && DEPTH % 2 == 0, "a pair is a word of 32 bits");

TXL_INLINE vu load_words(const bf16* p) { return *reinterpret_cast<const vu_unaligned*>(p); }
TXL_INLINE void store_words(bf16* p, vu x) { *reinterpret_cast<vu_unaligned*>(p) = x; }

// The pairs (a[n], b[n]) for n < LANES.
TXL_INLINE vu interleave_bf16(const bf16* a, const bf16* b) {
  return widen(*reinterpret_cast<const vh_unaligned*>(a)) | (widen(*reinterpret_cast<const vh_unaligned*>(b)) << 16);
}

// Packs NR rows into a panel, a transposition of pairs of columns; a null row is zeros.
static void pack_panel(const bf16* const source[NR], int64_t D, bf16* panel) {
  int64_t d = 0;
  for (; d + 2 * LANES <= D; d += 2 * LANES) {
    for (int n = 0; n < NR; n += LANES) {
      vf x[LANES];
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) x[z] = source[n + z] ? (vf)load_words(source[n + z] + d) : vf{};
      transpose(x);
      TXL_UNROLL(16)
      for (int z = 0; z < LANES; ++z) store_words(panel + (d + 2 * z) * NR + 2 * n, (vu)x[z]);
    }
  }
  for (; d < padded_depth(D); d += 2)
    for (int n = 0; n < NR; ++n)
      for (int z = 0; z < 2; ++z) panel[d * NR + 2 * n + z] = source[n] && d + z < D ? source[n][d + z] : bf16{};
}

template <class T>
TXL_INLINE void pack_panel(const T* const source[NR], int64_t D, bf16* panel) {
  pack_panel(source, D, panel);
}

// Copies a row, with zeros from D on.
template <class T>
static void pack_row(const T* row, int64_t D, int64_t Dp, bf16* out) {
  if (row) memcpy(out, row, sizeof(bf16) * D);
  memset(out + (row ? D : 0), 0, sizeof(bf16) * (Dp - (row ? D : 0)));
}

template <class T>
static void pack_rows(const T* const source[NR], int64_t D, int64_t Dp, bf16* rows) {
  for (int n = 0; n < NR; n += 2, rows += 2 * Dp) {
    const T *a = source[n], *b = source[n + 1];
    int64_t d = 0;
    if (a && b)
      for (; d + LANES <= D; d += LANES) store_words(rows + 2 * d, interleave_bf16(a + d, b + d));
    for (; d < D; ++d) {
      rows[2 * d] = a ? a[d] : bf16{};
      rows[2 * d + 1] = b ? b[d] : bf16{};
    }
    memset(rows + 2 * d, 0, 2 * sizeof(bf16) * (Dp - d));
  }
}

#endif

constexpr int64_t KEY_STEP =
    WEIGHTS_PER_STORE > DEPTH ? WEIGHTS_PER_STORE : DEPTH;  // strips are computed for a multiple of it of keys

}  // namespace
}  // namespace txl::TXL_ISA
