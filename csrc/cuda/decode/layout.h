// The layout of part_kernel's shared memory.
#pragma once
#include "../simt.h"

namespace txl_cuda {

// Offsets in floats of: queries with content and with position bias, [Q][width] each, later overwritten by the sums
// over warps; scores [Q][part_keys]; maximum score and sum of weights, [WARPS][Q] each; the first key that a query sees
// and the key after the last, [Q] each.
struct Layout {
  int content, position, score, maxima, sums, from, to, floats;
};

constexpr TXL_ANYWHERE Layout layout(int Q, int width, int part_keys) {
  const int position = Q * width, score = 2 * position, maxima = score + Q * part_keys;
  const int sums = maxima + WARPS * Q, from = sums + WARPS * Q;
  return {0, position, score, maxima, sums, from, from + Q, from + 2 * Q};
}

}  // namespace txl_cuda
