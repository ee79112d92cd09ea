// Prefill, forward of any number of queries: a block of GROUPS x 64 queries walks its tiles of keys.
#pragma once
#include "../merge.cuh"
#include "query_block.cuh"
#include "skew.cuh"
#include "softmax.cuh"

namespace txl_cuda {

template <class S>
TXL_DEVICE void clear_values(const QueryBlock<S>& block) {
  PipelineState<S::V_STAGES> at;
  TXL_ROLLED
  for (int t = 0; t < block.tiles; ++t) clear_next<S>(block.v, at, block.address(S::v), block.seen_keys(t));
}

// One warpgroup's queries.
template <class S>
class ForwardGroup {
 public:
  using T = typename S::T;

  TXL_DEVICE explicit ForwardGroup(const QueryBlock<S>& block)
      : block_(block),
        group_(broadcast_first_lane(thread() / WARPGROUP)),
        warp_(broadcast_first_lane(thread() % WARPGROUP / WARP)),
        k_(block.k.full(), block.k.empty()),
        v_(block.v.clear(), block.v.empty()),
        r_(block.r.full(), block.r.empty()),
        skew_(block.address(0), S::ring + (group_ * WARPGROUP_WARPS + warp_) * RING, warp_) {}

  TXL_DEVICE void run() {
    const PrefillProblem& p = block_.p;
    const int first = block_.first + group_ * SIDE, row = accumulator_row(warp_);
    const Tiles own = block_.tiles_of_group(group_);
    int low[2], high[2];
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      low[h] = block_.seen[group_ * SIDE + row + 8 * h] - block_.tile * SIDE;
      high[h] = block_.seen[S::QUERIES + group_ * SIDE + row + 8 * h] - block_.tile * SIDE;
    }
    Softmax softmax(p, block_.bh(), first + row, low, high);

    float values[S::WIDTH / 2] = {};
    if (block_.tiles) run_tiles(own, softmax, values);  // plant: block-without-tiles
    write(softmax, values, first + row);
  }

 private:
  // Walks the group's own of the block's tiles and releases the others unused.
  TXL_DEVICE void run_tiles(const Tiles& own, Softmax& softmax, float (&values)[S::WIDTH / 2]) {
    int t = 0;
    for (int j = -S::GROUPS; j < -1 - group_; ++j) r_.skip();
    TXL_ROLLED
    for (; t < own.from; ++t) k_.skip(), r_.skip(), v_.skip();
    if (own.from < own.to) {
      load_own();
      if constexpr (S::INTERLEAVED) {
        walk_interleaved(own, softmax, values);
      } else {
        walk(own, softmax, values);
      }
      t = own.to;
    }
    // The rest of r's tiles, up to number `tiles`: those before were skipped or used up to t - group.
    int j = own.from < own.to ? own.to + 1 - group_ : t - 1 - group_;
    TXL_ROLLED
    for (; t < block_.tiles; ++t, ++j) k_.skip(), r_.skip(), v_.skip();
    TXL_ROLLED
    for (; j <= block_.tiles; ++j) r_.skip();
  }

  TXL_DEVICE void load_own() {
    const PrefillProblem& p = block_.p;
    const int first = block_.first + group_ * SIDE;
    uint32_t position[S::WIDTH / 4];
    load_queries<T, S::WIDTH>(p, block_.b, block_.h, first, position, content_);
    store_operand<S::WIDTH>(position, position_at());
    fence_view_async_shared();  // plant: position-fence
    sync_warpgroup(group_);     // plant: position-barrier
  }
  TXL_DEVICE uint32_t position_at() const { return block_.address(S::position + group_ * S::TILE_BYTES); }

  TXL_DEVICE void issue_positions(float (&block)[32]) {
    const uint32_t r = block_.address(S::r + r_.consumer_wait() * S::TILE_BYTES);
    gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(block, position_at(), r);
  }
  TXL_DEVICE void issue_content(float (&scores)[32]) {
    gemm_rs<T, Major::K, ScaleOut::One>(scores, content_, block_.address(S::k + k_.consumer_wait() * S::TILE_BYTES));
  }
  // Tile t's new block goes to the ring, its scores come from there.
  TXL_DEVICE void skew(const float (&block)[32], float (&scores)[32], int t) {
    skew_.put(block, t);
    sync_warp();           // plant: skew-warp-barrier
    skew_.get(scores, t);  // releasing a stage orders this before what the next tile puts there
  }

  // The first tile's scores are issued, and the block of the tile after.
  TXL_DEVICE void begin(const Tiles& own, float (&block)[32], float (&scores)[32]) {
    // Both blocks of the first tile.
    issue_positions(block);
    warpgroup_wait<0>();
    fence_operand(block);
    r_.consumer_release();
    skew_.put(block, own.from - 1);
    issue_positions(block);
    warpgroup_wait<0>();
    fence_operand(block);
    r_.consumer_release();
    skew(block, scores, own.from);

    issue_content(scores);
    issue_positions(block);  // of the tile after
  }

  // For each tile of keys, queries scaled to base 2:
  //   S = skew((q + w) r^T) + (q + u) k^T,  P = 2^(S - top),  values = rescale values + P v
  TXL_DEVICE void walk(const Tiles& own, Softmax& softmax, float (&values)[S::WIDTH / 2]) {
    float block[32], scores[32], rescale[2];
    uint32_t weights[16];
    begin(own, block, scores);
    warpgroup_wait<1>();
    fence_operand(scores);
    k_.consumer_release();
    softmax.weigh(scores, own.from, block_.first_key(0), rescale);
    pack_operand<T>(scores, weights);
    warpgroup_wait<0>();
    fence_operand(block);
    r_.consumer_release();

    TXL_ROLLED
    for (int t = own.from + 1; t < own.to; ++t) {
      issue_values(values, weights);  // of the tile before, while this one's scores are skewed
      skew(block, scores, t);
      issue_content(scores);
      issue_positions(block);
      warpgroup_wait<1>();  // plant: scores-wait
      fence_operand(values);
      fence_operand(scores);
      v_.consumer_release();
      k_.consumer_release();
      softmax.weigh(scores, t, block_.first_key(0), rescale);
      pack_operand<T>(scores, weights);
      rescale_values(values, rescale);
      warpgroup_wait<0>();
      fence_operand(block);
      r_.consumer_release();
    }
    issue_values(values, weights);
    warpgroup_wait<0>();  // plant: values-wait
    fence_operand(values);
    v_.consumer_release();
  }

  // The same sums. At tile t its scores and the block of tile t + 1 are there, and the values of tile t - 1 are under
  // way: the block goes to the ring among tile t's exponentials.
  TXL_DEVICE void walk_interleaved(const Tiles& own, Softmax& softmax, float (&values)[S::WIDTH / 2]) {
    float block[32], scores[32], next[32], rescale[2];
    uint32_t weights[16];
    begin(own, block, scores);
    warpgroup_wait<0>();
    fence_operand(scores);
    fence_operand(block);
    k_.consumer_release();
    r_.consumer_release();

    TXL_ROLLED
    for (int t = own.from; t + 1 < own.to; ++t) {
      softmax.weigh(scores, t, block_.first_key(0), rescale, [&] { skew_.put(block, t + 1); });
      sync_warp();             // plant: interleaved-warp-barrier
      skew_.get(next, t + 1);  // releasing a stage orders this before what the next tile puts there
      warpgroup_wait<0>();
      fence_operand(values);
      if (t > own.from) v_.consumer_release();
      pack_operand<T>(scores, weights);
      rescale_values(values, rescale);
      issue_content(next);
      issue_positions(block);  // of tile t + 2
      issue_values(values, weights);
      warpgroup_wait<1>();  // plant: interleaved-scores-wait
      fence_operand(next);
      fence_operand(block);
      k_.consumer_release();
      r_.consumer_release();
      TXL_UNROLL
      for (int n = 0; n < 32; ++n) scores[n] = next[n];
    }
    softmax.weigh(scores, own.to - 1, block_.first_key(0), rescale);
    warpgroup_wait<0>();
    fence_operand(values);
    if (own.to - 1 > own.from) v_.consumer_release();
    pack_operand<T>(scores, weights);
    rescale_values(values, rescale);
    issue_values(values, weights);
    warpgroup_wait<0>();
    fence_operand(values);
    v_.consumer_release();
  }

  static TXL_DEVICE void rescale_values(float (&values)[S::WIDTH / 2], const float (&rescale)[2]) {
    if (all_of_warp(rescale[0] == 1 && rescale[1] == 1)) return;  // mostly the largest score stays what it was
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 2; ++n) values[n] *= rescale[n / 2 % 2];
  }
  TXL_DEVICE void issue_values(float (&values)[S::WIDTH / 2], const uint32_t (&weights)[16]) {
    gemm_rs<T, Major::MN, ScaleOut::One>(values, weights, block_.address(S::v + v_.consumer_wait() * S::TILE_BYTES));
  }

  // query: of this thread's first row. A part leaves its weighted sums as part_kernel does.
  TXL_DEVICE void write(const Softmax& softmax, const float (&values)[S::WIDTH / 2], int query) const {
    const PrefillProblem& p = block_.p;
    const int D = static_cast<int>(p.D), column = accumulator_column();
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax.sum(h), top = softmax.top(h), each = 1 / sum;
      const int i = query + 8 * h;
      if (i >= p.L) continue;
      const int64_t x = block_.bh() * p.L + i;
      const float empty = sum == 0 ? empty_output(p, block_.b, i) : 0.f;
      T* const out = const_cast<T*>(row_of<T>(p.out, block_.b, block_.h, i));
      float* const partial = p.partial + (x * p.parts + block_.part) * p.D;
      TXL_UNROLL
      for (int n = 2 * h; n < S::WIDTH / 2; n += 4) {
        const int at = n / 4 * 8 + column;
        if (at >= D) continue;
        if (p.parts > 1) {
          partial[at] = values[n], partial[at + 1] = values[n + 1];
        } else {
          const float one = sum == 0 ? empty : values[n] * each, two = sum == 0 ? empty : values[n + 1] * each;
          *reinterpret_cast<uint32_t*>(out + at) = pack(T(), one, two);
        }
      }
      if (thread() % 4) continue;
      if (p.parts > 1) {
        float* const sums = part_sums(p, x, block_.part);
        sums[0] = top, sums[1] = sum;
      } else if (p.lse) {
        p.lse[x] = log_sum_exp(p, block_.b, i, top, sum);
      }
    }
  }

  const QueryBlock<S>& block_;
  int group_, warp_;
  Consumer<S::STAGES> k_;
  Consumer<S::V_STAGES> v_;
  Consumer<S::R_STAGES> r_;
  Skew skew_;
  uint32_t content_[S::WIDTH / 4];
};

template <class S>
TXL_HOPPER_KERNEL(S::THREADS)
void forward_kernel(const TXL_CONSTANT PrefillProblem p) {
  TXL_SHARED_TILES(tiles);
  const QueryBlock<S> block(p, tiles, block_z(), block_x());
  if (thread() >= S::GROUPS * WARPGROUP) {
    warpgroup_reg_dealloc<S::PRODUCER_REGISTERS>();
    const int warp = broadcast_first_lane(thread() / WARP) - S::GROUPS * WARPGROUP_WARPS;
    if (warp == 0 && thread() % WARP == 0 && block.tiles) load_tiles(block);
    if (warp == 1) clear_values(block);
  } else {
    warpgroup_reg_alloc<S::CONSUMER_REGISTERS>();
    ForwardGroup<S>(block).run();
  }
}

}  // namespace txl_cuda
