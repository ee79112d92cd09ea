// Turns of a block's consumer warpgroups: one at a time, in the order of their numbers, computes the exponentials of a
// tile, so that the tensor cores work for the others meanwhile (FA3's ping-pong, cuDNN's barrier).
#pragma once
#include "query_block.cuh"

namespace txl_cuda {

// Of a warpgroup. Only the tiles that all warpgroups use are taken in turns.
template <class S>
class Turns {
 public:
  TXL_DEVICE Turns() {}
  TXL_DEVICE Turns(const QueryBlock<S>& block, int warpgroup) : warpgroup_(warpgroup), tiles_{0, block.tiles} {
    TXL_UNROLL
    for (int w = 0; w < S::GROUPS; ++w) {
      const TileRange range = block.tiles_of_warpgroup(w);
      tiles_.begin = range.begin > tiles_.begin ? range.begin : tiles_.begin;
      tiles_.end = range.end < tiles_.end ? range.end : tiles_.end;
    }
    if (warpgroup_ == S::GROUPS - 1 && tiles_.begin < tiles_.end) arrive_at(0);
  }
  // Waits for this warpgroup's turn at tile t of the keys.
  TXL_DEVICE void wait(int t) const {
    if (t < tiles_.begin || t >= tiles_.end) return;
    if (warpgroup_ == 0) return named_barrier_sync<FIRST, THREADS>();
    if (warpgroup_ == 1) return named_barrier_sync<FIRST + 1, THREADS>();
    named_barrier_sync<FIRST + 2, THREADS>();
  }
  // Ends the turn. The last warpgroup's at the last tile has no next.
  TXL_DEVICE void end(int t) const {
    if (t < tiles_.begin || t + (warpgroup_ == S::GROUPS - 1) >= tiles_.end) return;
    arrive_at(warpgroup_ == S::GROUPS - 1 ? 0 : warpgroup_ + 1);
  }

 private:
  // Number of the barrier of warpgroup 0's turn; barriers 1 to 3 are sync_warpgroup's. Two warpgroups meet at one.
  static constexpr int FIRST = 4, THREADS = 2 * WARPGROUP;
  static TXL_DEVICE void arrive_at(int warpgroup) {
    if (warpgroup == 0) return named_barrier_arrive<FIRST, THREADS>();
    if (warpgroup == 1) return named_barrier_arrive<FIRST + 1, THREADS>();
    named_barrier_arrive<FIRST + 2, THREADS>();
  }

  int warpgroup_;
  TileRange tiles_;
};

// No turns.
struct AnyTime {
  template <class... Arguments>
  TXL_DEVICE explicit AnyTime(const Arguments&...) {}
  TXL_DEVICE void wait(int) const {}
  TXL_DEVICE void end(int) const {}
};

}  // namespace txl_cuda
