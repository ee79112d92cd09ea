// How rows are laid out for `micro`, in float:
//
//   panels  [rows / NR][D][NR]   for a product over D    (times_panels)
//   rows    [rows][Dp]           for a product over rows (add_times_rows)

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

// Forward's weights take the place of the scores.
TXL_INLINE float* weights_of(Arena&, float* scores) { return scores; }

template <class T>
TXL_INLINE void pack_rows(const T* const source[NR], int64_t D, int64_t Dp, float* rows) {
  for (int n = 0; n < NR; ++n) pack_row<T>(source[n], D, Dp, rows + n * Dp);
}
