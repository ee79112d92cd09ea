// The relative shift (skew.cuh) with keys as rows: from products of queries and two blocks of distances to scores
// [keys, queries] of a warpgroup.
//
// Row m, column c of the blocks above and below the distance of the first query to the first key: key
// m - c, if that is not negative, by the block above; key 64 + m - c by the block below. Word (key,
// query) of 64 x 64: 6 bits within 8 x 8, then key / 8, query / 8. Within: the query, then bits 0 ^ 2, 1 and 2 of the
// key: 32 banks for a store, whose lanes differ in the query and in query - 2 (lane % 4), and for half a warp's lanes,
// which load pairs of queries that differ in key % 4 and query / 2.
#pragma once
#include "tile.cuh"

namespace txl_cuda {

class SkewTransposed {
 public:
  static constexpr int BYTES = 4 * SIDE * SIDE;

  // buffers: two, at a multiple of 32 KB from `memory`, which may begin anywhere; they take turns.
  TXL_DEVICE SkewTransposed(uint32_t memory, int buffers, int warp) : memory_(memory) {
    const int lane = thread() % WARP, row = lane / 4, pair = lane % 4;
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      // And 8 (2 warp + h - k).
      const int key = row - 2 * pair - e;  // plant: transposed-skew-column
      to_[e] = within(key & 7, row) + static_cast<uint32_t>(buffers + 2048 * 2 * warp);
      eight_[e] = 2 * warp + (key >> 3);
    }
    from_ = within(row, 2 * pair) + static_cast<uint32_t>(buffers + 256 * 2 * warp);
  }

  // blocks: below and above; less: what is taken from the scores of this thread's two queries.
  TXL_DEVICE void put(const float (&blocks)[64], const float (&less)[2], int step) const {
    const uint32_t buffer = buffer_of(step);
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      TXL_UNROLL
      for (int up = -7; up <= 1; ++up) {  // h - k
        const bool is_above = eight_[e] + up >= 0;
        const uint32_t eight = static_cast<uint32_t>(256 * eight_[e] + 256 * up) & 0x700;
        const uint32_t at = memory_ + (eight | (to_[e] | buffer));  // plant: transposed-skew-base-address
        const int n = 4 * -up + e, m = 4 * (1 - up) + 2 + e;
        if (up <= 0) store_shared(at, (is_above ? blocks[32 + n] : blocks[n]) - less[0]);
        if (up >= -6) store_shared<2048>(at, (is_above ? blocks[32 + m] : blocks[m]) - less[1]);
      }
    }
  }

  // In a product's places: keys as rows.
  TXL_DEVICE void get(float (&scores)[32], int step) const {
    const uint32_t from = memory_ + (from_ | buffer_of(step));
    unroll<16>([&](auto number) {
      constexpr int n = 2 * decltype(number)::value;
      load_shared_pair<2048 * (n / 4) + 256 * (n / 2 % 2)>(from, scores[n], scores[n + 1]);
    });
  }

 private:
  static TXL_DEVICE uint32_t within(int key, int query) {
    const int word = query | ((key ^ key >> 2) & 1) << 3 | (key >> 1 & 1) << 4 | (key >> 2 & 1) << 5;
    return static_cast<uint32_t>(4 * word);
  }
  // plant: transposed-skew-buffers
  static TXL_DEVICE uint32_t buffer_of(int step) { return static_cast<uint32_t>((step & 1) * BYTES); }
  uint32_t memory_, to_[2], from_;  // the others from memory_ on
  int eight_[2];
};

}  // namespace txl_cuda
