// Philox-4x32-10 (Salmon et al. 2011): entry (b, h, i, j) is word i % 4 of the block with counter
// (j, i / 4, b * H + h, 0) under the key seed. The mask is a function of these alone.

constexpr int PHILOX_ROUNDS = 10;

typedef uint64_t vw __attribute__((vector_size(4 * TXL_LANES)));

// Products of the even lanes of x, read as 64-bit lanes, with a 32-bit number.
TXL_INLINE vw times_even(vw x, uint32_t by) {
#if defined(__x86_64__) && TXL_LANES == 8 && !defined(__clang__)
  // GCC forms a full 64-bit product otherwise.
  typedef int v8si __attribute__((vector_size(32)));
  return (vw)__builtin_ia32_pmuludq256((v8si)x, (v8si)(vu{} + by));
#else
  return (x & 0xFFFFFFFFull) * static_cast<uint64_t>(by);
#endif
}

// x * by, the low and the high halves.
TXL_INLINE void times_wide(vu x, uint32_t by, vu& low, vu& high) {
  const vw even = times_even((vw)x, by), odd = times_even((vw)x >> 32, by);
  low = (vu)((even & 0xFFFFFFFFull) | (odd << 32));
  high = (vu)((even >> 32) | (odd & ~0xFFFFFFFFull));
}

// The blocks of keys j .. j + LANES - 1.
TXL_INLINE void philox_blocks(uint32_t j, uint32_t group, uint32_t bh, uint64_t seed, vu out[4]) {
  vu c0, c1 = vu{} + group, c2 = vu{} + bh, c3 = {};
  for (int z = 0; z < LANES; ++z) c0[z] = j + static_cast<uint32_t>(z);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    vu low0, high0, low2, high2;
    times_wide(c0, 0xD2511F53u, low0, high0);
    times_wide(c2, 0xCD9E8D57u, low2, high2);
    c0 = high2 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low2;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// factor[row * BLOCK_S + n] = 0 if entry (bh, i0 + row, j0 + n) is dropped, else 1 / (1 - p), for
// the keys that some query of the row's group of four sees; i0 is a multiple of 4. `ranges`: of the
// `count` rows.
static void dropout_factors(const Problem& p, const Range* ranges, int64_t count, int64_t bh, int64_t i0, int64_t j0,
                            float* factor) {
  for (int64_t group = 0; group < count; group += 4) {
    const int64_t rows = min_of(4, count - group);
    int64_t from = BLOCK_S, to = 0;
    for (int64_t i = group; i < group + rows; ++i) {
      const Range seen = within(ranges[i], j0);
      if (seen.any()) from = min_of(from, seen.low), to = max_of(to, seen.high);
    }
    for (int64_t n = from / LANES * LANES; n < to; n += LANES) {
      vu word[4];
      philox_blocks(static_cast<uint32_t>(j0 + n), static_cast<uint32_t>((i0 + group) / 4), static_cast<uint32_t>(bh),
                    p.seed, word);
      for (int64_t z = 0; z < rows; ++z)
        store(factor + (group + z) * BLOCK_S + n, word[z] < p.drop_below ? vf{} : splat(p.keep_scale));
    }
  }
}
