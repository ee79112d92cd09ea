#include "intervals.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "runtime.h"

namespace txl {
namespace {

constexpr int64_t ROWS = 64;  // of an item

// The first byte of [from, to) that is (or is not) zero; `to` if there is none.
const uint8_t* find(const uint8_t* from, const uint8_t* to, bool zero) {
  if (zero) {
    const void* found = from < to ? std::memchr(from, 0, static_cast<size_t>(to - from)) : nullptr;
    return found ? static_cast<const uint8_t*>(found) : to;
  }
  for (uint64_t word = 0; to - from >= 8; from += 8) {
    std::memcpy(&word, from, 8);
    if (word) break;
  }
  while (from < to && !*from) ++from;
  return from;
}

// From the first visible key of a row to the last; whether no hidden one is between them.
bool one_interval(const uint8_t* row, int64_t S, bool visible, int32_t& start, int32_t& end) {
  const uint8_t *const to = row + S, *const first = find(row, to, !visible);
  const uint8_t* const hidden = find(first, to, visible);
  start = first < to ? static_cast<int32_t>(first - row) : 0, end = first < to ? static_cast<int32_t>(hidden - row) : 0;
  if (find(hidden, to, !visible) == to) return true;
  for (end = static_cast<int32_t>(S); (row[end - 1] != 0) != visible;) --end;
  return false;
}

}  // namespace

int64_t intervals(const Mask& mask, int32_t* start, int32_t* end, int threads) {
  const int64_t rows = mask.B * mask.L;
  std::atomic<int64_t> hole{rows};
  parallel_for(threads, (rows + ROWS - 1) / ROWS, [&](int64_t item, int) {
    for (int64_t n = item * ROWS; n < std::min((item + 1) * ROWS, rows); ++n) {
      const uint8_t* row = mask.data + n / mask.L * mask.s0 + n % mask.L * mask.s1;
      if (one_interval(row, mask.S, mask.visible, start[n], end[n])) continue;
      int64_t before = hole.load();
      while (n < before && !hole.compare_exchange_weak(before, n)) {
      }
    }
  });
  return hole == rows ? -1 : hole.load();
}

}  // namespace txl
