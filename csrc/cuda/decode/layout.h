// Shared memory of a block of part_kernel.
#pragma once
#include "../simt.h"

namespace txl_cuda {

// Offsets in floats. Queries [Q][width] with each bias, which the sum over warps takes over; scores
// [Q][part_keys]; the largest score and the sum of weights, [WARPS][Q] each; first and last + 1 key
// that a query sees, [Q].
struct Layout {
  int content, position, score, tops, sums, from, to, floats;
};

constexpr TXL_ANYWHERE Layout layout(int Q, int width, int part_keys) {
  const int position = Q * width, score = 2 * position, tops = score + Q * part_keys;
  const int sums = tops + WARPS * Q, from = sums + WARPS * Q;
  return {0, position, score, tops, sums, from, from + Q, from + 2 * Q};
}

}  // namespace txl_cuda
