// Keys, values and r, converted to float and laid out for `micro`. Two layouts of the same rows:
//   panels  [rows / NR][D][NR]   for a product over D    (times_panels)
//   rows    [rows][Dp]           for a product over rows (add_times_rows), Dp = D rounded up to NR, zeros behind D

// r is laid out in reverse, by the coordinate rho = L - 1 - i + j + RHO_FRONT. So for one query consecutive keys are
// consecutive rho: the relative shift is an offset. Row rho holds distance d = S - 1 + RHO_FRONT - rho, zeros where r
// has no such row. RHO_FRONT keeps the rows that pad the last query block at rho >= 0.
constexpr int64_t BLOCK_L = 48;   // queries of a block: a multiple of MR
constexpr int64_t BLOCK_S = 192;  // keys of a tile: a multiple of MR and of NR for 4, 8 and 16 lanes
constexpr int64_t RHO_FRONT = BLOCK_L;

struct Sizes {
  int64_t S, Dp, keys, rhos;  // keys: S rounded up to tiles. rhos: rows of the reversed table

  explicit Sizes(const Problem& p)
      : S(p.M + p.L),
        Dp(round_up(p.D, NR)),
        keys(round_up(S, BLOCK_S)),
        rhos(round_up((p.causal ? S + BLOCK_L : p.L + keys) + RHO_FRONT + BLOCK_S + 2 * NR + MR, NR)) {}
};

template <class T>
TXL_INLINE const T* row_of(const View& x, int64_t i0, int64_t i1, int64_t i2) {
  return static_cast<const T*>(x.data) + i0 * x.s0 + i1 * x.s1 + i2 * x.s2;
}

// Key row j of the memory or of the segment; null past the end.
template <class T>
TXL_INLINE const T* key_row(const Problem& p, const View& memory, const View& segment, int64_t b, int64_t h,
                            int64_t j) {
  if (j < p.M) return row_of<T>(memory, b, h, j);
  return j < p.M + p.L ? row_of<T>(segment, b, h, j - p.M) : nullptr;
}

TXL_INLINE int64_t distance_of(const Problem& p, int64_t rho) { return p.M + p.L - 1 + RHO_FRONT - rho; }

// Row rho of the reversed table; null where r has none.
template <class T>
TXL_INLINE const T* rho_row(const Problem& p, int64_t h, int64_t rho) {
  const int64_t row = p.zero_row + distance_of(p, rho);
  return row >= 0 && row < p.T ? row_of<T>(p.r, h, row, 0) : nullptr;
}

template <class T>
static void pack_panel(const T* const source[NR], int64_t D, float* panel) {
  for (int n = 0; n < NR; ++n) {
    const T* row = source[n];
    for (int64_t d = 0; d < D; ++d) panel[d * NR + n] = row ? to_float(row[d]) : 0.f;
  }
}

template <class T>
static void pack_row(const T* row, int64_t D, int64_t Dp, float* out) {
  int64_t d = 0;
  if (row)
    for (; d < D; ++d) out[d] = to_float(row[d]);
  for (; d < Dp; ++d) out[d] = 0.f;
}

// Packs rows [first, first + count) into either layout or both; row(j) gives the source row. first, count: of NR.
template <class T, class Row>
TXL_INLINE void pack(const Row& row, int64_t first, int64_t count, int64_t D, int64_t Dp, float* panels, float* rows) {
  for (int64_t j = first; j < first + count; j += NR) {
    const T* source[NR];
    for (int n = 0; n < NR; ++n) source[n] = row(j + n);
    if (panels) pack_panel<T>(source, D, panels + j * D);
    if (rows)
      for (int n = 0; n < NR; ++n) pack_row<T>(source[n], D, Dp, rows + (j + n) * Dp);
  }
}

// Where each layout starts; null: not wanted. Per (b, h): [keys][D or Dp]; per h: [rhos][D or Dp].
struct Packed {
  float *k_panels = nullptr, *k_rows = nullptr, *v_panels = nullptr, *v_rows = nullptr;
  float *r_panels = nullptr, *r_rows = nullptr;
};

template <class T>
static void pack_all(const Problem& p, const Sizes& z, const Packed& to) {
  const InUse in_use(p);
  const int64_t D = p.D, Dp = z.Dp, key_tiles = z.keys / BLOCK_S, rho_tiles = div_up(z.rhos, BLOCK_S);
  const int64_t key_items = p.B * p.H * key_tiles;
  auto at = [](float* base, int64_t offset) { return base ? base + offset : nullptr; };
  parallel_for(p.threads, key_items + p.H * rho_tiles, [&](int64_t item, int) {
    if (item < key_items) {
      const int64_t bh = item / key_tiles, b = bh / p.H, h = bh % p.H, first = item % key_tiles * BLOCK_S;
      auto key = [&](const View& memory, const View& segment, int64_t j) {
        return in_use.key(b, j) ? key_row<T>(p, memory, segment, b, h, j) : nullptr;
      };
      pack<T>([&](int64_t j) { return key(p.k_mem, p.k, j); }, first, BLOCK_S, D, Dp, at(to.k_panels, bh * z.keys * D),
              at(to.k_rows, bh * z.keys * Dp));
      pack<T>([&](int64_t j) { return key(p.v_mem, p.v, j); }, first, BLOCK_S, D, Dp, at(to.v_panels, bh * z.keys * D),
              at(to.v_rows, bh * z.keys * Dp));
    } else {
      const int64_t h = (item - key_items) / rho_tiles, first = (item - key_items) % rho_tiles * BLOCK_S;
      auto row = [&](int64_t rho) { return in_use.distance(distance_of(p, rho)) ? rho_row<T>(p, h, rho) : nullptr; };
      pack<T>(row, first, min_of(BLOCK_S, z.rhos - first), D, Dp, at(to.r_panels, h * z.rhos * D),
              at(to.r_rows, h * z.rhos * Dp));
    }
  });
}

// q + u and q + w of a block of queries, times scale: [BLOCK_L][Dp], zeros behind D and for queries that see nothing.
template <class T>
static void pack_queries(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t Dp, float* qu, float* qw) {
  const T *u = row_of<T>(p.u, h, 0, 0), *w = row_of<T>(p.w, h, 0, 0);
  for (int64_t i = 0; i < BLOCK_L; ++i) {
    const bool sees = i0 + i < p.L && visible(p, b, i0 + i).any();
    for (int64_t d = 0; d < Dp; ++d) {
      const bool real = sees && d < p.D;
      const float x = real ? to_float(row_of<T>(p.q, b, h, i0 + i)[d]) : 0.f;
      qu[i * Dp + d] = real ? (x + to_float(u[d])) * p.scale : 0.f;
      qw[i * Dp + d] = real ? (x + to_float(w[d])) * p.scale : 0.f;
    }
  }
}
