// The skew, the relative shift from [queries, distances] to [queries, keys], inside a warp.
//
// A warp owns 16 rows of the product of queries and a tile of 64 rows of r. With tile t of the keys comes a new tile of
// r, of which row m (of the warpgroup's 64), column c belongs to key 64 + m - c of tile t: to a key of this tile or of
// the next. A ring buffer of two tiles' keys, 16 x 128 floats, takes the product as it comes, and has all scores of
// tile t once this product and the one before are stored:
//
//        key of   | tile t          | tile t + 1
//        row m    | ....xxxxxxxxxxxx|xxxxxx..........     x: stored with tile t; the dots of tile t were stored
//        row m+1  | .....xxxxxxxxxxx|xxxxxxx.........     with tile t - 1
//
// Key x of tile t is key 64 (t % 2) + x of the ring. skew_word says where (row of 16, key of the ring) is. What lane 5
// of warp 0 stores and loads at tile 0; it holds row 1 (h = 0) and row 9 (h = 1), columns 8 k + 2 (e = 0) and 8 k + 3:
//
//        stores    k h e   row column   key  word             loads   k h   row   keys    words
//                  0 0 0    1     2      63   463                     0 0    1    2, 3    10, 11
//                  3 0 0    1    26      39   271                     3 0    1   26, 27  202, 203
//                  3 0 1    1    27      38   270                     3 1    9   26, 27 1226, 1227
//                  3 1 0    9    26      47  1359
//                  7 0 0    1    58       7    15
//
// Lane 28 (row 7, columns 8 k, 8 k + 1) stores column 0 as key 71, which is key 7 of tile 1. The 32 lanes of a store
// differ in row and in row - 2 (lane % 4), the 16 of half a load in row % 4 and in key / 2: both meet 32 different
// banks.
#pragma once
#include "tile.cuh"

namespace txl_cuda {

// The word of (row, 0), for the first 8 of a warp's 16 rows.
TXL_ANYWHERE constexpr int skew_row_word(int row) { return 8 * (row % 4 ^ row / 4) + 32 * (row / 4); }
// The word of (row, key) in a warp's ring buffer [16, 128].
TXL_ANYWHERE constexpr int skew_word(int row, int key) {
  return key % 8 + skew_row_word(row % 8) + 64 * (key / 8) + 1024 * (row / 8);
}
// The word to which element (row, column) of the product that comes with tile t is stored.
TXL_ANYWHERE constexpr int skewed_word(int t, int row, int column) {
  return skew_word(row % 16, (SIDE * (t + 1) + row - column) % (2 * SIDE));
}
static_assert(skewed_word(0, 1, 2) == 463 && skewed_word(0, 1, 26) == 271 && skewed_word(0, 1, 27) == 270);
static_assert(skewed_word(0, 9, 26) == 1359 && skewed_word(0, 1, 58) == 15);
static_assert(skew_word(1, 2) == 10 && skew_word(1, 26) == 202 && skew_word(9, 26) == 1226 && skew_word(9, 27) == 1227);
static_assert(skewed_word(0, 7, 0) == skew_word(7, SIDE + 7));
// The banks of a warp's store of elements (k, h, e), and of a half of its load of elements (k, h): one bit each.
constexpr uint32_t banks_of_store(int k, int e) {
  uint32_t banks = 0;
  for (int lane = 0; lane < WARP; ++lane) banks |= 1u << skewed_word(0, lane / 4, 8 * k + lane % 4 * 2 + e) % 32;
  return banks;
}
constexpr uint32_t banks_of_load(int k, int half) {
  uint32_t banks = 0;
  for (int lane = 16 * half; lane < 16 * half + 16; ++lane)
    for (int e = 0; e < 2; ++e) banks |= 1u << skew_word(lane / 4, 8 * k + lane % 4 * 2 + e) % 32;
  return banks;
}
static_assert(banks_of_store(0, 0) == ~0u && banks_of_store(3, 1) == ~0u);
static_assert(banks_of_load(0, 0) == ~0u && banks_of_load(3, 1) == ~0u);

class Skew {
 public:
  static constexpr int BYTES = 4 * 16 * 2 * SIDE;

  // ring: the warp's buffer, at a multiple of 8 KB from `memory`; both may be anywhere in shared memory. first_octet:
  // where two warps share a ring, this one's columns of products and keys of tiles begin at 8 first_octet.
  TXL_DEVICE Skew(uint32_t memory, int ring, int warp, int first_octet = 0) : memory_(memory) {
    const int lane = thread() % WARP, row = lane / 4, pair = lane % 4, row_word = skew_row_word(row);
    load_address_ = memory + static_cast<uint32_t>(ring + 4 * (row_word + 2 * pair) + EIGHT_KEYS * first_octet);
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      // The key of an element is 64 (t + 1) + 16 warp + 8 (h - k) + shift, modulo 128; shift: from -7 to 7.
      const int shift = row - 2 * pair - e;  // plant: skew-column
      store_offset_[e] = static_cast<uint32_t>(ring + 4 * (row_word + (shift & 7)));
      octet_[e] = EIGHT_KEYS * (2 * warp - first_octet + (shift >> 3));
    }
  }

  // Stores the product that comes with tile t, or the columns of it that this warp has.
  template <int N>
  TXL_DEVICE void store(const float (&unskewed)[N], int t) const {
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      TXL_UNROLL
      for (int diagonal = 1 - N / 4; diagonal <= 1; ++diagonal) {  // h - k
        uint32_t address = store_offset(e, diagonal, t);
        address += memory_;  // plant: skew-base-address
        if (diagonal <= 0) store_shared(address, unskewed[4 * -diagonal + e]);
        if (diagonal >= 2 - N / 4) store_shared<EIGHT_ROWS>(address, unskewed[4 * (1 - diagonal) + 2 + e]);
      }
    }
  }

  // Loads the scores of tile t, as an accumulator.
  template <int N>
  TXL_DEVICE void load(float (&scores)[N], int t) const {
    const uint32_t address = load_address_ + TILE_KEYS * static_cast<uint32_t>(t & 1);
    unroll<N / 2>([&](auto number) {
      constexpr int n = 2 * decltype(number)::value;  // 4 k + 2 h
      load_shared_pair<EIGHT_KEYS*(n / 4) + EIGHT_ROWS*(n / 2 % 2)>(address, scores[n], scores[n + 1]);
    });
  }

 private:
  // Bytes from a key to the octet after it, to the 64th after it, and from a row to the octet after it.
  static constexpr int EIGHT_KEYS = 4 * skew_word(0, 8), TILE_KEYS = 4 * skew_word(0, SIDE);
  static constexpr int EIGHT_ROWS = 4 * skew_word(8, 0);
  // From memory_ on. Octets, eight keys each, are counted modulo the ring's 16.
  TXL_DEVICE uint32_t store_offset(int e, int diagonal, int t) const {
    return store_offset_[e] | (static_cast<uint32_t>(octet_[e] + TILE_KEYS * (t + 1) + EIGHT_KEYS * diagonal) & 0xF00);
  }
  uint32_t memory_, load_address_, store_offset_[2];  // store_offset_: of (row, key % 8), for e = 0 and 1
  int octet_[2];                                      // bytes, as store_offset_: of key / 8, where h = k and t = -1
};

}  // namespace txl_cuda
