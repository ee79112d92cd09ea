// The relative shift backwards: from a tile's pairs to distances.
//
// Pair (m, key n) of tile t is at distance m - n of the group's first query from the tile's first key:
// column m - n of the block that came with the tile before, or column 64 + m - n of the block that came
// with this one. A ring of two tiles [64 queries, 64 distances], 16-bit, swizzled as products read them,
// takes pairs as they come; a block is whole after the tile that follows its own. Lanes of a store take
// 8 rows and the words of 8 columns: 32 banks.
//
// Byte in a tile: 128 row + 16 (column / 8 ^ row % 8) + 2 (column % 8). The number of 8 columns and
// of the tile in the ring, four bits, lie in bits 4 to 6 and 13; ones between them carry sums over.
#pragma once
#include "tile.cuh"

namespace txl_cuda {

class Unskew {
 public:
  // ring: the group's two tiles, at a multiple of 16 KB from `memory`, which is at one of 1 KB.
  TXL_DEVICE Unskew(uint32_t memory, int ring, int warp) : memory_(memory), eight_(spread(2 * warp) | CARRY) {
    const int lane = thread() % WARP, row = lane / 4, pair = lane % 4;
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int column = row - 2 * pair - e;  // and 8 (2 warp + h - k)
      low_[e] = static_cast<uint32_t>(ring + (16 * warp + row) * ROW_BYTES + (column & 7) * 2 + (row << 4));
      wraps_[e] = column < 0;
    }
  }

  // pairs: of a tile, two to a register as a left factor; slot: of the earlier block, 0 or 1.
  TXL_DEVICE void put(const uint32_t (&pairs)[16], int slot) const {
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      const uint32_t low = low_[e] ^ static_cast<uint32_t>(slot) << 13;
      TXL_UNROLL
      for (int up = -7; up <= 1; ++up) {  // h - k
        const uint32_t eight = (eight_ + spread(up)) & spread(15);
        if (up <= 0) put_half<0>(place(eight, low, e, up == 0), choose(pairs, -up, 0, e), e);
        if (up >= -6) put_half<8 * ROW_BYTES>(place(eight, low, e, up == 1), choose(pairs, 1 - up, 1, e), e);
      }
    }
  }

 private:
  static constexpr uint32_t CARRY = 0x1F80;
  static TXL_DEVICE constexpr uint32_t spread(int n) {
    return static_cast<uint32_t>((n & 7) << 4 | (n >> 3 & 1) << 13);
  }
  // A store's lanes take the same 8 columns, which are those of another k for lanes that wrap.
  TXL_DEVICE uint32_t choose(const uint32_t (&pairs)[16], int k, int h, int e) const {
    return wraps_[e] ? pairs[2 * ((k + 7) % 8) + h] : pairs[2 * k + h];
  }
  // Their k = 7, stored with the others' k = 0, is a tile of the ring before.
  TXL_DEVICE uint32_t place(uint32_t eight, uint32_t low, int e, bool is_first) const {
    // plant: unskew-wrap
    return memory_ + (eight ^ (is_first && wraps_[e] ? low ^ 1 << 13 : low));
  }
  template <int MORE>
  static TXL_DEVICE void put_half(uint32_t at, uint32_t pair, int e) {
    if (e) store_shared_high<MORE>(at, pair);
    if (!e) store_shared_low<MORE>(at, pair);
  }
  uint32_t memory_, eight_, low_[2];  // low_: from memory_ on
  bool wraps_[2];
};

}  // namespace txl_cuda
