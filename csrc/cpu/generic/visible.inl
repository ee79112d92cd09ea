// Which keys a query sees, and which rows no query sees.

// Keys [low, high) that query i of batch row b sees; low == high if none.
struct Range {
  int64_t low, high;
  bool any() const { return low < high; }
};

TXL_INLINE Range visible(const Problem& p, int64_t b, int64_t i) {
  const int64_t S = p.M + p.L, at = p.M + i;
  int64_t low = p.window ? max_of(0, at - p.window + 1) : 0, high = min_of(at + p.ahead + 1, S);
  if (p.start.data) low = max_of(low, p.start.data[b * p.start.s0 + i * p.start.s1]);
  if (p.end.data) high = min_of(high, p.end.data[b * p.end.s0 + i * p.end.s1]);
  return low < high ? Range{low, high} : Range{0, 0};
}

// Keys of each batch row, and distances, that some query meets. Rows nobody meets must not enter a
// product: a memory that is not filled yet may hold anything, and 0 * NaN is NaN.
struct InUse {
  Buffer memory;  // int32: [B][S + 1] counts of queries a key, then one count a distance -(L - 1) .. S
  int32_t *keys, *distances;
  int64_t B, S, first_distance;

  explicit InUse(const Problem& p)
      : memory(p.B * (p.M + p.L + 1) + p.M + 2 * p.L + 1),
        keys(reinterpret_cast<int32_t*>(memory.data)),
        distances(keys + p.B * (p.M + p.L + 1)),
        B(p.B),
        S(p.M + p.L),
        first_distance(1 - p.L) {
    // Where counts change, then their running sums.
    memset(keys, 0, sizeof(int32_t) * (B * (S + 1) + S + p.L + 1));
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < p.L; ++i) {
        const Range seen = visible(p, b, i);
        if (!seen.any()) continue;
        const int64_t at = p.M + i;
        ++keys[b * (S + 1) + seen.low], --keys[b * (S + 1) + seen.high];
        ++distances[at - seen.high + 1 - first_distance], --distances[at - seen.low + 1 - first_distance];
      }
    for (int64_t b = 0; b < B; ++b)
      for (int64_t j = 1; j <= S; ++j) keys[b * (S + 1) + j] += keys[b * (S + 1) + j - 1];
    for (int64_t d = 1; d < S + p.L + 1; ++d) distances[d] += distances[d - 1];
  }

  bool key(int64_t b, int64_t j) const { return j < S && keys[b * (S + 1) + j] > 0; }
  bool distance(int64_t d) const { return d >= first_distance && d < S && distances[d - first_distance] > 0; }
};
