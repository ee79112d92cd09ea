// Two consumer warpgroups of backward_queries.cuh with the same 64 queries, at width 128. Of each tile of 64 keys a
// warpgroup forms dS of 32 keys, and it has 64 of the 128 columns of dq and dr. Position scores and dS of both meet in
// shared memory: warp w of either has the same 16 queries, so the skew needs a barrier of these two warps, and dS one
// of all consumers. Products a tile are those of one warpgroup.
#pragma once
#include "queries_consumer.cuh"

namespace txl_cuda {

template <class S>
class QueriesHalvesConsumer : private QueriesConsumer<S> {
 public:
  using T = typename S::T;

  TXL_DEVICE QueriesHalvesConsumer(const BackwardProblem& p, const QueryBlock<S>& block)
      : QueriesConsumer<S>(p, block),
        half_(broadcast_first_lane(thread() / WARPGROUP)),
        ds_by_key_(block.address(S::ds_by_key) +
                   swizzled_offset(accumulator_row(this->warp_), half_ * KEYS + accumulator_column())),
        skew_(block.address(0), S::skew + this->warp_ * Skew::BYTES, this->warp_, half_ * OCTETS),
        unskew_(block.address(0), S::ds, this->warp_, half_ * OCTETS),
        boxes_(p, block, 0, this->warp_, broadcast_first_lane(thread() / WARP)) {}

  TXL_DEVICE void run() {
    const TileRange range = this->block_.tiles_of_warpgroup(0);
    load_operands();
    float dq[32] = {};
    if (this->block_.tiles) this->consume_tiles(range, [&] { mainloop(range, dq); });
    this->epilogue(dq, half_ * SIDE);
  }

 private:
  static constexpr int OCTETS = 4, KEYS = 8 * OCTETS;  // of a tile, for a warpgroup

  TXL_DEVICE void load_operands() {
    const QueryBlock<S>& block = this->block_;
    uint32_t q_position[S::WIDTH / 4];
    this->load_rows(q_position);
    if (half_ == 0) store_operand<S::WIDTH>(q_position, block.address(S::q_position));
    if (block.part == 0) {
      if (half_ == 0) this->template write_queries<S::WIDTH>(this->p_.q_content, this->p_.D, this->q_content_);
      if (half_ == 1) this->template write_queries<S::WIDTH>(this->p_.q_position, this->p_.D, q_position);
    }
    if (half_ == 0) Unskew::clear(block.address(S::ds) + static_cast<uint32_t>(this->warp_ * 16 * ROW_BYTES));
    fence_view_async_shared();  // plant: halves-operands-fence
    sync_consumers();           // plant: halves-operands-barrier
  }

  // Barriers of all consumers, and of this warp and the one that has the same queries.
  static TXL_DEVICE void sync_consumers() { named_barrier_sync<1, S::GROUPS * WARPGROUP>(); }
  TXL_DEVICE void sync_pair() const {
    if (this->warp_ == 0) return named_barrier_sync<2, 2 * WARP>();
    if (this->warp_ == 1) return named_barrier_sync<3, 2 * WARP>();
    if (this->warp_ == 2) return named_barrier_sync<4, 2 * WARP>();
    named_barrier_sync<5, 2 * WARP>();
  }

  // Byte addresses: rows of this warpgroup's keys (or distances) of a stage, and its columns.
  TXL_DEVICE uint32_t rows_of_half(uint32_t tile) const {
    return tile + static_cast<uint32_t>(half_ * KEYS * ROW_BYTES);
  }
  TXL_DEVICE uint32_t columns_of_half(uint32_t tile) const {
    return tile + static_cast<uint32_t>(half_ * SUBTILE_BYTES);
  }
  TXL_DEVICE uint32_t ds_by_distance(int t) const {
    return this->block_.address(S::ds) + this->slot(t) * SUBTILE_BYTES;
  }

  // unskewed = (q + w) r^T, of 32 distances of the next tile of r. The tile is released after its second use.
  TXL_DEVICE void issue_qr(float (&unskewed)[16]) {
    const uint32_t r = this->stage_of_r(this->r_.consumer_wait());
    this->r_.advance();
    gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(unskewed, this->block_.address(S::q_position),
                                                             rows_of_half(r));
  }
  // dq += G r, dr = G^T (q + w), of the tile of distances that is whole after tile t.
  TXL_DEVICE void issue_dq_dr(float (&dq)[32], float (&dr)[32], int t) {
    gemm_ss<T, SIDE, Major::K, Major::MN, ScaleOut::One>(dq, ds_by_distance(t),
                                                         columns_of_half(this->stage_of_r(this->r_for_dq_.stage())));
    gemm_ss<T, SIDE, Major::MN, Major::MN, ScaleOut::Zero>(dr, ds_by_distance(t),
                                                           columns_of_half(this->block_.address(S::q_position)));
  }
  TXL_DEVICE void finish_dq_dr(float (&dq)[32], float (&dr)[32], bool is_used_up = true) {
    fence_operand(dq);
    fence_operand(dr);
    if (is_used_up) this->r_for_dq_.consumer_release();
  }
  // Stores the product that came with tile t, and loads the tile's position scores.
  TXL_DEVICE void skew(const float (&unskewed)[16], float (&scores)[16], int t) {
    skew_.store(unskewed, t);
    sync_pair();  // plant: halves-skew-barrier
    skew_.load(scores, t);
  }

  // Scores and dP become dS without the scale and times ln 2.
  TXL_DEVICE void softmax_backward(float (&s)[16], float (&dp)[16], int t) const {
    if (this->p_.drop_below) {
      const uint32_t keep_mask =
          draw_keep_mask(this->p_, this->block_.bh(), this->query_, this->block_.first_key(t)) >> 16 * half_;
      TXL_UNROLL
      for (int n = 0; n < 16; ++n) dp[n] = keep_mask >> n & 1 ? dp[n] * this->p_.keep_scale : 0.f;
    }
    TXL_UNROLL
    for (int n = 0; n < 16; ++n)
      s[n] = exp2_approx(s[n] - this->shifted_lse_[n / 2 % 2]) * (dp[n] - this->delta_[n / 2 % 2]);
    const int begin = t * SIDE + half_ * KEYS, end = begin + KEYS;
    const int lows[2] = {this->low(0), this->low(1)}, highs[2] = {this->high(0), this->high(1)};
    if (all_of_warp(lows[0] <= begin && highs[0] >= end && lows[1] <= begin && highs[1] >= end)) return;
    TXL_UNROLL
    for (int n = 0; n < 16; ++n) {
      const int h = n / 2 % 2, key = begin + accumulator_column() + n / 4 * 8 + n % 2;
      if (key < lows[h] || key >= highs[h]) s[n] = 0;
    }
  }

  // Stores dS of this warpgroup's keys by distance and by key.
  TXL_DEVICE void store_ds(const uint32_t (&ds)[8], int t) const {
    unskew_.store(ds, t & 1);
    // Words n = 2 c + h are chunk 4 half + c, of 16 bytes, of row + 8 h; the swizzle is an exclusive or.
    unroll<8>([&](auto number) {
      constexpr int n = decltype(number)::value;
      store_shared<n % 2 * 8 * ROW_BYTES>(ds_by_key_ ^ (n / 2 * 16), ds[n]);
    });
  }

  // The step of queries_consumer.cuh; dq takes dS of both warpgroups, so its product waits for their barrier.
  TXL_DEVICE void step(float (&scores)[16], float (&dq)[32], float (&dr)[32], int t, int begin) {
    float dp[16], unskewed[16];
    uint32_t ds[8];
    gemm_rs<T, Major::K, ScaleOut::One>(scores, this->q_content_,
                                        rows_of_half(this->stage(S::k, this->k_.consumer_wait())));
    gemm_rs<T, Major::K, ScaleOut::Zero>(dp, this->dout_, rows_of_half(this->stage(S::v, this->v_.consumer_wait())));
    issue_dq_dr(dq, dr, t - 1);
    warpgroup_wait<2>();  // plant: halves-scores-wait
    fence_operand(scores);
    fence_operand(dp);
    this->v_.consumer_release();
    softmax_backward(scores, dp, t);
    TXL_UNROLL
    for (int n = 0; n < 8; ++n) ds[n] = pack(T(), scores[2 * n], scores[2 * n + 1]);
    warpgroup_wait<0>();  // plant: halves-distances-wait
    finish_dq_dr(dq, dr, t > begin);
    sync_consumers();  // all have read what is overwritten here; plant: halves-distances-barrier
    issue_qr(unskewed);
    store_ds(ds, t);
    fence_view_async_shared();  // plant: halves-distances-fence
    sync_consumers();           // plant: halves-whole-barrier
    gemm_ss<T, SIDE, Major::K, Major::MN, ScaleOut::One>(dq, this->block_.address(S::ds_by_key),
                                                         columns_of_half(this->stage(S::k, this->k_.stage())));
    if (t > begin) boxes_.add(this->p_, this->block_, dr, half_ * SIDE, t - 1);
    warpgroup_wait<1>();  // plant: halves-next-scores-wait
    fence_operand(unskewed);
    skew(unskewed, scores, t + 1);
    warpgroup_wait<0>();
    fence_operand(dq);
    this->k_.consumer_release();
  }

  TXL_DEVICE void mainloop(const TileRange& range, float (&dq)[32]) {
    float unskewed[16], scores[16], dr[32] = {};
    issue_qr(scores);
    issue_qr(unskewed);
    warpgroup_wait<0>();
    fence_operand(scores);
    fence_operand(unskewed);
    skew_.store(scores, range.begin - 1);
    skew(unskewed, scores, range.begin);
    TXL_ROLLED
    for (int t = range.begin; t < range.end; ++t) step(scores, dq, dr, t, range.begin);
    // The last two tiles of distances; the last one's other half is empty.
    TXL_ROLLED
    for (int t = range.end - 1; t <= range.end; ++t) {
      issue_dq_dr(dq, dr, t);
      warpgroup_wait<0>();
      finish_dq_dr(dq, dr);
      sync_consumers();
      const uint32_t zeros[8] = {};
      if (t < range.end) unskew_.store(zeros, range.end & 1);
      fence_view_async_shared();
      sync_consumers();
      boxes_.add(this->p_, this->block_, dr, half_ * SIDE, t);
    }
    boxes_.drain();
    this->r_for_dq_.consumer_release();  // the tile that was loaded after the last one
  }

  int half_;
  uint32_t ds_by_key_;  // address of this thread's first word of dS
  Skew skew_;
  Unskew unskew_;
  DrBoxes<S> boxes_;
};

}  // namespace txl_cuda
