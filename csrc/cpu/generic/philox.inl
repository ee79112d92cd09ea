// Philox-4x32-10 (Salmon et al. 2011): entry (b, h, i, j) is word i % 4 of the block with counter
// (j, i / 4, b * H + h, 0) under the key seed. The mask is a function of these alone.

constexpr int PHILOX_ROUNDS = 10;

TXL_INLINE void philox_block(uint32_t c0, uint32_t c1, uint32_t c2, uint64_t seed, uint32_t out[4]) {
  uint32_t c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// factor[row * BLOCK_S + n] = 0 if entry (bh, i0 + row, j0 + n) is dropped, else 1 / (1 - p), for the rows of a block
// and the keys some query of their group of four sees; i0 is a multiple of 4.
static void dropout_factors(const Problem& p, const BlockRanges& ranges, int64_t bh, int64_t i0, int64_t j0,
                            float* factor) {
  static_assert(BLOCK_L % 4 == 0, "a block holds whole groups");
  for (int64_t group = 0; group < BLOCK_L; group += 4) {
    int64_t from = BLOCK_S, to = 0;
    for (int64_t i = group; i < group + 4; ++i) {
      const Range seen = within(ranges.row[i], j0);
      if (seen.any()) from = min_of(from, seen.low), to = max_of(to, seen.high);
    }
    for (int64_t n = from; n < to; ++n) {
      uint32_t word[4];
      philox_block(static_cast<uint32_t>(j0 + n), static_cast<uint32_t>((i0 + group) / 4), static_cast<uint32_t>(bh),
                   p.seed, word);
      for (int z = 0; z < 4; ++z) factor[(group + z) * BLOCK_S + n] = word[z] < p.drop_below ? 0.f : p.keep_scale;
    }
  }
}
