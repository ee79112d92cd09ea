// Which keys a query sees.

// Keys [low, high) that query i of batch row b sees; low == high if none.
struct Range {
  int64_t low, high;
};

TXL_INLINE Range visible(const Problem& p, int64_t b, int64_t i) {
  const int64_t S = p.M + p.L, at = p.M + i;
  int64_t low = p.window ? max_of(0, at - p.window + 1) : 0, high = p.causal ? at + 1 : S;
  if (p.start.data) low = max_of(low, p.start.data[b * p.start.s0 + i * p.start.s1]);
  if (p.end.data) high = min_of(high, p.end.data[b * p.end.s0 + i * p.end.s1]);
  if (low >= high) return {0, 0};
  return {low, high};
}
