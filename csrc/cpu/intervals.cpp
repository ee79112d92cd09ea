#include "intervals.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "parallel.h"

namespace txl {
namespace {

constexpr int64_t ROWS = 64;  // of an item

// From the first visible key of a row to the last; whether no hidden one is between them.
bool one_interval(const uint8_t* row, int64_t S, uint8_t visible, int32_t& start, int32_t& end) {
  const auto* first = S ? static_cast<const uint8_t*>(std::memchr(row, visible, static_cast<size_t>(S))) : nullptr;
  if (!first) {
    start = end = 0;
    return true;
  }
  const auto left = static_cast<size_t>(row + S - first);
  const auto* hidden = static_cast<const uint8_t*>(std::memchr(first, !visible, left));
  const uint8_t* last = hidden ? hidden : row + S;
  start = static_cast<int32_t>(first - row), end = static_cast<int32_t>(last - row);
  if (!hidden || !std::memchr(hidden, visible, static_cast<size_t>(row + S - hidden))) return true;
  for (end = static_cast<int32_t>(S); row[end - 1] != visible;) --end;
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
