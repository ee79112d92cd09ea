// A consumer warpgroup of backward_queries.cuh: 64 queries and their part of the tiles of keys, as in forward.cuh. Six
// products a tile. dS of a tile goes to distances (unskew.cuh); a tile of 64 distances, once whole, gives G r to dq and
// G^T (q + w) to dr, which leaves by one of the epilogues (dr_epilogue.cuh).
#pragma once
#include "dr_in_halves.cuh"
#include "dr_narrow.cuh"
#include "dr_transposed.cuh"
#include "fragments.cuh"
#include "softmax.cuh"
#include "unskew.cuh"

namespace txl_cuda {

// The second producer warp: clears rows of k and of r that no query of the block sees, which meet a dS of 0.
template <class S>
TXL_DEVICE void prepare_keys_and_distances(const QueryBlock<S>& block) {
  PipelineState<S::STAGES> k;
  PipelineState<S::R_STAGES> r;
  const TileRange r_tiles = block.tiles_of_r();
  TXL_ROLLED
  for (int j = -S::QUERY_GROUPS; j <= block.tiles; ++j) {
    if (!S::HAS_Q_POS || (j >= r_tiles.begin && j < r_tiles.end))
      prepare_next<S::R_TILE_BYTES>(block.r, r, block.address(S::r), block.visible_distances(j));
    if (j >= 0 && j < block.tiles) prepare_next<S::TILE_BYTES>(block.k, k, block.address(S::k), block.visible_keys(j));
  }
}

constexpr float LOG2_LN2 = -0.5287663729448977f;
// The largest |lse|, in base 2: its rounding changes weights by 1% here, as much as that of bfloat16; gradients of what
// is larger are NaN rather than wrong.
constexpr float MAX_LSE = 65536;

// A consumer warpgroup: 64 queries.
template <class S>
class QueriesConsumer {
 public:
  using T = typename S::T;
  using DrEpilogue = std::conditional_t<S::HAS_Q_POS, DrNarrow<S>,
                                        std::conditional_t<S::DR_TRANSPOSED, DrTransposed<S>, DrInHalves<S>>>;
  static constexpr int DR = S::HAS_Q_POS ? NARROW / 2 : S::WIDTH / 2;  // floats of dr that a thread holds

  TXL_DEVICE QueriesConsumer(const BackwardProblem& p, const QueryBlock<S>& block)
      : p_(p),
        block_(block),
        warpgroup_(S::QUERY_GROUPS == S::GROUPS ? broadcast_first_lane(thread() / WARPGROUP) : 0),
        warp_(broadcast_first_lane(thread() % WARPGROUP / WARP)),
        first_query_(block.first_query + warpgroup_ * SIDE),
        query_(first_query_ + accumulator_row(warp_)),
        k_(block.k.prepared(), block.k.empty()),
        v_(block.v.full(), block.v.empty()),
        r_(block.r.prepared(), block.r.empty()),
        r_for_dq_(block.r.prepared(), block.r.empty()),
        skew_(block.address(0), skew_ring(), warp_),
        unskew_(block.address(0), S::ds + warpgroup_ * 2 * SUBTILE_BYTES, warp_),
        dr_(p, block, warpgroup_, warp_) {}

  TXL_DEVICE void run() {
    const TileRange range = block_.tiles_of_warpgroup(warpgroup_);
    load_operands();
    float dq[S::WIDTH / 2] = {};
    if constexpr (S::HAS_Q_POS) {
      float dq_pos[NARROW / 2] = {};
      if (block_.tiles) consume_tiles_with_q_pos(range, dq, dq_pos);
      write_dq(dq, scale_log2(p_), p_.D, p_.dq, p_.dq_parts);
      write_dq(dq_pos, position_scale_log2(p_), p_.Dr, p_.dq_pos, p_.dq_pos_parts);
    } else {
      // plant: gradient-block-without-tiles
      if (block_.tiles) consume_tiles(range, [&] { mainloop(range, dq, dq); });
      epilogue(dq);
    }
  }

 protected:
  // Uses the tiles of `range`, by mainloop(), and releases the others of the block unused. Tile j of r is the new one
  // at tile j + warpgroup_ of the keys.
  template <class Mainloop>
  TXL_DEVICE void consume_tiles(const TileRange& range, const Mainloop& mainloop) {
    for (int j = -S::QUERY_GROUPS; j < -1 - warpgroup_; ++j) skip_r();
    int t = 0;
    TXL_ROLLED
    for (; t < range.begin; ++t) k_.skip(), skip_r(), v_.skip();
    int j = t - 1 - warpgroup_;
    if (range.begin < range.end) {
      mainloop();
      t = range.end, j = t + 1 - warpgroup_;
    }
    TXL_ROLLED
    for (; t < block_.tiles; ++t, ++j) k_.skip(), skip_r(), v_.skip();
    TXL_ROLLED
    for (; j <= block_.tiles; ++j) skip_r();
  }
  TXL_DEVICE void skip_r() { r_.advance(), r_for_dq_.skip(); }

  // The same where only some tiles of keys have position scores: tiles before, these, and tiles after.
  TXL_DEVICE void consume_tiles_with_q_pos(const TileRange& range, float (&dq)[S::WIDTH / 2],
                                           float (&dq_pos)[NARROW / 2]) {
    const TileRange r_tiles = block_.tiles_of_r(), positions = block_.position_tiles(range, r_tiles, warpgroup_);
    RTileCursor cursor = {r_tiles, warpgroup_, warpgroup_ - S::GROUPS};
    const auto skip = [&] { skip_r(); };
    cursor.skip(-1, skip);
    int t = 0;
    TXL_ROLLED
    for (; t < range.begin; ++t) k_.skip(), cursor.skip(t, skip), v_.skip();
    TXL_ROLLED
    for (bool before = true;; before = false) {
      const int end = before ? positions.begin : range.end;
      TXL_ROLLED
      for (; t < end; ++t) {
        cursor.skip(before && positions.begin - 1 < t + 2 ? positions.begin - 1 : t + 2, skip);
        step_without_positions(dq, t);
      }
      if (t >= range.end) break;
      cursor.skip(t - 1, skip);
      skew_ = Skew(block_.address(0), opaque(skew_ring()), warp_);
      unskew_ = Unskew(block_.address(0), opaque(S::ds + warpgroup_ * 2 * SUBTILE_BYTES), warp_);
      mainloop(positions, dq, dq_pos);
      t = positions.end, cursor.next = t + 1;
      sync_warp();  // nvcc returns to the loop's head from the last release separately for the lane that released
    }
    TXL_ROLLED
    for (; t < block_.tiles; ++t) k_.skip(), cursor.skip(t + 2, skip), v_.skip();
    cursor.skip(r_tiles.end + warpgroup_, skip);
  }

  // For a tile without position scores: S = q k^T,  P = 2^(S - lse),  dS = P (dout v^T - delta),  dq += dS k
  TXL_DEVICE void step_without_positions(float (&dq)[S::WIDTH / 2], int t) {
    float scores[32], dp[32];
    uint32_t ds[16];
    issue_qk<ScaleOut::Zero>(scores);
    issue_dout_v(dp);
    warpgroup_wait<0>();  // plant: plain-tile-wait
    fence_operand(scores);
    fence_operand(dp);
    v_.consumer_release();
    softmax_backward(scores, dp, t);
    pack_operand<T>(scores, ds);
    gemm_rs<T, Major::MN, ScaleOut::One>(dq, ds, stage(S::k, k_.stage()));
    warpgroup_wait<0>();
    fence_operand(dq);
    k_.consumer_release();
  }

  // Loads the operands of products; writes what backward_keys_kernel reads of these queries; clears the ring of dS.
  TXL_DEVICE void load_operands() {
    if constexpr (S::HAS_Q_POS) return load_operands_with_q_pos();
    load_rows(q_position_);
    store_operand<S::WIDTH>(q_position_, tile(S::q_position));
    if constexpr (S::IN_SHARED) {
      store_operand<S::WIDTH>(q_content_, tile(S::q_content));
      store_operand<S::WIDTH>(dout_, tile(S::dout));
    }
    if (block_.part == 0)
      write_queries<S::WIDTH>(p_.q_content, p_.D, q_content_),
          write_queries<S::WIDTH>(p_.q_position, p_.D, q_position_);
    Unskew::clear(ds_ring() + static_cast<uint32_t>(warp_ * 16 * ROW_BYTES));
    fence_view_async_shared();   // plant: operands-fence
    sync_warpgroup(warpgroup_);  // plant: operands-barrier
    if constexpr (S::DR_TRANSPOSED) load_operand_transposed(tile(S::q_position), q_position_transposed_);
  }

  // The same with position queries. dout is multiplied by the keys' share beside the sink.
  TXL_DEVICE void load_operands_with_q_pos() {
    uint32_t position[NARROW / 4];
    float share[2];
    load_rows(position, share);
    store_narrow_operand(position, block_.address(S::q_position + warpgroup_ * S::R_TILE_BYTES));
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 4; ++n) {
      float x[2];
      unpack(T(), dout_[n], x);
      dout_[n] = pack(T(), share[n % 2] * x[0], share[n % 2] * x[1]);
    }
    if constexpr (S::IN_SHARED) {
      store_operand<S::WIDTH>(q_content_, tile(S::q_content));
      store_operand<S::WIDTH>(dout_, tile(S::dout));
    }
    if (block_.part == 0) {
      write_queries<S::WIDTH>(p_.q_content, p_.D, q_content_), write_queries<NARROW>(p_.q_position, NARROW, position);
      if (p_.has_sink) write_queries<S::WIDTH>(p_.dout_beside_sink, p_.D, dout_);
    }
    Unskew::clear(ds_ring() + static_cast<uint32_t>(warp_ * 16 * ROW_BYTES));
    fence_view_async_shared();  // plant: narrow-operands-fence
    sync_warpgroup(warpgroup_);
  }

  // The keys' share of the weights beside the sink. Writes the gradient of the sink.
  TXL_DEVICE float share_beside_sink(int i, float lse, float dout_out, bool empty) const {
    if constexpr (!S::HAS_Q_POS) return 1;
    if (!p_.has_sink || i >= p_.L) return 1;
    const float sink = row_of<float>(p_.sink, block_.b, block_.h, 0)[i * p_.sink.s2] * LOG2_E;
    const float share = empty ? 0.f : 1 / (1 + exp2f(sink - lse));
    if (p_.dsink.data && block_.part == 0 && thread() % 4 == 0)
      const_cast<float*>(row_of<float>(p_.dsink, block_.b, block_.h, 0))[i * p_.dsink.s2] =
          empty ? 0.f : (share - 1) * dout_out;
    return share;
  }

  // Loads q + w, q + u and dout, and computes statistics. Rows of queries that see no key may hold anything, and meet a
  // dS of 0: they become 0.
  template <int WORDS>
  TXL_DEVICE void load_rows(uint32_t (&position)[WORDS], float (&share)[2]) {
    OperandRows rows(first_query_, p_.L);
    for (int h = 0; h < 2; ++h) rows.exists[h] = low(h) < high(h);
    const OperandWords<T> dout(p_.dout, block_.b, block_.h, rows), out(p_.out, block_.b, block_.h, rows);
    uint32_t out_words[S::WIDTH / 4];
    const auto beside = [&](auto number, int half, bool exists) {
      constexpr int m = decltype(number)::value;
      dout_[2 * m + half] = dout.template load<m>(half, exists);
      out_words[2 * m + half] = out.template load<m>(half, exists);
    };
    if constexpr (WORDS == NARROW / 4) {
      load_queries_and_positions<T, S::WIDTH>(p_, block_.b, block_.h, rows, position, q_content_, beside);
    } else {
      load_queries<T, S::WIDTH>(p_, block_.b, block_.h, rows, position, q_content_, beside);
    }
    compute_stats(out_words, share);
  }
  TXL_DEVICE void load_rows(uint32_t (&position)[S::WIDTH / 4]) {
    float share[2];
    load_rows(position, share);
  }

  // delta = share dout . out - dlse, and lse in base 2. share: of the keys beside the sink, 1 without.
  TXL_DEVICE void compute_stats(const uint32_t (&out)[S::WIDTH / 4], float (&share)[2]) {
    float delta[2] = {};
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 4; ++n) {
      float x[2], y[2];
      unpack(T(), out[n], x), unpack(T(), dout_[n], y);
      delta[n % 2] += x[0] * y[0] + x[1] * y[1];
    }
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      delta[h] += shuffle_xor(delta[h], 1);
      delta[h] += shuffle_xor(delta[h], 2);
      const int i = query_ + 8 * h;
      const int64_t at = block_.bh() * p_.L + i;
      const float lse = i < p_.L ? p_.lse[at] * 1.4426950408889634f : -INFINITY;
      // Weights of a query that sees nothing are 0; out and lse are not to be trusted there.
      const bool empty = low(h) >= high(h) || lse == -INFINITY;
      share[h] = share_beside_sink(i, lse, delta[h], empty);
      // plant: delta-beside-sink
      delta_[h] = empty ? 0.f : share[h] * delta[h] - (p_.dlse ? p_.dlse[at] : 0.f);
      const float base = empty ? INFINITY : lse > MAX_LSE || lse < -MAX_LSE ? NAN : lse;
      shifted_lse_[h] = base - LOG2_LN2;
      if (thread() % 4 == 0 && writes_for_keys()) p_.stats[block_.bh() * p_.rows + i] = {base, delta_[h]};
    }
  }

  // Whether this warpgroup writes what backward_keys_kernel reads of its queries.
  TXL_DEVICE bool writes_for_keys() const {
    return block_.part == 0 && (S::QUERY_GROUPS == S::GROUPS || thread() < WARPGROUP);
  }
  // Writes an A operand to [B, H, rows, columns].
  template <int WIDTH>
  TXL_DEVICE void write_queries(void* to, int64_t columns, const uint32_t (&a)[WIDTH / 4]) const {
    TXL_UNROLL
    for (int half = 0; half < 2; ++half) {
      T* const row = static_cast<T*>(to) + (block_.bh() * p_.rows + query_ + 8 * half) * columns;
      store_row<WIDTH>(row + accumulator_column(), static_cast<int>(columns), true,
                       [&](int m) { return a[2 * m + half]; });
    }
  }

  // Keys that this thread's queries see, counted from the first of the part's tiles. Read anew: registers are scarce.
  TXL_DEVICE int low(int h) const { return block_.key_low(query_ + 8 * h - block_.first_query, 0); }
  TXL_DEVICE int high(int h) const { return block_.key_high(query_ + 8 * h - block_.first_query, 0); }

  // The warp's ring of the skew.
  TXL_DEVICE int skew_ring() const { return S::skew + (warpgroup_ * WARPGROUP_WARPS + warp_) * Skew::BYTES; }
  // Addresses: this warpgroup's tile, a stage's tile, dS by distance, and the tile of it that is whole after tile t of
  // the keys.
  TXL_DEVICE uint32_t tile(int at) const { return block_.address(at + warpgroup_ * S::TILE_BYTES); }
  TXL_DEVICE uint32_t stage(int at, int n) const { return block_.address(at + n * S::TILE_BYTES); }
  TXL_DEVICE uint32_t stage_of_r(int n) const { return block_.address(S::r + n * S::R_TILE_BYTES); }
  TXL_DEVICE uint32_t ds_ring() const { return block_.address(S::ds + warpgroup_ * 2 * SUBTILE_BYTES); }
  TXL_DEVICE uint32_t ds_by_distance(int t) const { return ds_ring() + slot(t) * SUBTILE_BYTES; }
  TXL_DEVICE uint32_t slot(int t) const { return static_cast<uint32_t>(t & 1); }  // plant: distances-slot

  // unskewed = (q + w) r^T, of the next tile of r. The tile is released after its second use.
  TXL_DEVICE void issue_qr(float (&unskewed)[32]) {
    const uint32_t r = stage_of_r(r_.consumer_wait());
    r_.advance();  // plant: early-release-of-r
    if constexpr (S::HAS_Q_POS) {
      const uint32_t q_position = block_.address(S::q_position + warpgroup_ * S::R_TILE_BYTES);
      return gemm_ss<T, NARROW, Major::K, Major::K, ScaleOut::Zero, Swizzle::B32, Swizzle::B32>(unskewed, q_position,
                                                                                                r);
    }
    if constexpr (S::IN_SHARED)
      return gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(unskewed, tile(S::q_position), r);
    gemm_rs<T, Major::K, ScaleOut::Zero>(unskewed, q_position_, r);
  }
  // scores = or += (q + u) k^T.
  template <ScaleOut SCALE = ScaleOut::One>
  TXL_DEVICE void issue_qk(float (&scores)[32]) {
    const uint32_t k = stage(S::k, k_.consumer_wait());
    if constexpr (S::IN_SHARED) return gemm_ss<T, S::WIDTH, Major::K, Major::K, SCALE>(scores, tile(S::q_content), k);
    gemm_rs<T, Major::K, SCALE>(scores, q_content_, k);
  }
  // dp = dout v^T.
  TXL_DEVICE void issue_dout_v(float (&dp)[32]) {
    const uint32_t v = stage(S::v, v_.consumer_wait());
    if constexpr (S::IN_SHARED) return gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(dp, tile(S::dout), v);
    gemm_rs<T, Major::K, ScaleOut::Zero>(dp, dout_, v);
  }
  // dq_r += G r, dr = G^T (q + w) or its transpose, of the tile of distances that is whole after tile t. dq_r is the
  // gradient of position queries, else of all of q.
  TXL_DEVICE void issue_dq_dr(float (&dq_r)[DR], float (&dr)[DR], int t) {
    const uint32_t r = stage_of_r(r_for_dq_.stage());
    if constexpr (S::HAS_Q_POS) {
      const uint32_t q_position = block_.address(S::q_position + warpgroup_ * S::R_TILE_BYTES);
      gemm_ss<T, 64, Major::K, Major::MN, ScaleOut::One, Swizzle::B128, Swizzle::B32>(dq_r, ds_by_distance(t), r);
      return gemm_ss<T, 64, Major::MN, Major::MN, ScaleOut::Zero, Swizzle::B128, Swizzle::B32>(dr, ds_by_distance(t),
                                                                                               q_position);
    }
    gemm_ss<T, 64, Major::K, Major::MN, ScaleOut::One>(dq_r, ds_by_distance(t), r);
    if constexpr (S::DR_TRANSPOSED)
      return gemm_rs<T, Major::MN, ScaleOut::Zero>(dr, q_position_transposed_, ds_by_distance(t));
    gemm_ss<T, 64, Major::MN, Major::MN, ScaleOut::Zero>(dr, ds_by_distance(t), tile(S::q_position));
  }
  // After these products: the tile of r has been used twice, but at the first step.
  TXL_DEVICE void finish_dq_dr(float (&dq_r)[DR], float (&dr)[DR], bool is_used_up = true) {
    fence_operand(dq_r);
    fence_operand(dr);
    if (is_used_up) r_for_dq_.consumer_release();
  }
  // Stores the product that came with tile t, and loads the tile's position scores.
  TXL_DEVICE void skew(const float (&unskewed)[32], float (&scores)[32], int t) {
    skew_.store(unskewed, t);
    sync_warp();
    skew_.load(scores, t);  // releasing a stage orders this before what the next tile stores there
  }

  // Scores and dP become dS without the scale and times ln 2, as scaled queries want it for r; dq is scaled at the end.
  TXL_DEVICE void softmax_backward(float (&s)[32], float (&dp)[32], int t) const {
    if (p_.drop_below) {
      const uint32_t keep_mask = draw_keep_mask(p_, block_.bh(), query_, block_.first_key(t));
      TXL_UNROLL
      for (int n = 0; n < 32; ++n) dp[n] = keep_mask >> n & 1 ? dp[n] * p_.keep_scale : 0.f;
    }
    TXL_UNROLL
    for (int n = 0; n < 32; ++n) s[n] = exp2_approx(s[n] - shifted_lse_[n / 2 % 2]) * (dp[n] - delta_[n / 2 % 2]);
    const int tile_begin = t * SIDE, tile_end = tile_begin + SIDE;
    const int lows[2] = {low(0), low(1)}, highs[2] = {high(0), high(1)};
    if (all_of_warp(lows[0] <= tile_begin && highs[0] >= tile_end && lows[1] <= tile_begin && highs[1] >= tile_end))
      return;
    TXL_UNROLL
    for (int n = 0; n < 32; ++n) {
      const int h = n / 2 % 2, key = tile_begin + accumulator_column() + n / 4 * 8 + n % 2;
      if (key < lows[h] || key >= highs[h]) s[n] = 0;
    }
  }

  // For each tile of keys, with G = unskew(dS):
  //   S = skew((q + w) r^T) + (q + u) k^T,  P = 2^(S - lse),  dS = P (dout v^T - delta)
  //   dq += dS k + G r,  dr += G^T (q + w)
  // Step t computes dS of tile t, whose position scores are in `scores`; dq and dr of the tile of distances that was
  // whole after tile t - 1; and the position scores of tile t + 1. The first tile of all is
  // `begin`: dS before it is 0, and so are its products, as a copy of the step without them would be as many
  // instructions again.
  TXL_DEVICE void step(float (&scores)[32], float (&dq)[S::WIDTH / 2], float (&dq_r)[DR], float (&dr)[DR], int t,
                       int begin) {
    float dp[32], unskewed[32];
    uint32_t ds[16];
    issue_qk(scores);
    issue_dout_v(dp);
    if (t - 2 >= begin) dr_.flush(p_, block_, dr, t - 2);
    issue_dq_dr(dq_r, dr, t - 1);
    dr_.acquire();
    warpgroup_wait<2>();  // plant: tile-scores-wait
    fence_operand(scores);
    fence_operand(dp);
    v_.consumer_release();
    softmax_backward(scores, dp, t);
    pack_operand<T>(scores, ds);
    warpgroup_wait<0>();                // plant: distances-wait
    finish_dq_dr(dq_r, dr, t > begin);  // plant: first-release-of-r
    sync_warpgroup(warpgroup_);         // all have read what is overwritten here; plant: distances-barrier
    issue_qr(unskewed);
    unskew_.store(ds, t & 1);  // plant: operand-read
    dr_.store(dr);
    gemm_rs<T, Major::MN, ScaleOut::One>(dq, ds, stage(S::k, k_.stage()));
    fence_view_async_shared();  // plant: distances-fence
    sync_warpgroup(warpgroup_);
    if (t > begin) dr_.start(p_, block_, dr, t - 1);
    warpgroup_wait<1>();  // plant: next-scores-wait
    fence_operand(unskewed);
    skew(unskewed, scores, t + 1);
    warpgroup_wait<0>();
    fence_operand(dq);
    k_.consumer_release();
  }

  TXL_DEVICE void mainloop(const TileRange& range, float (&dq)[S::WIDTH / 2], float (&dq_r)[DR]) {
    float unskewed[32], scores[32], dr[DR] = {};
    TXL_ROLLED
    for (int t = range.begin - 1; t <= range.begin; ++t) {
      issue_qr(unskewed);
      warpgroup_wait<0>();
      fence_operand(unskewed);
      skew_.store(unskewed, t);
    }
    sync_warp();
    skew_.load(scores, range.begin);
    TXL_ROLLED
    for (int t = range.begin; t < range.end; ++t) step(scores, dq, dq_r, dr, t, range.begin);
    // The last two tiles of distances; the last one's other half is empty.
    TXL_ROLLED
    for (int t = range.end - 1;; ++t) {
      if (t - 1 >= range.begin) dr_.flush(p_, block_, dr, t - 1);
      if (t > range.end) break;
      issue_dq_dr(dq_r, dr, t);
      warpgroup_wait<0>();
      finish_dq_dr(dq_r, dr);
      dr_.acquire();
      sync_warpgroup(warpgroup_);
      dr_.store(dr);
      const uint32_t zeros[16] = {};
      if (t < range.end) unskew_.store(zeros, range.end & 1);
      fence_view_async_shared();
      sync_warpgroup(warpgroup_);
      dr_.start(p_, block_, dr, t);
    }
    dr_.drain();
    r_for_dq_.consumer_release();  // the tile that was loaded after the last one
  }

  // Multiplies dq of so many columns by a scale and writes it, or its part where keys are split. dq: of columns begin
  // and on.
  template <int N>
  TXL_DEVICE void write_dq(float (&dq)[N], float scale, int64_t columns, const View& to, float* parts,
                           int begin = 0) const {
    TXL_UNROLL
    for (int n = 0; n < N; ++n) dq[n] *= scale;
    if (!to.data) return;
    const int left = static_cast<int>(columns) - begin, first_column = begin + accumulator_column();
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int i = query_ + 8 * h;
      const bool exists = i < p_.L;
      if (p_.parts > 1) {
        float* const row = parts + ((block_.part * p_.B * p_.H + block_.bh()) * p_.rows + i) * columns;
        store_float_row<2 * N>(row + first_column, left, exists, [&](int m) { return dq + 4 * m + 2 * h; });
      } else {
        T* const row = const_cast<T*>(row_of<T>(to, block_.b, block_.h, exists ? i : 0));
        store_row<2 * N>(row + first_column, left, exists,
                         [&](int m) { return pack(T(), dq[4 * m + 2 * h], dq[4 * m + 2 * h + 1]); });
      }
    }
  }

  // Writes dq, or its part where keys are split, and its sums over this warp's queries. dq: of columns begin and on.
  template <int N>
  TXL_DEVICE void epilogue(float (&dq)[N], int begin = 0) const {
    write_dq(dq, scale_log2(p_), p_.D, p_.dq, p_.dq_parts, begin);
    if (!p_.q_sums) return;
    const int64_t blocks = p_.rows / S::QUERIES * p_.parts;
    const int64_t block = block_.first_query / S::QUERIES * p_.parts + block_.part;
    const int64_t at = ((block_.bh() * blocks + block) * S::QUERY_GROUPS + warpgroup_) * WARPGROUP_WARPS + warp_;
    float sums[N / 2];
    TXL_UNROLL
    for (int n = 0; n < N / 2; ++n) sums[n] = dq[n / 2 * 4 + n % 2] + dq[n / 2 * 4 + n % 2 + 2];
    store_column_sums(p_.q_sums + at * p_.D + begin, static_cast<int>(p_.D) - begin, sums);
  }

  const BackwardProblem& p_;
  const QueryBlock<S>& block_;
  int warpgroup_, warp_, first_query_, query_;  // first query of the warpgroup, this thread's first
  Consumer<S::STAGES> k_;
  Consumer<S::V_STAGES> v_;
  Consumer<S::R_STAGES> r_, r_for_dq_;  // the first use of a tile of r, for scores, and the second
  Skew skew_;
  Unskew unskew_;
  DrEpilogue dr_;
  uint32_t q_content_[S::WIDTH / 4], q_position_[S::WIDTH / 4], dout_[S::WIDTH / 4];  // q + u, q + w, dout
  uint32_t q_position_transposed_[16];                                                // (q + w)^T
  float shifted_lse_[2], delta_[2];                                                   // lse, less log2 ln 2
};

}  // namespace txl_cuda
