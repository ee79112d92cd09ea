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
// Word (row, key): key % 8 + 8 (row % 4 ^ row / 4 % 2) + 32 (row / 4 % 2) + 64 (key / 8) + 1024 (row / 8). Lanes of a
// store differ in row and in row - 2 (lane % 4): 32 banks. Half a warp's lanes load pairs of keys that differ in row %
// 4 and in key / 2: 32 banks.
#pragma once
#include "tile.cuh"

namespace txl_cuda {

class Skew {
 public:
  // ring: the warp's, an address at a multiple of 8 KB from `memory`; both anywhere.
  TXL_DEVICE Skew(uint32_t memory, int ring, int warp) : memory_(memory) {
    const int lane = thread() % WARP, row = lane / 4, pair = lane % 4;
    const int word = 8 * (row % 4 ^ row / 4) + 32 * (row / 4);
    from_ = memory + static_cast<uint32_t>(ring + 4 * (word + 2 * pair));
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      // Less 16 warp + 8 h - 8 k, from -7 to 7.
      const int key = row - 2 * pair - e;  // plant: skew-column
      to_[e] = static_cast<uint32_t>(ring + 4 * (word + (key & 7)));
      eight_[e] = 256 * (2 * warp + (key >> 3));
    }
  }

  // block: tile t's.
  TXL_DEVICE void put(const float (&block)[32], int t) const {
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      TXL_UNROLL
      for (int up = -7; up <= 1; ++up) {  // h - k
        uint32_t at = place(e, up, t);
        at += memory_;  // plant: skew-base-address
        if (up <= 0) store_shared(at, block[4 * -up + e]);
        if (up >= -6) store_shared<4096>(at, block[4 * (1 - up) + 2 + e]);
      }
    }
  }

  // scores: tile t's, in a product's places.
  TXL_DEVICE void get(float (&scores)[32], int t) const {
    const uint32_t at = from_ + TILE_BIT * static_cast<uint32_t>(t & 1);
    unroll<16>([&](auto number) {
      constexpr int n = 2 * decltype(number)::value;  // 4 k + 2 h
      load_shared_pair<256 * (n / 4) + 4096 * (n / 2 % 2)>(at, scores[n], scores[n + 1]);
    });
  }

 private:
  static constexpr uint32_t TILE_BIT = 256 * 8;  // from a tile's keys to the next tile's, modulo the ring's 4 KB
  TXL_DEVICE uint32_t place(int e, int up, int t) const {
    return to_[e] | (static_cast<uint32_t>(eight_[e] + static_cast<int>(TILE_BIT) * (t + 1) + 256 * up) & 0xF00);
  }
  uint32_t memory_, from_, to_[2];  // to_: from memory_ on
  int eight_[2];
};

}  // namespace txl_cuda
