#include "intervals.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "runtime.h"

namespace txl {
namespace {

constexpr int64_t ROWS_PER_ITEM = 64;

// Returns the first byte of [from, to) that is zero (or, if not `zero`, that is not); `to` if there is none.
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

// Writes the interval from a row's first visible key to its last. Returns whether no key in it is hidden.
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
  parallel_for(threads, (rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, [&](int64_t item, int) {
    for (int64_t n = item * ROWS_PER_ITEM; n < std::min((item + 1) * ROWS_PER_ITEM, rows); ++n) {
      const uint8_t* row = mask.data + n / mask.L * mask.s0 + n % mask.L * mask.s1;
      if (one_interval(row, mask.S, mask.visible, start[n], end[n])) continue;
      int64_t first = hole.load();
      while (n < first && !hole.compare_exchange_weak(first, n)) {
      }
    }
  });
  return hole == rows ? -1 : hole.load();
}

}  // namespace txl
