// What is multiplied, as it lies in memory: Cells. In pairs of bfloat16 a number of float32 (TXL_SPLIT) is a sum of
// several, each the rounding of what the ones before it leave, and each in a plane of its own: three hold all of its
// 24 bits. A product is then the sum of the products of planes s and t with s + t < planes, and leaves out what is
// 2^-24 of it (of three planes, six products) or 2^-15 (of two, three).
#pragma once
#include "../problem.h"
#include "vector.h"

namespace txl::TXL_ISA {
namespace {

#ifdef TXL_PAIRS
typedef bf16 Cell;
#else
typedef float Cell;
#endif

#ifdef TXL_SPLIT
typedef float Query;  // what is multiplied where nothing is packed (decode.h)

struct Cells {
  bf16* at;       // null: there are none
  int64_t apart;  // cells from a plane to the next
  int64_t planes;
  Cells operator+(int64_t n) const { return {at + n, apart, planes}; }
  Cells& operator+=(int64_t n) { return at += n, *this; }
  explicit operator bool() const { return at; }
};
TXL_INLINE bf16* plane(const Cells& x, int64_t s) { return x.at + s * x.apart; }
TXL_INLINE int64_t planes_of(const Cells& x) { return x.planes; }
TXL_INLINE int64_t planes_of(const Problem& p) { return p.planes; }
TXL_INLINE Cells cells_at(bf16* at, int64_t count, int64_t planes) { return {at, count, planes}; }

TXL_INLINE void store(Cells to, vf x) {
  store(plane(to, 0), x);
  for (int64_t s = 1; s < to.planes; ++s) {
    x -= load(plane(to, s - 1));
    store(plane(to, s), x);
  }
}
TXL_INLINE void put(Cells to, float x) {
  put(plane(to, 0), x);
  for (int64_t s = 1; s < to.planes; ++s) {
    x -= to_float(*plane(to, s - 1));
    put(plane(to, s), x);
  }
}
TXL_INLINE vf load(Cells from) {
  vf sum = {};
  for (int64_t s = from.planes; s-- > 0;) sum += load(plane(from, s));
  return sum;
}

#else
typedef Cell Query;
typedef Cell* Cells;
TXL_INLINE Cell* plane(Cells x, int64_t) { return x; }
TXL_INLINE int64_t planes_of(Cells) { return 1; }
TXL_INLINE int64_t planes_of(const Problem&) { return 1; }
TXL_INLINE Cells cells_at(Cell* at, int64_t, int64_t) { return at; }
#endif

TXL_INLINE void clear(Cells x, int64_t count) {
  for (int64_t s = 0; s < planes_of(x); ++s) memset(plane(x, s), 0, sizeof(Cell) * count);
}
TXL_INLINE void move(Cells to, Cells from, int64_t count) {
  for (int64_t s = 0; s < planes_of(to); ++s) memmove(plane(to, s), plane(from, s), sizeof(Cell) * count);
}

// The products of planes, smallest first: those that begin with first_product(planes).
constexpr int PRODUCTS = 6, LEFT[PRODUCTS] = {1, 2, 0, 1, 0, 0}, RIGHT[PRODUCTS] = {1, 0, 2, 0, 1, 0};
TXL_INLINE int64_t first_product(int64_t planes) { return PRODUCTS - planes * (planes + 1) / 2; }

}  // namespace
}  // namespace txl::TXL_ISA
