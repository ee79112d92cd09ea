// How rows are laid out for the products of pairs, in bfloat16. Dk: D rounded up to DEPTH.
//
//   panels  [rows / NR][Dk / 2][NR][2]   for a product over D
//   rows    [rows / 2][Dp][2]            for a product over rows

static_assert(sizeof(bf16) == 2 && DEPTH % 2 == 0, "a pair is a word of 32 bits");

TXL_INLINE vu load_words(const bf16* p) { return *reinterpret_cast<const vu_any*>(p); }
TXL_INLINE void store_words(bf16* p, vu x) { *reinterpret_cast<vu_any*>(p) = x; }

// The pairs (a[n], b[n]) of LANES columns.
TXL_INLINE vu paired(const bf16* a, const bf16* b) {
  return widen(*reinterpret_cast<const vh_any*>(a)) | (widen(*reinterpret_cast<const vh_any*>(b)) << 16);
}

// Pairs of columns of NR rows, transposed; a null row is zeros.
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
  for (; d < deep(D); d += 2)
    for (int n = 0; n < NR; ++n)
      for (int z = 0; z < 2; ++z) panel[d * NR + 2 * n + z] = source[n] && d + z < D ? source[n][d + z] : bf16{};
}

template <class T>
TXL_INLINE void pack_panel(const T* const source[NR], int64_t D, bf16* panel) {
  pack_panel(source, D, panel);
}

// A row as it is, zeros behind D.
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
      for (; d + LANES <= D; d += LANES) store_words(rows + 2 * d, paired(a + d, b + d));
    for (; d < D; ++d) {
      rows[2 * d] = a ? a[d] : bf16{};
      rows[2 * d + 1] = b ? b[d] : bf16{};
    }
    memset(rows + 2 * d, 0, 2 * sizeof(bf16) * (Dp - d));
  }
}

// Forward's weights, rounded.
TXL_INLINE bf16* weights_of(Arena& a, float*) { return a.take<bf16>(MR * BLOCK_S); }
