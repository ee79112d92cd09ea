// Dropout bits, as txl_kernels/call.py defines them: Philox-4x32-10, counter (j, i / 4,
// b * H + h, 0), word i % 4.
#pragma once
#include "problem.h"
#include "simt.h"

namespace txl_cuda {

// Bits of entries (bh, 4 four, j) to (bh, 4 four + 3, j).
TXL_ANYWHERE void draw(const Problem& p, int64_t bh, int64_t four, int64_t j, uint32_t (&bits)[4]) {
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  uint32_t c[4] = {static_cast<uint32_t>(j), static_cast<uint32_t>(four), static_cast<uint32_t>(bh), 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
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
TXL_ANYWHERE float kept(const Problem& p, int64_t bh, int64_t i, int64_t j) {
  uint32_t c[4];
  draw(p, bh, i / 4, j, c);
  const int word = static_cast<int>(i % 4);
  const uint32_t bits = word == 0 ? c[0] : word == 1 ? c[1] : word == 2 ? c[2] : c[3];
  return bits < p.drop_below ? 0.f : p.keep_scale;
}

}  // namespace txl_cuda
