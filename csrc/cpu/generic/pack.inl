// Rows of keys, values and r, laid out for the products (float/layout.inl, pairs/layout.inl): Cells,
// the rows Dp = D rounded up to NR wide, with zeros behind D.

constexpr int64_t BLOCK_S = 192;  // keys of a tile: a multiple of MR, of DEPTH and of NR

// Cells of a row in panels.
TXL_INLINE int64_t deep(int64_t D) { return round_up(D, DEPTH); }

#ifdef TXL_UNIT
#include "pairs/layout.inl"
#else
#include "float/layout.inl"
#endif

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

// Packs rows [first, first + count), multiples of NR, into either layout or both, from where
// `panels` and `rows` point; row(j) gives the source row, null for zeros.
template <class T, class Row>
TXL_INLINE void pack(const Row& row, int64_t first, int64_t count, int64_t D, int64_t Dp, Cell* panels, Cell* rows) {
  for (int64_t j = 0; j < count; j += NR) {
    const T* source[NR];
    for (int n = 0; n < NR; ++n) source[n] = row(first + j + n);
    if (panels) pack_panel<T>(source, D, panels + j * deep(D));
    if (rows) pack_rows<T>(source, D, Dp, rows + j * Dp);
  }
}

// The keys or values [first, first + count) of (b, h), zeros where nobody sees them.
template <class T>
static void pack_keys(const Problem& p, const InUse& in_use, const View& memory, const View& segment, int64_t b,
                      int64_t h, int64_t first, int64_t count, int64_t Dp, Cell* panels, Cell* rows) {
  auto row = [&](int64_t j) { return in_use.key(b, j) ? key_row<T>(p, memory, segment, b, h, j) : nullptr; };
  pack<T>(row, first, count, p.D, Dp, panels, rows);
}

// A float row times a factor, rounded to T.
template <class T>
TXL_INLINE void write_row(T* out, const float* x, float factor, int64_t D) {
  int64_t d = 0;
  for (; d + LANES <= D; d += LANES) store(out + d, load(x + d) * factor);
  for (; d < D; ++d) put(out + d, x[d] * factor);
}

template <class T>
TXL_INLINE void clear_row(T* out, int64_t D) {
  memset(static_cast<void*>(out), 0, sizeof(T) * D);
}

// (q + u) and (q + w) of queries [i0, i0 + count), times scale: [count][Dp], zeros behind D and for
// queries that see nothing; sees(i) of the query's place in the block.
template <class T, class Sees>
static void pack_queries(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t count, const Sees& sees,
                         int64_t Dp, Cell* qu, Cell* qw) {
  const T *u = row_of<T>(p.u, h, 0, 0), *w = row_of<T>(p.w, h, 0, 0);
  for (int64_t i = 0; i < count; ++i, qu += Dp, qw += Dp) {
    int64_t d = 0;
    if (sees(i)) {
      const T* q = row_of<T>(p.q, b, h, i0 + i);
      for (; d + LANES <= p.D; d += LANES) {
        const vf x = load(q + d);
        store(qu + d, (x + load(u + d)) * p.scale);
        store(qw + d, (x + load(w + d)) * p.scale);
      }
      for (; d < p.D; ++d) {
        put(qu + d, (to_float(q[d]) + to_float(u[d])) * p.scale);
        put(qw + d, (to_float(q[d]) + to_float(w[d])) * p.scale);
      }
    }
    for (; d < Dp; ++d) qu[d] = qw[d] = Cell{};
  }
}
