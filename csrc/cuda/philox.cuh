// Dropout bits, as txl_kernels/call.py defines them: Philox-4x32-7, counter (j, i / 8,
// b * H + h, 0), the i % 8-th 16 bits.
#pragma once
#include "cuda_problem.h"
#include "simt.h"

namespace txl_cuda {

// Computes the random bits of entries (bh, 8 eight, j) to (bh, 8 eight + 7, j), 16 each, two to a word.
TXL_ANYWHERE void philox_bits(const Problem& p, int64_t bh, int64_t eight, int64_t j, uint32_t (&bits)[4]) {
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  uint32_t c[4] = {static_cast<uint32_t>(j), static_cast<uint32_t>(eight), static_cast<uint32_t>(bh), 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t x = uint64_t{0xD2511F53u} * c[0], y = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(y >> 32) ^ c[1] ^ k0;
    c[2] = static_cast<uint32_t>(x >> 32) ^ c[3] ^ k1;
    c[1] = static_cast<uint32_t>(y);
    c[3] = static_cast<uint32_t>(x);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int n = 0; n < 4; ++n) bits[n] = c[n];
}

// 0 if entry (bh, i, j) is dropped, else 1 / (1 - p).
TXL_ANYWHERE float dropout_factor(const Problem& p, int64_t bh, int64_t i, int64_t j) {
  uint32_t c[4];
  philox_bits(p, bh, i / 8, j, c);
  const int word = static_cast<int>(i % 8 / 2);
  const uint32_t pair = word == 0 ? c[0] : word == 1 ? c[1] : word == 2 ? c[2] : c[3];
  return (i % 2 ? pair >> 16 : pair & 0xFFFF) < p.drop_below ? 0.f : p.keep_scale;
}

// Bit g of the result: entry (bh, 8 eight + g, j) is kept.
TXL_DEVICE uint32_t keep_mask_of_eight(const Problem& p, int64_t bh, int64_t eight, int64_t j) {
  uint32_t words[4], keep_mask = 0;
  philox_bits(p, bh, eight, j, words);
  TXL_UNROLL
  for (int n = 0; n < 4; ++n) {
    keep_mask |= static_cast<uint32_t>((words[n] & 0xFFFF) >= p.drop_below) << 2 * n;
    keep_mask |= static_cast<uint32_t>(words[n] >> 16 >= p.drop_below) << (2 * n + 1);
  }
  return keep_mask;
}

}  // namespace txl_cuda
