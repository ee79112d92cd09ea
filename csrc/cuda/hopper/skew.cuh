// The relative shift, inside a warp.
//
// A warp owns 16 rows of the product of queries and a block of 64 rows of r. Row m, column c of tile t's
// block belongs to key 64 + m - c of the tile: to this tile or the next. A ring of two tiles' keys, 16 x
// 128 floats, takes the block as it comes and gives tile t once both of its blocks are there.
//
//        key of   | tile t          | tile t + 1
//        row m    | ....xxxxxxxxxxxx|xxxxxx..........     x: what block t brings; the dots of tile t came
//        row m+1  | .....xxxxxxxxxxx|xxxxxxx.........     with block t - 1
//
// Word (row, key): row % 8 + 8 (key >> 1 & 3) + 32 (key & 1) + 64 (key >> 3) + 1024 (row >> 3): lanes of
// a store differ in row - 2 (lane % 4), of a load in row and key / 2: 32 banks either way.
#pragma once
#include "tile.cuh"

namespace txl_cuda {

class Skew {
 public:
  // ring: the warp's, an address at a multiple of 8 KB from `memory`; both anywhere.
  TXL_DEVICE Skew(uint32_t memory, int ring, int warp) : memory_(memory) {
    const int lane = thread() % WARP, row = lane / 4, pair = lane % 4;
    from_ = memory + static_cast<uint32_t>(ring + 4 * (row + 8 * pair));
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      // Less 16 warp + 8 h - 8 k, from -7 to 7.
      const int key = row - 2 * pair - e;  // plant: skew-column
      to_[e] = static_cast<uint32_t>(ring + 4 * (row + 8 * (key >> 1 & 3) + 32 * (key & 1)));
      eight_[e] = 256 * (2 * warp + (key >> 3));
    }
  }

  // block: tile t's.
  TXL_DEVICE void put(const float (&block)[32], int t) {
    const int later = 256 * 8 * (t + 1);
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      TXL_UNROLL
      for (int up = -7; up <= 1; ++up) {  // h - k
        // plant: skew-base-address
        const uint32_t at = memory_ + (to_[e] | (static_cast<uint32_t>(eight_[e] + later + 256 * up) & 0xF00));
        if (up <= 0) put_shared(at, block[4 * -up + e]);
        if (up >= -6) put_shared<4096>(at, block[4 * (1 - up) + 2 + e]);
      }
    }
  }

  // scores: tile t's, in a product's places.
  TXL_DEVICE void get(float (&scores)[32], int t) const {
    const uint32_t at = from_ + static_cast<uint32_t>(256 * 8 * (t & 1));
    unroll<32>([&](auto number) {
      constexpr int n = decltype(number)::value;  // 4 k + 2 h + e
      scores[n] = get_shared<256 * (n / 4) + 4096 * (n / 2 % 2) + 128 * (n % 2)>(at);
    });
  }

 private:
  uint32_t memory_, from_, to_[2];  // to_: from memory_ on
  int eight_[2];
};

}  // namespace txl_cuda
