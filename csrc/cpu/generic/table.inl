// The table r, in reverse. A key and a query meet at the coordinate
// rho = L - 1 - i + j + const, and r is packed by rho: for one query consecutive keys are
// consecutive rho, so the relative shift is an offset.

// L - 1 + const: a multiple of NR, less 1, so that blocks start at multiples of NR; and large enough
// for the rows that pad the last block of queries to have rho >= 0.
TXL_INLINE int64_t rho_origin(const Problem& p) { return round_up(p.L, NR) + BLOCK_L - 1; }
TXL_INLINE int64_t rho_of(const Problem& p, int64_t i, int64_t j) { return rho_origin(p) - i + j; }
TXL_INLINE int64_t distance_of(const Problem& p, int64_t rho) { return p.M + rho_origin(p) - rho; }

// The row of r for rho; null where r has none, or no query meets it.
template <class T>
TXL_INLINE const T* rho_row(const Problem& p, const InUse& in_use, int64_t h, int64_t rho) {
  const int64_t distance = distance_of(p, rho), row = p.zero_row + distance;
  return row >= 0 && row < p.T && in_use.distance(distance) ? row_of<T>(p.r, h, row, 0) : nullptr;
}

// The part [first, end) of the reversed table that is at hand, multiples of NR; both layouts, or
// panels alone. Upwards it grows: what is asked for is packed, what lies behind is dropped when the room
// runs out. Downwards it starts anew.
struct Table {
  int64_t capacity;
  Cell *panels, *rows;
  int64_t first = 0, end = 0;

  // row_cells: 0 for panels alone.
  Table(Arena& a, int64_t room, int64_t D, int64_t row_cells)
      : capacity(room),
        panels(a.take<Cell>(room * deep(D))),
        rows(row_cells ? a.take<Cell>(room * row_cells) : nullptr) {}

  // Rows of room for windows of `count` rows: twice that, so that moving the window to the front is
  // rare.
  static int64_t room(int64_t count) { return 2 * round_up(count + 2 * NR, NR); }

  // Has rows [from, to) at hand.
  template <class T>
  void cover(const Problem& p, const InUse& in_use, int64_t h, int64_t from, int64_t to, int64_t Dp) {
    from = from / NR * NR, to = round_up(to, NR);
    if (from >= end || from < first) first = end = from;
    if (to - first > capacity) {
      memmove(panels, panels + (from - first) * deep(p.D), sizeof(Cell) * (end - from) * deep(p.D));
      if (rows) memmove(rows, rows + (from - first) * Dp, sizeof(Cell) * (end - from) * Dp);
      first = from;
    }
    if (to <= end) return;
    pack<T>([&](int64_t rho) { return rho_row<T>(p, in_use, h, rho); }, end, to - end, p.D, Dp,
            panels + (end - first) * deep(p.D), rows ? rows + (end - first) * Dp : nullptr);
    end = to;
  }
};
