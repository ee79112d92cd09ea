// The epilogue of dr where it comes transposed (width 64): a warpgroup's tile leaves at once.
#pragma once
#include "dr_epilogue.cuh"

namespace txl_cuda {

// The accumulator is dr^T, [64 columns of r, 64 distances]. Its elements go to shared memory transposed, as rows of 32
// columns of float32: two boxes [64 distances, 32 columns], one for each half of the columns. Two threads of the
// warpgroup start a reduction of one box each.
template <class S>
class DrTransposed {
 public:
  TXL_DEVICE DrTransposed(const BackwardProblem& p, const QueryBlock<S>& block, int warpgroup, int warp)
      : warpgroup_(warpgroup) {
    const int x = accumulator_row(warp), distance = accumulator_column();
    rows_ = DrRows::of<S>(p, block, warpgroup);
    // dr[distance + e + 8 k][x + 8 h] is in chunk (x / 4 % 8) ^ 2 h, of 16 bytes, of its row of 128; the swizzle adds
    // the row's number, without carries.
    TXL_UNROLL
    for (int e = 0; e < 2; ++e) {
      const uint32_t offset =
          static_cast<uint32_t>((distance + e) * ROW_BYTES + ((x / 4 % 8) ^ (distance + e)) * 16 + x % 4 * 4);
      address_[e] = block.address((x < 32 ? LOW : HIGH) + warpgroup_ * S::DR_BOX) + offset;
    }
  }

  TXL_DEVICE void flush(const BackwardProblem&, const QueryBlock<S>&, const float (&)[S::WIDTH / 2], int) const {}
  TXL_DEVICE void acquire() const {
    if (starts()) tma_store_wait();  // plant: dr-wait
  }
  TXL_DEVICE void store(const float (&dr)[S::WIDTH / 2]) const {
    unroll<32>([&](auto number) {
      constexpr int n = decltype(number)::value;  // 4 k + 2 h + e
      store_shared<8 * ROW_BYTES*(n / 4)>(address_[n % 2] ^ (n / 2 % 2 * 32), dr[n]);
    });
  }
  TXL_DEVICE void start(const BackwardProblem& p, const QueryBlock<S>& block, const float (&)[S::WIDTH / 2],
                        int t) const {
    const int row = rows_.row(t), half = thread() % WARPGROUP / (WARPGROUP / 2);
    if (!p.dr || !starts()) return;
    tma_reduce_add_box(p.dr_rows, block.shared + (half ? HIGH : LOW) + warpgroup_ * S::DR_BOX, half * 32, row, block.h,
                       rows_.table);
    tma_store_arrive();
  }
  TXL_DEVICE void drain() const { acquire(); }

 private:
  // The boxes of columns 0 to 31 and 32 to 63. q + w, which was in the first, is in registers by then.
  static constexpr int LOW = S::q_position, HIGH = S::dr;
  TXL_DEVICE bool starts() const { return thread() % (WARPGROUP / 2) == 0; }

  int warpgroup_;
  DrRows rows_;
  uint32_t address_[2];  // of this thread's first elements
};

}  // namespace txl_cuda
