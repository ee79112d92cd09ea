// The scores of a strip of MR queries against a tile of keys.

// The ranges of N queries from i0 on, cut to the keys of `part`; the union of each strip's and of
// all.
template <int64_t N>
struct BlockRanges {
  Range row[N], strip[N / MR], all{INT64_MAX, 0};

  BlockRanges(const Problem& p, int64_t b, int64_t i0, int64_t count, Range part) {
    for (int64_t i = 0; i < round_up(count, MR); ++i) {
      row[i] = i < count ? visible(p, b, i0 + i) : Range{0, 0};
      row[i] = {max_of(row[i].low, part.low), min_of(row[i].high, part.high)};
      Range& s = strip[i / MR];
      if (i % MR == 0) s = {INT64_MAX, 0};
      if (row[i].any()) s = {min_of(s.low, row[i].low), max_of(s.high, row[i].high)};
    }
    for (int64_t x = 0; x < div_up(count, MR); ++x)
      all = {min_of(all.low, strip[x].low), max_of(all.high, strip[x].high)};
  }
};

// Batch rows that share an item: those of small calls, as many as leave so many items. Large ones have
// items of their own, for machines of many cores.
constexpr int64_t SMALL_ITEM = 1 << 22;  // products of numbers, 8 a pair

TXL_INLINE int64_t batch_rows_of_item(const Problem& p, int64_t items) {
  const int64_t each = 8 * max_of(p.L, 1) * max_of(p.M + p.L, 1) * p.D;
  return clamp(min_of(p.B * p.H / items, SMALL_ITEM / each), 1, max_of(p.B, 1));
}

// The part of a range inside the tile that starts at key j0, relative to j0; low >= high if none.
TXL_INLINE Range within(const Range& r, int64_t j0) {
  return {clamp(r.low - j0, 0, BLOCK_S), clamp(r.high - j0, 0, BLOCK_S)};
}

// Columns of a strip's positional products: a tile, MR - 1 more, and what alignment to panels adds
// at both ends.
constexpr int64_t POSITION_LD = BLOCK_S + 2 * NR;
constexpr int64_t STEP = WEIGHTS > DEPTH ? WEIGHTS : DEPTH;  // columns of weights are multiples of it

// content[MR][BLOCK_S] and position[MR][POSITION_LD] of the strip whose first query is i, for the
// keys j0 + n with from <= n < to, from a multiple of NR. The score of row x is
// content[x][n] + position[x][offset - x + n]; returns offset. k_panels: of the tile.
static int64_t strip_scores(const Problem& p, int64_t Dp, const Cell* qu, const Cell* qw, int64_t i, int64_t j0,
                            int64_t from, int64_t to, const Cell* k_panels, const Table& table, float* content,
                            float* position) {
  const int64_t D = deep(p.D), rho = rho_of(p, i + MR - 1, j0 + from), shift = rho % NR;  // of the last row, first key
  times_panels(qu, Dp, k_panels + from * D, D, div_up(to - from, NR), content + from, BLOCK_S);
  times_panels(qw, Dp, table.panels + (rho - shift - table.first) * D, D, div_up(shift + MR - 1 + to - from, NR),
               position, POSITION_LD);
  return shift + MR - 1 - from;
}
