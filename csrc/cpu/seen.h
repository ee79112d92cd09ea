// The values of `start` and `end`, and the distances of the pairs that queries see.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../attention.h"

namespace txl {

struct Seen {
  const Bounds* wrong = nullptr;       // bounds with a value outside [0, M + L]; then only `value` is set
  int64_t value = 0;                   // that value
  int64_t nearest = 0, farthest = -1;  // the smallest and largest distance; these if no query sees a key
};

// Reads int32 bounds [B, L], each of which may be absent. left, right: INT64_MAX for no limit.
inline Seen find_seen(const Bounds& start, const Bounds& end, int64_t B, int64_t L, int64_t M, int64_t left,
                      int64_t right) {
  const int64_t keys = M + L;
  Seen seen;
  for (int64_t b = 0; b < (start.data || end.data ? B : std::min<int64_t>(B, 1)); ++b)
    for (int64_t i = 0; i < L; ++i) {
      const int64_t at = M + i;
      int64_t low = left < at ? at - left : 0, high = right < keys - at ? at + right + 1 : keys;
      for (const Bounds* const bounds : {&start, &end}) {
        if (!bounds->data) continue;
        const int64_t value = bounds->data[b * bounds->s0 + i * bounds->s1];
        if (value < 0 || value > keys) {
          seen.wrong = bounds, seen.value = value;
          return seen;
        }
        if (bounds == &start) low = std::max(low, value);
        if (bounds == &end) high = std::min(high, value);
      }
      if (low >= high) continue;
      if (seen.nearest > seen.farthest) seen.nearest = at - high + 1, seen.farthest = at - low;
      seen.nearest = std::min(seen.nearest, at - high + 1), seen.farthest = std::max(seen.farthest, at - low);
    }
  return seen;
}

// Whether the table of T rows, of which row zero_row + d is distance d, has a row for all distances that are seen.
inline bool has_rows(const Seen& seen, int64_t T, int64_t zero_row) {
  return seen.nearest > seen.farthest || (seen.nearest + zero_row >= 0 && seen.farthest + zero_row < T);
}

}  // namespace txl
