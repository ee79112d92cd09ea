// The scores of a strip of MR queries against a tile of keys.

// The ranges of a block's queries, and the union of each strip's and of the whole block's.
struct BlockRanges {
  Range row[BLOCK_L], strip[BLOCK_L / MR], all;

  BlockRanges(const Problem& p, int64_t b, int64_t i0) : all{INT64_MAX, 0} {
    for (int64_t i = 0; i < BLOCK_L; ++i) {
      row[i] = i0 + i < p.L ? visible(p, b, i0 + i) : Range{0, 0};
      Range& s = strip[i / MR];
      if (i % MR == 0) s = {INT64_MAX, 0};
      if (row[i].any()) s = {min_of(s.low, row[i].low), max_of(s.high, row[i].high)};
    }
    for (const Range& s : strip) all = {min_of(all.low, s.low), max_of(all.high, s.high)};
  }
};

// The part of a range inside the tile that starts at key j0, relative to j0; low >= high if none.
TXL_INLINE Range within(const Range& r, int64_t j0) {
  return {clamp(r.low - j0, 0, BLOCK_S), clamp(r.high - j0, 0, BLOCK_S)};
}

// The positional products of a strip cover NR-aligned panels of rho. Walking the keys upwards, the panels that reach
// over the end of one tile are the first ones of the next, and are carried instead of computed again.
constexpr int64_t CARRY = 2;                           // panels, at most
constexpr int64_t POSITION_LD = BLOCK_S + CARRY * NR;  // columns of a strip's positional products

struct Carry {
  int64_t next_tile;  // the j0 at which `panel` is valid; -1: never
  float panel[MR][CARRY * NR];
};
constexpr int64_t CARRY_FLOATS = BLOCK_L / MR * sizeof(Carry) / sizeof(float);  // one a strip of a block

// content[MR][BLOCK_S] and position[MR][POSITION_LD] of the strip whose first query is i, for keys [j0, j0 + columns).
// The score of row x at key j0 + n is content[x][n] + position[x][shift + MR - 1 - x + n]; returns shift.
// k_panels: of this tile. r_panels: of this head.
static int64_t strip_scores(const Problem& p, int64_t Dp, const float* qu, const float* qw, int64_t i, int64_t j0,
                            int64_t columns, const float* k_panels, const float* r_panels, Carry& carry, float* content,
                            float* position) {
  const int64_t D = p.D;
  const int64_t rho = p.L - 1 - (i + MR - 1) + j0 + RHO_FRONT;  // of the strip's last row, key j0
  const int64_t shift = rho % NR, first = rho / NR;
  const int64_t reach = div_up(shift + MR - 1 + BLOCK_S, NR) - BLOCK_S / NR;  // panels past a full tile
  const int64_t needed = div_up(shift + MR - 1 + columns, NR);
  times_panels(qu, Dp, k_panels, D, div_up(columns, NR), content, BLOCK_S);
  int64_t have = 0;
  if (carry.next_tile == j0) {
    have = min_of(reach, needed);
    for (int x = 0; x < MR; ++x) memcpy(position + x * POSITION_LD, carry.panel[x], sizeof(float) * have * NR);
  }
  times_panels(qw, Dp, r_panels + (first + have) * NR * D, D, needed - have, position + have * NR, POSITION_LD);
  if (columns == BLOCK_S) {
    carry.next_tile = j0 + BLOCK_S;
    for (int x = 0; x < MR; ++x)
      memcpy(carry.panel[x], position + x * POSITION_LD + BLOCK_S, sizeof(float) * reach * NR);
  }
  return shift;
}
