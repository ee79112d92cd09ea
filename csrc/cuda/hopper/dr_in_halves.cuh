// The epilogue of dr at width 128: each warp's 16 rows leave for themselves, 64 columns at a time.
#pragma once
#include "dr_epilogue.cuh"

namespace txl_cuda {

// A warp's two boxes [16 distances, 32 columns] in shared memory, whose reductions its first lane starts. No barrier of
// the warpgroup is needed.
template <class S>
class DrBoxes {
 public:
  // number: of the warp in the block; warpgroup: of those with different queries.
  TXL_DEVICE DrBoxes(const BackwardProblem& p, const QueryBlock<S>& block, int warpgroup, int warp, int number)
      : number_(number), warp_(warp) {
    const int row = accumulator_row(warp), column = accumulator_column();
    rows_ = DrRows::of<S>(p, block, warpgroup);
    // dr[8 k + column + e] of row + 8 h: 16 bytes' chunk 2 (k % 4) + column / 4 of a row of 128 bytes, swizzled.
    // Lanes of odd rows store k ^ 2 where the others store k, so that half a warp's pairs meet 32 different banks.
    const int x = row % 8, chunk = (column / 4 + x % 2 * 4) ^ x;
    address_ = block.address(boxes()) + static_cast<uint32_t>(x * ROW_BYTES + chunk * 16 + column % 4 * 4);
  }

  // Stores this warp's rows of dr and columns `column` .. + 63 once what the boxes held has been read, and starts their
  // reductions. dr: of these columns, 32 elements of an accumulator; that of tile t.
  TXL_DEVICE void add(const BackwardProblem& p, const QueryBlock<S>& block, const float* dr, int column, int t) const {
    if (!p.dr) return;
    const bool starts = thread() % WARP == 0, is_odd = thread() / 4 % 2;
    if (starts) tma_store_wait();  // plant: dr-half-wait
    sync_warp();
    unroll<16>([&](auto number) {
      constexpr int n = decltype(number)::value, k = n / 2, h = n % 2;
      constexpr int even = 4 * k + 2 * h, odd = 4 * (k ^ 2) + 2 * h;
      store_shared_pair<k / 4 * S::DR_BOX + 8 * h * ROW_BYTES>(address_ ^ (k % 4 * 32), is_odd ? dr[odd] : dr[even],
                                                               is_odd ? dr[odd + 1] : dr[even + 1]);
    });
    fence_view_async_shared();  // plant: dr-half-fence
    sync_warp();                // plant: dr-half-barrier
    if (!starts) return;
    const int row = rows_.row(t) + warp_ * S::DR_ROWS;
    for (int n = 0; n < 2; ++n)
      tma_reduce_add_box(p.dr_rows, block.shared + boxes() + n * S::DR_BOX, column + n * 32, row, block.h, rows_.table);
    tma_store_arrive();
  }
  TXL_DEVICE void drain() const {
    if (thread() % WARP == 0) tma_store_wait();
  }

 private:
  // Byte of the warp's boxes in shared memory.
  TXL_DEVICE int boxes() const { return S::dr + number_ * 2 * S::DR_BOX; }

  int number_, warp_;
  DrRows rows_;
  uint32_t address_;  // of this thread's first elements
};

// The accumulator is dr, [64 distances, 128 columns], which leaves in two halves: one in this step of the main loop and
// one in the next.
template <class S>
class DrInHalves {
 public:
  TXL_DEVICE DrInHalves(const BackwardProblem& p, const QueryBlock<S>& block, int warpgroup, int warp)
      : boxes_(p, block, warpgroup, warp, warpgroup * WARPGROUP_WARPS + warp) {}

  TXL_DEVICE void flush(const BackwardProblem& p, const QueryBlock<S>& block, const float (&dr)[S::WIDTH / 2],
                        int t) const {
    boxes_.add(p, block, dr + S::WIDTH / 4, SIDE, t);
  }
  TXL_DEVICE void acquire() const {}
  TXL_DEVICE void store(const float (&)[S::WIDTH / 2]) const {}
  TXL_DEVICE void start(const BackwardProblem& p, const QueryBlock<S>& block, const float (&dr)[S::WIDTH / 2],
                        int t) const {
    boxes_.add(p, block, dr, 0, t);
  }
  TXL_DEVICE void drain() const { boxes_.drain(); }

 private:
  DrBoxes<S> boxes_;
};

}  // namespace txl_cuda
