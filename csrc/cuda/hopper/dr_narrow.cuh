// The epilogue of dr with position queries: rows of r have up to 16 columns, so dr leaves by additions of pairs.
#pragma once
#include "dr_epilogue.cuh"

namespace txl_cuda {

// The accumulator is dr, [64 distances, 16 columns]. Rows beyond the table are left out.
template <class S>
class DrNarrow {
 public:
  TXL_DEVICE DrNarrow(const BackwardProblem& p, const QueryBlock<S>& block, int warpgroup, int warp)
      : rows_(DrRows::of<S>(p, block, warpgroup)), row_(accumulator_row(warp)) {}

  TXL_DEVICE void flush(const BackwardProblem&, const QueryBlock<S>&, const float (&)[8], int) const {}
  TXL_DEVICE void acquire() const {}
  TXL_DEVICE void store(const float (&)[8]) const {}
  TXL_DEVICE void start(const BackwardProblem& p, const QueryBlock<S>& block, const float (&dr)[8], int t) const {
    if (!p.dr) return;
    const int T = static_cast<int>(p.T), Dr = static_cast<int>(p.Dr),
              first = rows_.row(t) + row_;  // plant: narrow-rows-of-dr
    const int64_t table = (rows_.table * p.H + block.h) * (DR_MARGIN + p.T);
    TXL_UNROLL
    for (int n = 0; n < 8; n += 2) {
      const int row = first + n / 2 % 2 * 8, column = n / 4 * 8 + accumulator_column();
      if (row >= DR_MARGIN && row < DR_MARGIN + T && column < Dr)
        reduce_add_pair(p.dr + (table + row) * Dr + column, dr[n], dr[n + 1]);
    }
  }
  TXL_DEVICE void drain() const {}

 private:
  DrRows rows_;
  int row_;  // of this thread's first elements
};

}  // namespace txl_cuda
