// Prefill, forward of any number of queries: a block of queries, GROUPS warpgroups of 64, goes through its part of the
// tiles of keys.
#pragma once
#include "forward_epilogue.cuh"

namespace txl_cuda {

// The second producer warp: clears rows of v that no query of the block sees.
template <class S>
TXL_DEVICE void prepare_values(const QueryBlock<S>& block) {
  PipelineState<S::V_STAGES> state;
  TXL_ROLLED
  for (int t = 0; t < block.tiles; ++t)
    prepare_next<S::TILE_BYTES>(block.v, state, block.address(S::v), block.visible_keys(t));
}

// A consumer warpgroup: 64 queries.
template <class S>
class ForwardConsumer {
 public:
  using T = typename S::T;

  TXL_DEVICE explicit ForwardConsumer(const QueryBlock<S>& block)
      : block_(block),
        warpgroup_(broadcast_first_lane(thread() / WARPGROUP)),
        warp_(broadcast_first_lane(thread() % WARPGROUP / WARP)),
        k_(block.k.full(), block.k.empty()),
        v_(block.v.prepared(), block.v.empty()),
        r_(block.r.full(), block.r.empty()),
        skew_(block.address(0), S::skew + (warpgroup_ * WARPGROUP_WARPS + warp_) * Skew::BYTES, warp_) {}

  TXL_DEVICE void run() {
    const int first_query = block_.first_query + warpgroup_ * SIDE, row = accumulator_row(warp_);
    const TileRange range = block_.tiles_of_warpgroup(warpgroup_);
    int low[2], high[2];
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      low[h] = block_.key_low(warpgroup_ * SIDE + row + 8 * h, 0);
      high[h] = block_.key_high(warpgroup_ * SIDE + row + 8 * h, 0);
    }
    Softmax softmax(block_.p, block_.bh(), first_query + row, low, high);

    float acc_o[S::WIDTH / 2] = {};
    if (block_.tiles) consume_tiles(range, softmax, acc_o);  // plant: block-without-tiles
    ForwardEpilogue<S>{block_, warpgroup_, warp_}.write(softmax, acc_o);
  }

 private:
  // Uses the tiles of `range`, and releases the others of the block unused. Tile j of r is the new one at tile
  // j + warpgroup_ of the keys.
  TXL_DEVICE void consume_tiles(const TileRange& range, Softmax& softmax, float (&acc_o)[S::WIDTH / 2]) {
    if constexpr (S::HAS_Q_POS) return consume_tiles_with_q_pos(range, softmax, acc_o);
    int t = 0;
    for (int j = -S::GROUPS; j < -1 - warpgroup_; ++j) r_.skip();
    TXL_ROLLED
    for (; t < range.begin; ++t) k_.skip(), r_.skip(), v_.skip();
    if (range.begin < range.end) {
      load_q();
      if constexpr (S::INTERLEAVED) {
        mainloop_interleaved(range, softmax, acc_o);
      } else {
        mainloop(range, softmax, acc_o);
      }
      t = range.end;
    }
    // The rest of r's tiles, up to number `tiles`: those before were skipped, or used up to t - warpgroup_.
    int j = range.begin < range.end ? range.end + 1 - warpgroup_ : t - 1 - warpgroup_;
    TXL_ROLLED
    for (; t < block_.tiles; ++t, ++j) k_.skip(), r_.skip(), v_.skip();
    TXL_ROLLED
    for (; j <= block_.tiles; ++j) r_.skip();
  }

  // The same where only some tiles of keys have position scores.
  TXL_DEVICE void consume_tiles_with_q_pos(const TileRange& range, Softmax& softmax, float (&acc_o)[S::WIDTH / 2]) {
    const TileRange r_tiles = block_.tiles_of_r();
    RTileCursor cursor = {r_tiles, warpgroup_, warpgroup_ - S::GROUPS};
    const auto skip_r = [&] { r_.skip(); };
    cursor.skip(-1, skip_r);
    TXL_ROLLED
    for (int t = 0; t < range.begin; ++t) k_.skip(), cursor.skip(t, skip_r), v_.skip();
    if (range.begin < range.end) {
      load_q();
      mainloop_with_q_pos(range, block_.position_tiles(range, r_tiles, warpgroup_), cursor, softmax, acc_o);
    }
    TXL_ROLLED
    for (int t = range.end; t < block_.tiles; ++t) k_.skip(), cursor.skip(t + 2, skip_r), v_.skip();
    cursor.skip(r_tiles.end + warpgroup_, skip_r);
  }

  // Writes q + u to registers and q + w to shared memory.
  TXL_DEVICE void load_q() {
    const OperandRows rows(block_.first_query + warpgroup_ * SIDE, block_.p.L);
    const auto nothing = [](auto, int, bool) {};
    uint32_t position[(S::HAS_Q_POS ? NARROW : S::WIDTH) / 4];
    if constexpr (S::HAS_Q_POS) {
      load_queries_and_positions<T, S::WIDTH>(block_.p, block_.b, block_.h, rows, position, q_content_, nothing);
      store_narrow_operand(position, q_position_address());
      fence_view_async_shared();  // plant: narrow-position-fence
      sync_warpgroup(warpgroup_);
    } else {
      load_queries<T, S::WIDTH>(block_.p, block_.b, block_.h, rows, position, q_content_, nothing);
      store_operand<S::WIDTH>(position, q_position_address());
      fence_view_async_shared();   // plant: position-fence
      sync_warpgroup(warpgroup_);  // plant: position-barrier
    }
  }
  TXL_DEVICE uint32_t q_position_address() const {
    return block_.address(S::q_position + warpgroup_ * S::R_TILE_BYTES);
  }

  // unskewed = (q + w) r^T, of the next tile of r.
  TXL_DEVICE void issue_qr(float (&unskewed)[32]) {
    const uint32_t r = block_.address(S::r + r_.consumer_wait() * S::R_TILE_BYTES);
    if constexpr (S::HAS_Q_POS)
      return gemm_ss<T, NARROW, Major::K, Major::K, ScaleOut::Zero, Swizzle::B32, Swizzle::B32>(
          unskewed, q_position_address(), r);
    gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(unskewed, q_position_address(), r);
  }
  // scores = or += (q + u) k^T, of the next tile of k.
  template <ScaleOut SCALE = ScaleOut::One>
  TXL_DEVICE void issue_qk(float (&scores)[32]) {
    const uint32_t k = block_.address(S::k + k_.consumer_wait() * S::TILE_BYTES);
    gemm_rs<T, Major::K, SCALE>(scores, q_content_, k);
  }
  // acc_o += P v, of the next tile of v.
  TXL_DEVICE void issue_pv(float (&acc_o)[S::WIDTH / 2], const uint32_t (&p)[16]) {
    const uint32_t v = block_.address(S::v + v_.consumer_wait() * S::TILE_BYTES);
    gemm_rs<T, Major::MN, ScaleOut::One>(acc_o, p, v);
  }
  // Stores the product that came with tile t, and loads the tile's position scores.
  TXL_DEVICE void skew(const float (&unskewed)[32], float (&scores)[32], int t) {
    skew_.store(unskewed, t);
    sync_warp();            // plant: skew-warp-barrier
    skew_.load(scores, t);  // releasing a stage orders this before what the next tile stores there
  }

  // Computes and stores the products that come with tiles t - 1 and t; the latter stays in `unskewed`.
  TXL_DEVICE void begin_positions(int t, float (&unskewed)[32]) {
    TXL_ROLLED
    for (int n = t - 1; n <= t; ++n) {
      issue_qr(unskewed);
      warpgroup_wait<0>();
      fence_operand(unskewed);
      r_.consumer_release();
      skew_.store(unskewed, n);
    }
  }

  // Computes the position scores of the first tile, and issues its content scores and the product with the tile of r
  // after.
  TXL_DEVICE void prologue(const TileRange& range, float (&unskewed)[32], float (&scores)[32]) {
    begin_positions(range.begin, unskewed);
    sync_warp();
    skew_.load(scores, range.begin);
    issue_qk(scores);
    issue_qr(unskewed);
  }

  // For each tile of keys, with queries scaled to base 2:
  //   S = skew((q + w) r^T) + (q + u) k^T,  P = 2^(S - max),  O = rescale O + P v
  TXL_DEVICE void mainloop(const TileRange& range, Softmax& softmax, float (&acc_o)[S::WIDTH / 2]) {
    float unskewed[32], scores[32], rescale[2];
    uint32_t p[16];
    prologue(range, unskewed, scores);
    warpgroup_wait<1>();
    fence_operand(scores);
    TXL_ROLLED
    for (int t = range.begin;; ++t) {  // left after the softmax of the last tile
      if (t > range.begin) v_.consumer_release();
      k_.consumer_release();
      softmax.update(scores, t, block_.first_key(0), rescale, [] {});
      pack_operand<T>(scores, p);
      rescale_o(acc_o, rescale);
      warpgroup_wait<0>();
      fence_operand(unskewed);
      r_.consumer_release();
      if (t + 1 == range.end) break;
      issue_pv(acc_o, p);  // of tile t, while the scores of tile t + 1 are skewed
      skew(unskewed, scores, t + 1);
      issue_qk(scores);
      issue_qr(unskewed);   // for tile t + 2
      warpgroup_wait<1>();  // plant: scores-wait
      fence_operand(acc_o);
      fence_operand(scores);
    }
    issue_pv(acc_o, p);
    warpgroup_wait<0>();  // plant: values-wait
    fence_operand(acc_o);
    v_.consumer_release();
  }

  // The same sums. When step t begins, the scores of tile t and the unskewed product for tile t + 1 are in registers,
  // and P v of tile t - 1 is in flight: the product is stored to the ring buffer among the exponentials of tile t.
  TXL_DEVICE void mainloop_interleaved(const TileRange& range, Softmax& softmax, float (&acc_o)[S::WIDTH / 2]) {
    float unskewed[32], scores[32], next_scores[32], rescale[2];
    uint32_t p[16];
    prologue(range, unskewed, scores);
    warpgroup_wait<0>();
    fence_operand(scores);
    fence_operand(unskewed);
    TXL_ROLLED
    for (int t = range.begin;; ++t) {  // left after the softmax of the last tile
      k_.consumer_release();
      r_.consumer_release();
      softmax.update(scores, t, block_.first_key(0), rescale, [&] { skew_.store(unskewed, t + 1); });
      sync_warp();                     // plant: interleaved-warp-barrier
      skew_.load(next_scores, t + 1);  // releasing a stage orders this before what the next tile stores there
      warpgroup_wait<0>();
      fence_operand(acc_o);
      if (t > range.begin) v_.consumer_release();
      pack_operand<T>(scores, p);
      rescale_o(acc_o, rescale);
      if (t + 1 == range.end) break;
      issue_qk(next_scores);
      issue_qr(unskewed);  // for tile t + 2
      issue_pv(acc_o, p);
      warpgroup_wait<1>();  // plant: interleaved-scores-wait
      fence_operand(next_scores);
      fence_operand(unskewed);
      TXL_UNROLL
      for (int n = 0; n < 32; ++n) scores[n] = next_scores[n];
    }
    issue_pv(acc_o, p);
    warpgroup_wait<0>();
    fence_operand(acc_o);
    v_.consumer_release();
  }

  // The same sums, where only the tiles of `positions` have position scores: tiles before, these, and tiles after.
  TXL_DEVICE void mainloop_with_q_pos(const TileRange& range, const TileRange& positions, RTileCursor& cursor,
                                      Softmax& softmax, float (&acc_o)[S::WIDTH / 2]) {
    float unskewed[32], scores[32] = {}, rescale[2];
    uint32_t p[16];
    const auto finish_product = [&] {
      warpgroup_wait<0>();
      fence_operand(unskewed);
      r_.consumer_release();
      ++cursor.next;
    };
    const auto prepare_positions = [&](int t) {  // of tile t, the first of `positions`
      cursor.skip(t - 1, [&] { r_.skip(); });
      begin_positions(t, unskewed);
      cursor.next += 2;
    };
    int t = range.begin;
    const auto finish_scores = [&] {  // of tile t, and P v of tile t - 1
      fence_operand(acc_o);
      fence_operand(scores);
      v_.consumer_release();
      k_.consumer_release();
      softmax.update(scores, t, block_.first_key(0), rescale, [] {});
      pack_operand<T>(scores, p);
      rescale_o(acc_o, rescale);
    };
    if (t == positions.begin) {
      prepare_positions(t);
      sync_warp();
      skew_.load(scores, t);
      issue_qr(unskewed);
      finish_product();
    }
    issue_qk(scores);
    warpgroup_wait<0>();
    fence_operand(scores);
    k_.consumer_release();
    softmax.update(scores, t, block_.first_key(0), rescale, [] {});
    pack_operand<T>(scores, p);

    ++t;
    TXL_ROLLED
    for (bool before = t <= positions.begin;; before = false) {
      const int end = before ? positions.begin : range.end;
      if (before || t >= positions.end) {
        TXL_ROLLED
        for (; t < end; ++t) {
          const int next = before && positions.begin - 1 < t + 2 ? positions.begin - 1 : t + 2;
          cursor.skip(next, [&] { r_.skip(); });
          issue_pv(acc_o, p);
          issue_qk<ScaleOut::Zero>(scores);
          warpgroup_wait<0>();  // plant: plain-scores-wait
          finish_scores();
        }
      }
      if (t == range.end) break;
      if (before) prepare_positions(t);
      TXL_ROLLED
      for (; t < positions.end; ++t) {
        issue_pv(acc_o, p);
        skew(unskewed, scores, t);
        issue_qk(scores);
        issue_qr(unskewed);   // for tile t + 1
        warpgroup_wait<1>();  // plant: positions-scores-wait
        finish_scores();
        finish_product();
      }
    }
    issue_pv(acc_o, p);
    warpgroup_wait<0>();
    fence_operand(acc_o);
    v_.consumer_release();
  }

  static TXL_DEVICE void rescale_o(float (&acc_o)[S::WIDTH / 2], const float (&rescale)[2]) {
    if (all_of_warp(rescale[0] == 1 && rescale[1] == 1)) return;  // mostly the largest score stays what it was
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 2; ++n) acc_o[n] *= rescale[n / 2 % 2];
  }

  const QueryBlock<S>& block_;
  int warpgroup_, warp_;
  Consumer<S::STAGES> k_;
  Consumer<S::V_STAGES> v_;
  Consumer<S::R_STAGES> r_;
  Skew skew_;
  uint32_t q_content_[S::WIDTH / 4];  // q + u
};

template <class S>
TXL_HOPPER_KERNEL(S::THREADS)
void forward_kernel(const TXL_CONSTANT PrefillProblem p) {
  TXL_SHARED_TILES(tiles);
  assume_threads<S::THREADS>();
  if constexpr (EARLY_START) launch_dependent_grids();
  const QueryBlock<S> block(p, tiles, block_z(), static_cast<uint32_t>(block_x()));
  if (thread() >= S::GROUPS * WARPGROUP) {
    warpgroup_reg_dealloc<S::PRODUCER_REGISTERS>();
    const int warp = broadcast_first_lane(thread() / WARP) - S::GROUPS * WARPGROUP_WARPS;
    if (warp == 0 && thread() % WARP == 0 && block.tiles) load_tiles(block);
    if (warp == 1) prepare_values(block);
  } else {
    warpgroup_reg_alloc<S::CONSUMER_REGISTERS>();
    ForwardConsumer<S>(block).run();
  }
}

}  // namespace txl_cuda
