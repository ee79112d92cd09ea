// Backward, gradients of keys and values: a block of keys, GROUPS warpgroups of 64, goes through the queries that see
// them, 64 at a step. Scores and dout v^T are products with keys as rows, so P and dS are A operands in registers. Six
// products a tile.
#pragma once
#include "backward_problem.h"
#include "config.cuh"
#include "fragments.cuh"
#include "key_bounds.cuh"
#include "softmax.cuh"

namespace txl_cuda {

// A block of keys, and which tiles of 64 queries may see them.
template <class S>
struct KeyBlock {
  const BackwardProblem& p;
  char* shared;
  KeyTiles key_tiles;
  int b = block_z(), h = block_y(), first_tile = block_x() * S::GROUPS;
  int first_query, steps;  // the first query, and the number of tiles of queries
  // A pipeline of queries, q + w, q + u and dout, which TMA loads, and one of their statistics, which the second
  // producer warp writes. Both have the same stages and empty barriers. Where the shape is COMPACT, q + w and dout have
  // pipelines of their own.
  StageBarriers<S::STAGES> q;
  StageBarriers<S::ONE_OR_STAGES> q_position, dout;
  StageBarriers<S::R_STAGES> r;

  TXL_DEVICE KeyBlock(const BackwardProblem& problem, char* memory) : p(problem), shared(memory), key_tiles(problem) {
    const int64_t key_begin = max_of(first_key(0), 0), key_end = min_of(first_key(S::GROUPS), p.M + p.L);
    const int64_t query_begin = max_of(key_begin - p.M - p.right, 0);
    const int64_t query_end = min_of(p.L, key_end - p.M + p.left);
    first_query = static_cast<int>(query_begin) / SIDE * SIDE;
    steps = query_begin < query_end && p.T ? static_cast<int>(query_end - first_query + SIDE - 1) / SIDE : 0;
    q.barriers = reinterpret_cast<Barrier*>(shared + S::barriers), r.barriers = q.barriers + q.BARRIERS;
    if constexpr (S::COMPACT)
      q_position.barriers = r.barriers + r.BARRIERS, dout.barriers = q_position.barriers + q_position.BARRIERS;
    if (thread() == S::GROUPS * WARPGROUP && p.T)
      for (const RowsMap* rows : {&p.q_position_rows, &p.q_content_rows, &p.dout_rows, &p.r_rows})
        prefetch_tma_descriptor(rows->map);
    if (thread() == 0) {
      constexpr int CONSUMERS = S::GROUPS * WARPGROUP_WARPS;
      q.init(CONSUMERS), r.init(CONSUMERS);
      if constexpr (S::COMPACT) q_position.init(CONSUMERS), dout.init(CONSUMERS);
      fence_barrier_init();
    }
    barrier();
  }

  // The full barriers of the pipeline of statistics: a stage's are written, and its rows of dout are cleared.
  TXL_DEVICE Barrier* stats_full() const { return q.prepared(); }
  // The heads of queries that read this head of keys are query_head(0) .. query_head(group() - 1).
  TXL_DEVICE int group() const {
    if constexpr (!S::HAS_Q_POS) return 1;
    return static_cast<int>(p.H) / static_cast<int>(p.Hkv);
  }
  TXL_DEVICE int query_head(int n) const { return h * group() + n; }  // plant: heads-of-queries
  TXL_DEVICE int64_t bh(int query_head) const { return b * p.H + query_head; }
  // The tiles of r that the block loads for a head. With position queries those of distances within the table, and one
  // more on either side.
  TXL_DEVICE TileRange tiles_of_r() const {
    if constexpr (!S::HAS_Q_POS) return {-S::GROUPS, steps};
    const int row = static_cast<int>(p.zero_row) + distance(0);  // of tile 0; tile j begins 64 j rows later
    const int begin = -floor_tiles(row + SIDE - 1) - 1;
    const int end = -floor_tiles(row - static_cast<int>(p.T)) + 1;  // plant: tiles-of-the-table-by-keys
    const TileRange range = {begin > -S::GROUPS ? begin : -S::GROUPS, end < steps ? end : steps};
    return range.begin < range.end ? range : TileRange{steps, steps};
  }
  // The index of the first key of the block's tile t.
  TXL_DEVICE int first_key(int t) const { return (first_tile + t) * SIDE - key_tiles.padding; }
  // The distance of row 0 of r's tile j: of the first query of step j to the block's first key.
  TXL_DEVICE int distance(int j) const { return static_cast<int>(p.M) + first_query + j * SIDE - first_key(0); }
  // The address of a byte of shared memory.
  TXL_DEVICE uint32_t address(int at) const { return shared_address(shared) + static_cast<uint32_t>(at); }
};

// Issues the loads of a tile of r to byte `to`.
template <class S>
TXL_DEVICE void load_r_to(const KeyBlock<S>& block, int to, Barrier* full, int row, int head) {
  const RowsMap& rows = block.p.r_rows;
  if constexpr (S::HAS_Q_POS) return tma_load_box(block.shared + to, rows.map, full, 0, row, head * rows.h, 0);
  tma_load_tile<S, S::R_SUBTILE_STRIDE>(block.shared, to, full, rows, row, head, 0);
}

// The producer: loads tiles of queries, and those of r, which begin GROUPS before. By one thread.
template <class S>
TXL_DEVICE void load_queries_and_distances(const KeyBlock<S>& block) {
  const BackwardProblem& p = block.p;
  Producer<S::STAGES> q(block.q.empty());
  Producer<S::R_STAGES> r(block.r.empty());
  const TileRange r_tiles = block.tiles_of_r();
  TXL_ROLLED
  for (int g = 0; g < block.group(); ++g) {
    const int head = block.query_head(g);
    const auto load_r = [&](int j) {
      const int n = r.producer_acquire(), distance = static_cast<int>(p.zero_row) + block.distance(j);
      const bool is_last = n == S::R_STAGES - 1;
      Barrier* const r_full = block.r.full(n);
      barrier_arrive_and_expect_tx(r_full, is_last ? 2 * S::R_TILE_BYTES : S::R_TILE_BYTES);
      load_r_to<S>(block, S::r + (n + 1) * S::R_SUBTILE, r_full, distance, head);
      if (is_last) load_r_to<S>(block, S::r, r_full, distance, head);  // plant: last-tile-of-r
    };
    TXL_ROLLED
    for (int j = -S::GROUPS; j < block.steps; ++j) {
      if (!S::HAS_Q_POS || (j >= r_tiles.begin && j < r_tiles.end)) load_r(j);
      if (j < 0) continue;
      const int m = q.producer_acquire(), row = block.first_query + j * SIDE, offset = m * S::TILE_BYTES;
      Barrier* const q_full = block.q.full(m);
      barrier_arrive_and_expect_tx(q_full, 2 * S::TILE_BYTES + S::R_TILE_BYTES);
      if constexpr (S::HAS_Q_POS) {
        tma_load_box(block.shared + S::q_position + m * NARROW_BYTES, p.q_position_rows.map, q_full, 0, row,
                     head * p.q_position_rows.h, block.b * p.q_position_rows.n);
      } else {
        tma_load_tile<S>(block.shared, S::q_position + offset, q_full, p.q_position_rows, row, head, block.b);
      }
      tma_load_tile<S>(block.shared, S::dout + offset, q_full, p.dout_rows, row, head, block.b);
      tma_load_tile<S>(block.shared, S::q_content + offset, q_full, p.q_content_rows, row, head, block.b);
    }
  }
}

// The same where q + w and dout have pipelines of their own.
template <class S>
TXL_DEVICE void load_compact(const KeyBlock<S>& block) {
  const BackwardProblem& p = block.p;
  Producer<1> q_position(block.q_position.empty()), dout(block.dout.empty());
  Producer<S::STAGES> q_content(block.q.empty());
  Producer<S::R_STAGES> r(block.r.empty());
  const auto load = [&](auto& producer, const auto& barriers, int at, const RowsMap& rows, int row, int b) {
    const int stage = producer.producer_acquire();
    load_tile<S>(block.shared, at + stage * S::TILE_BYTES, barriers.full(stage), rows, row, block.h, b);
  };
  TXL_ROLLED
  for (int j = -S::GROUPS; j < block.steps; ++j) {
    load(r, block.r, S::r, p.r_rows, static_cast<int>(p.zero_row) + block.distance(j), 0);
    if (j < 0) continue;
    const int row = block.first_query + j * SIDE;
    load(q_position, block.q_position, S::q_position, p.q_position_rows, row, block.b);
    load(q_content, block.q, S::q_content, p.q_content_rows, row, block.b);
    load(dout, block.dout, S::dout, p.dout_rows, row, block.b);
  }
}

// The second producer warp: writes each query's statistics and the bounds of the keys that it sees to shared memory,
// and clears the rows of dout of queries that see no key, which may hold anything and meet a weight of 0.
template <class S>
TXL_DEVICE void prepare_stats(const KeyBlock<S>& block) {
  const BackwardProblem& p = block.p;
  Producer<S::STAGES> producer(block.q.empty());
  PipelineState<S::STAGES> state;
  PipelineState<1> dout_state;
  TXL_ROLLED
  for (int n = 0; n < block.group() * block.steps; ++n) {
    const int step = S::HAS_Q_POS ? n % block.steps : n,
              head = S::HAS_Q_POS ? block.query_head(n / block.steps) : block.h;
    const int stage = producer.producer_acquire();
    uint64_t sees_keys = 0;
    int max_low = -1, min_high = 1 << 30;
    TXL_ROLLED
    for (int x = thread() % WARP; x < SIDE; x += WARP) {
      const int i = block.first_query + step * SIDE + x;
      const Seen seen = i < p.L ? visible(p, block.b, i) : Seen{0, 0, false};
      const Stats stats = p.stats[block.bh(head) * p.rows + i];
      const uint32_t at = block.address(S::stats + stage * S::STATS_BYTES + x * 4);
      const int low = static_cast<int>(seen.low), high = static_cast<int>(seen.high);
      store_shared(at, stats.lse), store_shared<4 * SIDE>(at, stats.delta);
      store_shared<8 * SIDE>(at, static_cast<uint32_t>(low)), store_shared<12 * SIDE>(at, static_cast<uint32_t>(high));
      max_low = low > max_low ? low : max_low, min_high = high < min_high ? high : min_high;
      sees_keys |= uint64_t{low < high || i >= p.L} << x;
    }
    max_low = max_of_warp(max_low), min_high = min_of_warp(min_high);
    if (thread() % WARP == 0) {
      const uint32_t at = block.address(S::common_bounds + stage * 8);
      store_shared(at, static_cast<uint32_t>(max_low)), store_shared<4>(at, static_cast<uint32_t>(min_high));
    }
    if constexpr (S::COMPACT) {
      sync_warp();
      if (thread() % WARP == 0) barrier_arrive(block.q.prepared(stage));
      prepare_next<S::TILE_BYTES>(block.dout, dout_state, block.address(S::dout), or_of_warp(sees_keys));
    } else {
      prepare_next<S::TILE_BYTES>(block.q, state, block.address(S::dout), or_of_warp(sees_keys));
    }
  }
}

// Bit n of the result: dropout keeps element n of this thread's fragment of keys [key, + 64) and queries [query, + 64).
// The four lanes that hold the queries of one key, two of every eight each, share the work, as one draw serves eight
// queries: lane n of the four draws for columns 8 n .. and 8 n + 32 .., and each takes its queries' bits of the others.
TXL_DEVICE uint32_t draw_keep_mask_by_key(const Problem& p, int64_t bh, int64_t query, int64_t key) {
  const int quad_lane = thread() % 4;
  uint32_t drawn = 0;  // byte 2 k + h: columns 8 quad_lane + 32 k, row h of the fragment's two
  TXL_ROLLED
  for (int n = 0; n < 4; ++n)
    drawn |= keep_mask_of_eight(p, bh, query / 8 + quad_lane + n / 2 * 4, key + n % 2 * 8) << 8 * n;
  uint32_t keep_mask = 0;
  TXL_UNROLL
  for (int x = 0; x < 4; ++x) {
    const uint32_t bits = (x ? shuffle_bits_xor(drawn, x) : drawn) >> 2 * quad_lane & 0x03030303u;
    const uint32_t pairs = bits | bits >> 6;  // of both rows, side by side
    keep_mask |= (pairs & 15) << 4 * (quad_lane ^ x) | (pairs >> 16 & 15) << (4 * (quad_lane ^ x) + 16);
  }
  return keep_mask;
}

// A consumer warpgroup: 64 keys.
template <class S>
class KeysConsumer {
 public:
  using T = typename S::T;

  TXL_DEVICE explicit KeysConsumer(const KeyBlock<S>& block)
      : p_(block.p),
        block_(block),
        warpgroup_(broadcast_first_lane(thread() / WARPGROUP)),
        warp_(broadcast_first_lane(thread() % WARPGROUP / WARP)),
        first_key_(block.first_key(warpgroup_)),
        is_memory_(block.first_tile + warpgroup_ < block.key_tiles.memory_tiles),
        first_row_(is_memory_ ? first_key_ : first_key_ - static_cast<int>(p_.M)),
        q_(block.q.full(), block.q.empty()),
        stats_(block.stats_full(), block.q.empty()),
        r_(block.r.full(), block.r.empty()),
        r_below_(block.r.full(), block.r.empty()),
        q_position_(block.q_position.full(), block.q_position.empty()),
        dout_(block.dout.prepared(), block.dout.empty()),
        skew_(block.address(0), S::skew + warpgroup_ * S::SKEW_BUFFERS * SkewTransposed::BYTES, warp_) {}

  TXL_DEVICE void run() {
    const OperandRows own(first_row_, rows());
    const OperandWords<T> keys(is_memory_ ? p_.k_mem : p_.k, block_.b, block_.h, own);
    const OperandWords<T> values(is_memory_ ? p_.v_mem : p_.v, block_.b, block_.h, own);
    for_each_word<S::WIDTH>(own, p_.D, [&](auto number, int half, bool exists) {
      constexpr int m = decltype(number)::value;
      k_[2 * m + half] = keys.template load<m>(half, exists);
      v_[2 * m + half] = values.template load<m>(half, exists);
    });
    if constexpr (S::IN_SHARED) {
      store_operand<S::WIDTH>(k_, tile(S::k)), store_operand<S::WIDTH>(v_, tile(S::v));
      fence_view_async_shared();
      sync_warpgroup(warpgroup_);
    }
    float dk[S::WIDTH / 2] = {}, dv[S::WIDTH / 2] = {}, ds_sums[2] = {};
    if constexpr (S::HAS_Q_POS) {
      for (int g = 0; block_.steps && g < block_.group(); ++g) consume_head(block_.query_head(g), dk, dv);
    } else if (block_.steps) {
      for (int j = -S::GROUPS; j < -1 - warpgroup_; ++j) r_.advance(), r_below_.skip();
      r_.consumer_wait();
      r_.advance();
      TXL_ROLLED
      for (int t = 0; t < block_.steps; ++t) step(t, block_.h, dk, dv, ds_sums);
      for (int j = block_.steps - 1 - warpgroup_; j < block_.steps; ++j) r_below_.skip();
    }
    write(is_memory_ ? p_.dk_mem : p_.dk, dk, 0.6931471805599453f);  // queries are scaled in base 2
    write(is_memory_ ? p_.dv_mem : p_.dv, dv, 1);
    if (p_.k_sums) write_sums(ds_sums);
  }

 private:
  TXL_DEVICE int64_t rows() const { return is_memory_ ? p_.M : p_.L; }
  // Addresses of this warpgroup's tile, of a stage's tile, and of statistics of a stage.
  TXL_DEVICE uint32_t tile(int at) const { return block_.address(at + warpgroup_ * S::TILE_BYTES); }
  TXL_DEVICE uint32_t stage(int at, int n) const { return block_.address(at + n * S::TILE_BYTES); }
  TXL_DEVICE uint32_t stats_of_columns(int n) const {
    return block_.address(S::stats + n * S::STATS_BYTES + thread() % 4 * 8);
  }

  // Uses the queries of one of the heads that read these keys. Only some of their tiles have position scores.
  TXL_DEVICE void consume_head(int head, float (&dk)[S::WIDTH / 2], float (&dv)[S::WIDTH / 2]) {
    const TileRange r_tiles = block_.tiles_of_r();
    TileRange positions = {r_tiles.begin + 1 + warpgroup_, r_tiles.end + warpgroup_};
    if (positions.begin < 0) positions.begin = 0;
    if (positions.end > block_.steps) positions.end = block_.steps;
    if (positions.begin >= positions.end) positions = {block_.steps, block_.steps};
    // Tile j of r is the one above at step j + warpgroup, and the one below at the next.
    int next = warpgroup_ - S::GROUPS;
    const auto skip_r = [&](int end) {
      TXL_ROLLED
      for (; next < end; ++next)
        if (next - warpgroup_ >= r_tiles.begin && next - warpgroup_ < r_tiles.end) r_.advance(), r_below_.skip();
    };
    float ds_sums[2] = {};  // for the gradient of a content bias, of which there is none
    TXL_ROLLED
    for (int t = 0; t < block_.steps; ++t) {
      has_positions_ = positions.begin <= t && t < positions.end;
      if (!has_positions_) skip_r(t + 1 < positions.begin || t >= positions.end ? t + 1 : t);
      if (t == positions.begin) {
        skip_r(t - 1);
        r_.consumer_wait();
        r_.advance();
      }
      step(t, head, dk, dv, ds_sums);
      if (has_positions_) next = t + 1;
      if (t == positions.end - 1 && has_positions_) r_below_.consumer_release();
    }
    skip_r(r_tiles.end + warpgroup_);
  }

  // For each tile of queries, keys as rows:
  //   S^T = skew((q + w) r^T)^T + k (q + u)^T,  P^T = 2^(S^T - lse),  dS^T = P^T (v dout^T - delta)
  //   dv += P^T dout,  dk += dS^T (q + u)
  TXL_DEVICE void step(int t, int head, float (&dk)[S::WIDTH / 2], float (&dv)[S::WIDTH / 2], float (&ds_sums)[2]) {
    const int n = S::COMPACT ? q_.stage() : q_.consumer_wait();
    float scores[32], dp[32];
    if constexpr (S::COMPACT) {
      compute_scores_compact(n, scores, dp);
    } else if constexpr (S::HAS_Q_POS) {
      compute_scores_with_q_pos(n, scores, dp);
    } else {
      compute_scores(t, n, scores, dp);
    }
    uint32_t p_operand[16], ds_operand[16];
    const bool all_visible = sees_all(n);
    if (!all_visible) mask(n, scores, -INFINITY);
    const uint32_t keep_mask = recompute_p(t, head, scores, p_operand);
    gemm_rs<T, Major::MN, ScaleOut::One>(dv, p_operand, stage(S::dout, S::COMPACT ? 0 : n));
    warpgroup_wait<1>();  // plant: keys-dout-v-wait
    fence_operand(dp);
    if (!all_visible) mask(n, dp, 0);  // what a query does not see may be anything
    softmax_backward(n, scores, dp, keep_mask, ds_sums);
    pack_operand<T>(dp, ds_operand);
    gemm_rs<T, Major::MN, ScaleOut::One>(dk, ds_operand, stage(S::q_content, n));
    if constexpr (S::COMPACT) {
      warpgroup_wait<1>();  // plant: compact-dv-wait
      fence_operand(dv);
      dout_.consumer_release();
    }
    warpgroup_wait<0>();
    fence_operand(dv);
    fence_operand(dk);
    stats_.advance();
    q_.consumer_release();  // plant: early-release-of-q
  }

  // Computes scores less lse, and issues dp = v dout^T.
  TXL_DEVICE void compute_scores(int t, int n, float (&scores)[32], float (&dp)[32]) {
    float unskewed[64], lse[2];  // of the tile of r below, then of the one above
    const uint32_t q_position = stage(S::q_position, n), r = block_.address(S::r + r_.consumer_wait() * SUBTILE_BYTES);
    gemm_ss<T, SIDE, Major::K, Major::K, ScaleOut::Zero>(unskewed, q_position, r);
    if constexpr (S::WIDTH > SIDE) {
      const uint32_t q_next = q_position + SUBTILE_BYTES, r_next = r + S::R_SUBTILE_STRIDE;  // plant: second-half-of-r
      gemm_ss<T, SIDE, Major::K, Major::K, ScaleOut::One>(unskewed, q_next, r_next);
    }
    issue_keys_by_queries(scores, k_, S::k, stage(S::q_content, n));
    stats_.consumer_wait();  // dout is cleared, too; plant: stats-wait
    const int row = accumulator_row(warp_);
    for (int h = 0; h < 2; ++h) lse[h] = load_shared(block_.address(S::stats + n * S::STATS_BYTES + (row + 8 * h) * 4));
    warpgroup_wait<1>();  // plant: keys-positions-wait
    fence_operand(unskewed);
    r_.advance();
    r_below_.consumer_release();
    skew_.store(unskewed, unskewed + 32, lse, t);
    issue_keys_by_queries(dp, v_, S::v, stage(S::dout, n));
    sync_warpgroup(warpgroup_);  // plant: keys-skew-barrier
    float skewed[32];
    skew_.load(skewed, t);
    warpgroup_wait<1>();  // plant: keys-content-wait
    fence_operand(scores);
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) scores[m] += skewed[m];
  }
  // The same where q + w and dout have pipelines of their own. Position scores are the initial value of the scores:
  // registers hold the products of positions, or the scores and dp.
  TXL_DEVICE void compute_scores_compact(int n, float (&scores)[32], float (&dp)[32]) {
    float below[32], above[32], lse[2];
    q_position_.consumer_wait();
    const uint32_t q_position = stage(S::q_position, 0), r_above = stage(S::r, r_.consumer_wait());
    gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(below, q_position, stage(S::r, r_below_.stage()));
    gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(above, q_position, r_above);
    stats_.consumer_wait();
    const int row = accumulator_row(warp_);
    for (int h = 0; h < 2; ++h) lse[h] = load_shared(block_.address(S::stats + n * S::STATS_BYTES + (row + 8 * h) * 4));
    warpgroup_wait<0>();  // plant: compact-positions-wait
    fence_operand(below);
    fence_operand(above);
    q_position_.consumer_release();
    r_.advance();
    r_below_.consumer_release();
    sync_warpgroup(warpgroup_);  // all have loaded what is overwritten here; plant: compact-skew-reuse
    skew_.store(below, above, lse, 0);
    sync_warpgroup(warpgroup_);  // plant: compact-skew-barrier
    skew_.load(scores, 0);
    q_.consumer_wait();  // plant: compact-content-wait
    issue_keys_by_queries<ScaleOut::One>(scores, k_, S::k, stage(S::q_content, n));
    dout_.consumer_wait();  // plant: compact-dout-wait
    issue_keys_by_queries(dp, v_, S::v, stage(S::dout, 0));
    warpgroup_wait<1>();  // plant: compact-scores-wait
    fence_operand(scores);
  }
  // The same where some tiles have no position scores.
  TXL_DEVICE void compute_scores_with_q_pos(int n, float (&scores)[32], float (&dp)[32]) {
    stats_.consumer_wait();  // plant: positions-stats-wait
    if (has_positions_) {
      float unskewed[64], lse[2];
      const uint32_t r = block_.address(S::r + r_.consumer_wait() * NARROW_BYTES);
      gemm_ss<T, NARROW, Major::K, Major::K, ScaleOut::Zero, Swizzle::B32, Swizzle::B32>(
          unskewed, block_.address(S::q_position + n * NARROW_BYTES), r);
      const int row = accumulator_row(warp_);
      for (int h = 0; h < 2; ++h)
        lse[h] = load_shared(block_.address(S::stats + n * S::STATS_BYTES + (row + 8 * h) * 4));
      warpgroup_wait<0>();  // plant: keys-narrow-wait
      fence_operand(unskewed);
      r_.advance();
      r_below_.consumer_release();
      skew_.store(unskewed, unskewed + 32, lse, ++skews_);  // plant: skew-count
      sync_warpgroup(warpgroup_);                           // plant: positions-skew-barrier
      skew_.load(scores, skews_);
    } else {
      const uint32_t stats = stats_of_columns(n);
      TXL_UNROLL
      for (int m = 0; m < 32; m += 4) {
        float lse[2];
        load_shared_pair(stats + m / 4 * 32, lse[0], lse[1]);
        scores[m] = scores[m + 2] = -lse[0], scores[m + 1] = scores[m + 3] = -lse[1];
      }
    }
    issue_keys_by_queries<ScaleOut::One>(scores, k_, S::k, stage(S::q_content, n));
    issue_keys_by_queries(dp, v_, S::v, stage(S::dout, n));
    warpgroup_wait<1>();  // plant: keys-scores-wait
    fence_operand(scores);
  }
  // d = or += k or v times a tile of queries, transposed.
  template <ScaleOut SCALE = ScaleOut::Zero>
  TXL_DEVICE void issue_keys_by_queries(float (&d)[32], const uint32_t (&keys)[S::WIDTH / 4], int at,
                                        uint32_t queries) const {
    if constexpr (S::IN_SHARED) return gemm_ss<T, S::WIDTH, Major::K, Major::K, SCALE>(d, tile(at), queries);
    gemm_rs<T, Major::K, SCALE>(d, keys, queries);
  }

  // Scores become weights P, which p_operand has as they multiply dout. Returns which of them dropout keeps, by bit.
  TXL_DEVICE uint32_t recompute_p(int t, int head, float (&s)[32], uint32_t (&p_operand)[16]) const {
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) s[m] = exp2_approx(s[m]);
    if (!p_.drop_below) {
      pack_operand<T>(s, p_operand);
      return 0;
    }
    const uint32_t keep_mask =
        draw_keep_mask_by_key(p_, block_.bh(head), block_.first_query + t * SIDE, first_key_ + accumulator_row(warp_));
    float dropped[32];
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) dropped[m] = keep_mask >> m & 1 ? s[m] * p_.keep_scale : 0.f;
    pack_operand<T>(dropped, p_operand);
    return keep_mask;
  }

  // dP becomes dS without the scale. ds_sums: of each of this thread's two keys, over its queries.
  TXL_DEVICE void softmax_backward(int n, const float (&p)[32], float (&dp)[32], uint32_t keep_mask,
                                   float (&ds_sums)[2]) const {
    if (p_.drop_below) {
      TXL_UNROLL
      for (int m = 0; m < 32; ++m) dp[m] = keep_mask >> m & 1 ? dp[m] * p_.keep_scale : 0.f;
    }
    const uint32_t stats = stats_of_columns(n);
    unroll<16>([&](auto number) {  // a query's elements of both keys
      constexpr int m = decltype(number)::value / 2 * 4 + decltype(number)::value % 2;
      const float delta = load_shared<4 * SIDE + m / 4 * 32 + m % 2 * 4>(stats);
      TXL_UNROLL
      for (int x = m; x < m + 4; x += 2) dp[x] = p[x] * (dp[x] - delta), ds_sums[x / 2 % 2] += dp[x];
    });
  }

  // Whether every query of the stage sees every key of this warpgroup.
  TXL_DEVICE bool sees_all(int n) const {
    const uint32_t bounds = block_.address(S::common_bounds + n * 8);
    const int max_low = static_cast<int>(float_to_bits(load_shared(bounds)));
    const int min_high = static_cast<int>(float_to_bits(load_shared<4>(bounds)));
    return max_low <= first_key_ && min_high >= first_key_ + SIDE;
  }
  // Elements of keys that their query does not see become `masked`.
  TXL_DEVICE void mask(int n, float (&x)[32], float masked) const {
    const uint32_t stats = stats_of_columns(n);
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) {
      const uint32_t at = stats + 8 * SIDE + m / 4 * 32 + m % 2 * 4;
      const int low = static_cast<int>(float_to_bits(load_shared(at)));
      const int high = static_cast<int>(float_to_bits(load_shared<4 * SIDE>(at)));
      const int key = first_key_ + accumulator_row(warp_) + m / 2 % 2 * 8;
      if (key < low || key >= high) x[m] = masked;
    }
  }

  TXL_DEVICE void write(const View& to, const float (&x)[S::WIDTH / 2], float scale) const {
    if (!to.data) return;
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int row = first_row_ + accumulator_row(warp_) + 8 * h;
      const bool exists = row >= 0 && row < rows();
      T* const begin = const_cast<T*>(row_of<T>(to, block_.b, block_.h, exists ? row : 0)) + accumulator_column();
      store_row<S::WIDTH>(begin, static_cast<int>(p_.D), exists,
                          [&](int m) { return pack(T(), x[4 * m + 2 * h] * scale, x[4 * m + 2 * h + 1] * scale); });
    }
  }

  // Writes this warp's part of the content bias's gradient: sums of dS over queries, times its keys.
  TXL_DEVICE void write_sums(float (&ds_sums)[2]) const {
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      ds_sums[h] += shuffle_xor(ds_sums[h], 1);
      ds_sums[h] += shuffle_xor(ds_sums[h], 2);
      ds_sums[h] *= p_.scale;
    }
    const int64_t blocks = p_.k_parts / (S::GROUPS * WARPGROUP_WARPS);
    const int64_t part =
        ((block_.bh(block_.h) * blocks + block_x()) * S::GROUPS + warpgroup_) * WARPGROUP_WARPS + warp_;
    OperandRows seen(first_row_, rows());
    for (int h = 0; h < 2; ++h) seen.exists[h] &= ds_sums[h] != 0;  // what no query sees may hold anything
    const OperandWords<T> keys(is_memory_ ? p_.k_mem : p_.k, block_.b, block_.h, seen);
    uint32_t k[S::WIDTH / 4];
    for_each_word<S::WIDTH>(seen, p_.D, [&](auto number, int half, bool exists) {
      constexpr int m = decltype(number)::value;
      k[2 * m + half] = keys.template load<m>(half, exists);
    });
    float sums[S::WIDTH / 4];
    TXL_UNROLL
    for (int m = 0; m < S::WIDTH / 8; ++m) {
      float x[2], y[2];
      unpack(T(), k[2 * m], x), unpack(T(), k[2 * m + 1], y);
      for (int e = 0; e < 2; ++e) sums[2 * m + e] = ds_sums[0] * x[e] + ds_sums[1] * y[e];
    }
    store_column_sums(p_.k_sums + part * p_.D, static_cast<int>(p_.D), sums);
  }

  const BackwardProblem& p_;
  const KeyBlock<S>& block_;
  int warpgroup_, warp_, first_key_;
  bool is_memory_;
  int first_row_;  // of the first key in its tensor
  // With position queries: whether the present step has position scores, and the number of those that had.
  bool has_positions_ = false;
  int skews_ = 0;
  Consumer<S::STAGES> q_, stats_;
  // Two tiles of r are used at a time, numbers j - 1 (below) and j (above): r_ waits for the one above, r_below_
  // releases.
  Consumer<S::R_STAGES> r_, r_below_;
  Consumer<S::ONE_OR_STAGES> q_position_, dout_;  // where the shape is COMPACT
  SkewTransposed skew_;
  uint32_t k_[S::WIDTH / 4], v_[S::WIDTH / 4];
};

template <class S>
TXL_HOPPER_KERNEL(S::THREADS)
void backward_keys_kernel(const TXL_CONSTANT BackwardProblem p) {
  TXL_SHARED_TILES(tiles);
  assume_threads<S::THREADS>();
  if constexpr (EARLY_START) launch_dependent_grids();
  const KeyBlock<S> block(p, tiles);
  if (thread() >= S::GROUPS * WARPGROUP) {
    // What backward_queries_kernel writes, producers alone read. plant: early-keys
    if constexpr (EARLY_START) wait_on_dependent_grids();
    if constexpr (S::GROUPS > 1) warpgroup_reg_dealloc<S::PRODUCER_REGISTERS>();
    const int warp = broadcast_first_lane(thread() / WARP) - S::GROUPS * WARPGROUP_WARPS;
    if (warp == 0 && thread() % WARP == 0 && block.steps) {
      if constexpr (S::COMPACT)
        load_compact(block);
      else
        load_queries_and_distances(block);
    }
    if (warp == 1) prepare_stats(block);
  } else {
    if constexpr (S::GROUPS > 1) warpgroup_reg_alloc<S::CONSUMER_REGISTERS>();
    KeysConsumer<S>(block).run();
  }
}

}  // namespace txl_cuda
