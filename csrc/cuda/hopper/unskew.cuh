// The unskew, the relative shift backwards: from [queries, keys] to [queries, distances], for dS.
//
// Element (row m, key n) of tile t is at the distance m - n of the warpgroup's first query to the tile's first key:
// column m - n of the tile of r that came with the tile of keys before, or column 64 + m - n of the one that came with
// this. A ring buffer of two tiles [64 queries, 64 distances], 16-bit, swizzled as operands of products are, takes
// elements as they come; a tile of distances is whole after the tile of keys that follows its own. Lanes of a store
// take 8 rows and the words of 8 columns: 32 banks.
//
// Byte (row, column) of a tile: 128 row + 16 (column / 8 ^ row % 8) + 2 (column % 8). The number of 8 columns, with the
// number of the tile above it, are four bits that count through the ring; they are bits 4 to 6 and 13 of a byte's
// address. `spread` moves a number to these bits. Sums of such numbers carry from bit 6 to bit 13 if all bits between
// are one (CARRY): 0x70 + 0x10 + 0x1F80 = 0x2000, which is spread(7) + spread(1) = spread(8).
#pragma once
#include "tile.cuh"

namespace txl_cuda {

class Unskew {
 public:
  // ring: the warpgroup's two tiles, at a multiple of 16 KB from `memory`, which is at a multiple of 1 KB. first_octet:
  // the warp's keys of a tile begin at 8 first_octet.
  TXL_DEVICE Unskew(uint32_t memory, int ring, int warp, int first_octet = 0)
      : memory_(memory), octet_(spread(2 * warp - first_octet) | CARRY) {
    const int lane = thread() % WARP, row = lane / 4, pair = lane % 4;
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int shift = row - 2 * pair - e;  // the column is 8 (2 warp + h - k) + shift, from -7 to 7
      offset_[e] = static_cast<uint32_t>(ring + (16 * warp + row) * ROW_BYTES + (shift & 7) * 2 + (row << 4));
      wraps_[e] = shift < 0;
    }
  }

  // Stores dS of a tile, an A operand of all or half of its keys. slot: number in the ring of the earlier of its two
  // tiles of distances, 0 or 1.
  template <int WORDS>
  TXL_DEVICE void store(const uint32_t (&ds)[WORDS], int slot) const {
    constexpr int OCTETS = WORDS / 2;  // of keys
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      const uint32_t offset = offset_[e] ^ static_cast<uint32_t>(slot) << 13;
      TXL_UNROLL
      for (int diagonal = 1 - OCTETS; diagonal <= 1; ++diagonal) {  // h - k
        const uint32_t octet = (octet_ + spread(diagonal)) & spread(15);
        const uint32_t last = OCTETS == 8 ? octet ^ 1 << 13 : (octet_ + spread(diagonal - OCTETS)) & spread(15);
        if (diagonal <= 0)
          store_half<0>(address(octet, last, offset, e, diagonal == 0), choose(ds, -diagonal, 0, e), e);
        if (diagonal >= 2 - OCTETS)
          store_half<8 * ROW_BYTES>(address(octet, last, offset, e, diagonal == 1), choose(ds, 1 - diagonal, 1, e), e);
      }
    }
  }

  // Clears the warp's rows of both tiles, which begin at `rows`.
  static TXL_DEVICE void clear(uint32_t rows) {
    constexpr int BYTES = 8 * WARP;  // of a store
    rows += static_cast<uint32_t>(thread() % WARP * 8);
    unroll<16 * ROW_BYTES / BYTES>([&](auto number) {
      constexpr int offset = decltype(number)::value * BYTES;
      store_shared_pair<offset>(rows, 0, 0), store_shared_pair<offset + SUBTILE_BYTES>(rows, 0, 0);
    });
  }

 private:
  static constexpr uint32_t CARRY = 0x1F80;
  static TXL_ANYWHERE constexpr uint32_t spread(int n) {
    return static_cast<uint32_t>((n & 7) << 4 | (n >> 3 & 1) << 13);
  }
  // The lanes of a store take the same 8 columns. For lanes whose shift is negative, these are the columns of k - 1.
  template <int WORDS>
  TXL_DEVICE uint32_t choose(const uint32_t (&ds)[WORDS], int k, int h, int e) const {
    constexpr int OCTETS = WORDS / 2;
    return wraps_[e] ? ds[2 * ((k + OCTETS - 1) % OCTETS) + h] : ds[2 * k + h];
  }
  // What such lanes store with the others' k = 0 is their last k, in the octet `last`: that of the other tile of the
  // ring, where they have all keys.
  TXL_DEVICE uint32_t address(uint32_t octet, uint32_t last, uint32_t offset, int e, bool is_first) const {
    // plant: unskew-wrap
    return memory_ + ((is_first && wraps_[e] ? last : octet) ^ offset);
  }
  template <int OFFSET>
  static TXL_DEVICE void store_half(uint32_t address, uint32_t pair, int e) {
    if (e) store_shared_high<OFFSET>(address, pair);
    if (!e) store_shared_low<OFFSET>(address, pair);
  }
  uint32_t memory_, octet_, offset_[2];  // offset_: of (row, column % 8), from memory_ on
  bool wraps_[2];
};

}  // namespace txl_cuda
