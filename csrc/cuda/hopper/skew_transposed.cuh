// The skew (skew.cuh) with keys as rows: from products of 64 queries and two tiles of 64 distances to scores
// [keys, queries] of a warpgroup.
//
// The tile of r above the distance of the first query to the first key, and the one below: row m (a query), column c is
// the score of key m - c, if that is not negative, by the tile above, and of key 64 + m - c by the tile below. The
// elements of one row and column of both belong to keys 64 apart, of which one is in the tile of keys.
//
// Word (key, query) of [64, 64]: its low 6 bits are within 8 x 8, see `within`, then come key / 8 and query / 8.
// Within: the query, then bits 0 ^ 2, 1 and 2 of the key. The 32 lanes of a store differ in the query and in query - 2
// (lane % 4), those of half a load in key % 4 and query / 2: both meet 32 different banks.
#pragma once
#include "tile.cuh"

namespace txl_cuda {

class SkewTransposed {
 public:
  static constexpr int BYTES = 4 * SIDE * SIDE;

  // buffers: two, at a multiple of 32 KB from `memory`, which may be anywhere; steps use them in turn.
  TXL_DEVICE SkewTransposed(uint32_t memory, int buffers, int warp) : memory_(memory) {
    const int lane = thread() % WARP, row = lane / 4, pair = lane % 4;
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      // The key of an element is 8 (2 warp + h - k) + shift, modulo 64; shift: from -7 to 7.
      const int shift = row - 2 * pair - e;  // plant: transposed-skew-column
      store_offset_[e] = within(shift & 7, row) + static_cast<uint32_t>(buffers + EIGHT_QUERIES * 2 * warp);
      octet_[e] = 2 * warp + (shift >> 3);
    }
    load_offset_ = within(row, 2 * pair) + static_cast<uint32_t>(buffers + EIGHT_KEYS * 2 * warp);
  }

  // Stores scores less the lse of this thread's two queries. below, above: the products with these tiles.
  TXL_DEVICE void store(const float* below, const float* above, const float (&lse)[2], int step) const {
    const uint32_t buffer = buffer_of(step);
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      TXL_UNROLL
      for (int diagonal = -7; diagonal <= 1; ++diagonal) {  // h - k
        const bool is_above = octet_[e] + diagonal >= 0;
        const uint32_t octet = static_cast<uint32_t>(EIGHT_KEYS * octet_[e] + EIGHT_KEYS * diagonal) & 0x700;
        const uint32_t address =
            memory_ + (octet | (store_offset_[e] | buffer));  // plant: transposed-skew-base-address
        const int n = 4 * -diagonal + e, m = 4 * (1 - diagonal) + 2 + e;
        if (diagonal <= 0) store_shared(address, (is_above ? above[n] : below[n]) - lse[0]);
        if (diagonal >= -6) store_shared<EIGHT_QUERIES>(address, (is_above ? above[m] : below[m]) - lse[1]);
      }
    }
  }

  // Loads scores as an accumulator with keys as rows.
  TXL_DEVICE void load(float (&scores)[32], int step) const {
    const uint32_t address = memory_ + (load_offset_ | buffer_of(step));
    unroll<16>([&](auto number) {
      constexpr int n = 2 * decltype(number)::value;  // 4 k + 2 h
      load_shared_pair<EIGHT_QUERIES*(n / 4) + EIGHT_KEYS*(n / 2 % 2)>(address, scores[n], scores[n + 1]);
    });
  }

 private:
  static constexpr int EIGHT_KEYS = 4 * 64, EIGHT_QUERIES = 8 * EIGHT_KEYS;  // bytes
  // The byte of (key, query) of 8 x 8.
  static TXL_DEVICE uint32_t within(int key, int query) {
    const int word = query | ((key ^ key >> 2) & 1) << 3 | (key >> 1 & 1) << 4 | (key >> 2 & 1) << 5;
    return static_cast<uint32_t>(4 * word);
  }
  // plant: transposed-skew-buffers
  static TXL_DEVICE uint32_t buffer_of(int step) { return static_cast<uint32_t>((step & 1) * BYTES); }
  uint32_t memory_, store_offset_[2], load_offset_;  // offsets from memory_ on; store_offset_: of (key % 8, query)
  int octet_[2];                                     // key / 8 where h = k; negative: of the tile of r below
};

}  // namespace txl_cuda
