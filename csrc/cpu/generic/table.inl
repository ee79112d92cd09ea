// The table r, in reverse. A key and a query meet at the coordinate
// rho = L - 1 - i + j + RHO_FRONT, and r is packed by rho: for one query consecutive keys are
// consecutive rho, so the relative shift is an offset.

constexpr int64_t RHO_FRONT = 48;  // keeps the rows that pad the last block of queries at rho >= 0

TXL_INLINE int64_t rho_of(const Problem& p, int64_t i, int64_t j) { return p.L - 1 - i + j + RHO_FRONT; }
TXL_INLINE int64_t distance_of(const Problem& p, int64_t rho) { return p.M + p.L - 1 + RHO_FRONT - rho; }

// The row of r for rho; null where r has none, or no query meets it.
template <class T>
TXL_INLINE const T* rho_row(const Problem& p, const InUse& in_use, int64_t h, int64_t rho) {
  const int64_t distance = distance_of(p, rho), row = p.zero_row + distance;
  return row >= 0 && row < p.T && in_use.distance(distance) ? row_of<T>(p.r, h, row, 0) : nullptr;
}

// The part [first, end) of the reversed table that is at hand, multiples of NR; both layouts, or
// panels alone. It moves upwards only: what is asked for is packed, what lies behind is dropped
// when the room runs out.
struct Table {
  int64_t capacity;
  float *panels, *rows;
  int64_t first = 0, end = 0;

  // row_floats: 0 for panels alone.
  Table(Arena& a, int64_t room, int64_t panel_floats, int64_t row_floats)
      : capacity(room), panels(a.take(room * panel_floats)), rows(row_floats ? a.take(room * row_floats) : nullptr) {}

  // Rows of room for windows of `count` rows: twice that, so that moving the window to the front is
  // rare.
  static int64_t room(int64_t count) { return 2 * round_up(count + 2 * NR, NR); }

  // Has rows [from, to) at hand.
  template <class T>
  void cover(const Problem& p, const InUse& in_use, int64_t h, int64_t from, int64_t to, int64_t Dp) {
    from = from / NR * NR, to = round_up(to, NR);
    if (from >= end) first = end = from;
    if (to - first > capacity) {
      memmove(panels, panels + (from - first) * p.D, sizeof(float) * (end - from) * p.D);
      if (rows) memmove(rows, rows + (from - first) * Dp, sizeof(float) * (end - from) * Dp);
      first = from;
    }
    if (to <= end) return;
    pack<T>([&](int64_t rho) { return rho_row<T>(p, in_use, h, rho); }, end, to - end, p.D, Dp,
            panels + (end - first) * p.D, rows ? rows + (end - first) * Dp : nullptr);
    end = to;
  }
};
