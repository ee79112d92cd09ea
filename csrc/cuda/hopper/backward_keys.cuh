// Gradients of keys and values: a block of GROUPS x 64 keys walks the queries that see them, 64 at a
// time. Scores and dout.v are products with keys as rows, so P and dS are left factors in registers; six
// products a tile.
#pragma once
#include "backward_problem.h"
#include "loads.cuh"
#include "skew_transposed.cuh"
#include "softmax.cuh"

namespace txl_cuda {

template <class T_, int WIDTH_, int GROUPS_, int STAGES_, int R_STAGES_, bool IN_SHARED_>
struct KeysShape {
  using T = T_;
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_, STAGES = STAGES_, R_STAGES = R_STAGES_;
  static constexpr bool IN_SHARED = IN_SHARED_;  // k and v, which else stay in registers
  static constexpr int THREADS = (GROUPS + 1) * WARPGROUP;
  static constexpr int TILE_BYTES = WIDTH / SIDE * SUBTILE_BYTES, STATS = SIDE * 16;
  static_assert(R_STAGES > GROUPS + 1);
  // r's stages, 64 columns after 64; before the first lies the last once more: two successive tiles
  // are one factor of 128 rows.
  static constexpr int R_BYTES = (R_STAGES + 1) * SUBTILE_BYTES;

  static constexpr int skew = 0, position = skew + GROUPS * 2 * SkewTransposed::BYTES,
                       content = position + STAGES * TILE_BYTES;
  static constexpr int dout = content + STAGES * TILE_BYTES, r = dout + STAGES * TILE_BYTES,
                       k = r + WIDTH / SIDE * R_BYTES;
  static constexpr int v = k + (IN_SHARED ? GROUPS * TILE_BYTES : 0), stats = v + (IN_SHARED ? GROUPS * TILE_BYTES : 0);
  static constexpr int reach = stats + STAGES * STATS;  // by stage: largest low, smallest high of its queries
  static constexpr int barriers = reach + STAGES * 8, shared = barriers + 8 * 3 * (STAGES + R_STAGES);
  static_assert(shared <= MAX_SHARED);
};

// A block of keys, and which blocks of 64 queries may see them.
template <class S>
struct KeyBlock {
  const BackwardProblem& p;
  char* shared;
  Keys keys;
  int b = block_z(), h = block_y(), tile = block_x() * S::GROUPS;
  int first, steps;               // first query, blocks of 64
  PipelineBarriers<S::STAGES> q;  // its "clear" barriers: stats are there
  PipelineBarriers<S::R_STAGES> r;

  TXL_DEVICE KeyBlock(const BackwardProblem& problem, char* memory) : p(problem), shared(memory), keys(problem) {
    const int64_t key = max_of(first_key(0), 0), end = min_of(first_key(S::GROUPS), p.M + p.L);
    const int64_t from = max_of(key - p.M - p.right, 0);
    const int64_t to = min_of(p.L, end - p.M + p.left);
    first = static_cast<int>(from) / SIDE * SIDE;
    steps = from < to && p.T ? static_cast<int>(to - first + SIDE - 1) / SIDE : 0;
    q.first = reinterpret_cast<Barrier*>(shared + S::barriers), r.first = q.first + q.BARRIERS;
    if (thread() == S::GROUPS * WARPGROUP)
      for (const RowsMap* rows : {&p.position_rows, &p.content_rows, &p.dout_rows, &p.r_rows})
        prefetch_tma_descriptor(rows->map);
    if (thread() == 0) {
      q.init(S::GROUPS * WARPGROUP_WARPS), r.init(S::GROUPS * WARPGROUP_WARPS);
      fence_barrier_init();
    }
    barrier();
  }

  TXL_DEVICE int64_t bh() const { return b * p.H + h; }
  TXL_DEVICE int first_key(int t) const { return (tile + t) * SIDE - keys.before; }
  // The distance of row 0 of r's tile j: from the first query of step j to the block's first key.
  TXL_DEVICE int distance(int j) const { return static_cast<int>(p.M) + first + j * SIDE - first_key(0); }
  TXL_DEVICE uint32_t address(int at) const { return shared_address(shared) + static_cast<uint32_t>(at); }
};

template <class S>
TXL_DEVICE void load_queries_and_distances(const KeyBlock<S>& block) {
  const BackwardProblem& p = block.p;
  Producer<S::STAGES> q(block.q.empty());
  Producer<S::R_STAGES> r(block.r.empty());
  TXL_ROLLED
  for (int j = -S::GROUPS; j < block.steps; ++j) {
    const int n = r.producer_acquire(), first = static_cast<int>(p.zero_row) + block.distance(j);
    const bool is_last = n == S::R_STAGES - 1;
    Barrier* const there = block.r.full(n);
    barrier_arrive_and_expect_tx(there, is_last ? 2 * S::TILE_BYTES : S::TILE_BYTES);
    tma_load_tile<S, S::R_BYTES>(block.shared, S::r + (n + 1) * SUBTILE_BYTES, there, p.r_rows, first, block.h, 0);
    // plant: last-tile-of-r
    if (is_last) tma_load_tile<S, S::R_BYTES>(block.shared, S::r, there, p.r_rows, first, block.h, 0);
    if (j < 0) continue;
    const int m = q.producer_acquire(), row = block.first + j * SIDE;
    Barrier* const full = block.q.full(m);
    barrier_arrive_and_expect_tx(full, 3 * S::TILE_BYTES);
    tma_load_tile<S>(block.shared, S::position + m * S::TILE_BYTES, full, p.position_rows, row, block.h, block.b);
    tma_load_tile<S>(block.shared, S::dout + m * S::TILE_BYTES, full, p.dout_rows, row, block.h, block.b);
    tma_load_tile<S>(block.shared, S::content + m * S::TILE_BYTES, full, p.content_rows, row, block.h, block.b);
  }
}

// Loads each query's stats and its interval of keys to shared memory, 16 bytes a query; by a warp. The row of dout of a
// query that sees no key may hold anything and meets a weight of 0: it is cleared.
template <class S>
TXL_DEVICE void load_stats(const KeyBlock<S>& block) {
  const BackwardProblem& p = block.p;
  Producer<S::STAGES> q(block.q.empty());
  PipelineState<S::STAGES> state;
  TXL_ROLLED
  for (int step = 0; step < block.steps; ++step) {
    const int stage = q.producer_acquire();
    uint64_t seeing = 0;
    int largest = -1, min_end = 1 << 30;
    TXL_ROLLED
    for (int x = thread() % WARP; x < SIDE; x += WARP) {
      const int i = block.first + step * SIDE + x;
      const Seen seen = i < p.L ? visible(p, block.b, i) : Seen{0, 0, false};
      const Stats stats = p.stats[block.bh() * p.rows + i];
      const uint32_t at = block.address(S::stats + stage * S::STATS + x * 4);
      const int low = static_cast<int>(seen.low), high = static_cast<int>(seen.high);
      store_shared(at, stats.lse), store_shared<4 * SIDE>(at, stats.delta);
      store_shared<8 * SIDE>(at, static_cast<uint32_t>(low)), store_shared<12 * SIDE>(at, static_cast<uint32_t>(high));
      largest = low > largest ? low : largest, min_end = high < min_end ? high : min_end;
      seeing |= uint64_t{low < high || i >= p.L} << x;
    }
    largest = max_of_warp(largest), min_end = min_of_warp(min_end);
    if (thread() % WARP == 0) {
      const uint32_t at = block.address(S::reach + stage * 8);
      store_shared(at, static_cast<uint32_t>(largest)), store_shared<4>(at, static_cast<uint32_t>(min_end));
    }
    clear_next<S>(block.q, state, block.address(S::dout), or_of_warp(seeing));
  }
}

// Bit n: entry n of a fragment of keys [key, + 64) and queries [query, + 64) is kept. Four lanes hold a
// key's queries, two of every eight each; lane `own` of them draws those of columns 8 own and 8 own + 32.
TXL_DEVICE uint32_t draw_keep_mask_by_key(const Problem& p, int64_t bh, int64_t query, int64_t key) {
  const int own = thread() % 4;
  uint32_t mine = 0;  // byte 2 k + h: columns 8 own + 32 k, row h of the fragment's two
  TXL_ROLLED
  for (int n = 0; n < 4; ++n) mine |= keep_mask_of_eight(p, bh, query / 8 + own + n / 2 * 4, key + n % 2 * 8) << 8 * n;
  uint32_t keep_mask = 0;
  TXL_UNROLL
  for (int x = 0; x < 4; ++x) {
    const uint32_t theirs = (x ? shuffle_bits_xor(mine, x) : mine) >> 2 * own & 0x03030303u;
    const uint32_t pairs = theirs | theirs >> 6;  // of both rows, side by side
    keep_mask |= (pairs & 15) << 4 * (own ^ x) | (pairs >> 16 & 15) << (4 * (own ^ x) + 16);
  }
  return keep_mask;
}

// One warpgroup's keys.
template <class S>
class KeysGroup {
 public:
  using T = typename S::T;

  TXL_DEVICE explicit KeysGroup(const KeyBlock<S>& block)
      : p_(block.p),
        block_(block),
        group_(broadcast_first_lane(thread() / WARPGROUP)),
        warp_(broadcast_first_lane(thread() % WARPGROUP / WARP)),
        first_(block.first_key(group_)),
        is_memory_(block.tile + group_ < block.keys.memory_tiles),
        row_(is_memory_ ? first_ : first_ - static_cast<int>(p_.M)),
        q_(block.q.full(), block.q.empty()),
        stats_(block.q.clear(), block.q.empty()),
        r_(block.r.full(), block.r.empty()),
        r_below_(block.r.full(), block.r.empty()),
        skew_(block.address(0), S::skew + group_ * 2 * SkewTransposed::BYTES, warp_) {}

  TXL_DEVICE void run() {
    load_rows<T, S::WIDTH>(p_, is_memory_ ? p_.k_mem : p_.k, block_.b, block_.h, row_, rows(), k_);
    load_rows<T, S::WIDTH>(p_, is_memory_ ? p_.v_mem : p_.v, block_.b, block_.h, row_, rows(), v_);
    if constexpr (S::IN_SHARED) {
      store_operand<S::WIDTH>(k_, tile(S::k)), store_operand<S::WIDTH>(v_, tile(S::v));
      fence_view_async_shared();
      sync_warpgroup(group_);
    }
    float dk[S::WIDTH / 2] = {}, dv[S::WIDTH / 2] = {}, sums[2] = {};
    if (block_.steps) {
      for (int j = -S::GROUPS; j < -1 - group_; ++j) r_.advance(), r_below_.skip();
      r_.consumer_wait();
      r_.advance();
      TXL_ROLLED
      for (int step = 0; step < block_.steps; ++step) walk(step, dk, dv, sums);
      for (int j = block_.steps - 1 - group_; j < block_.steps; ++j) r_below_.skip();
    }
    write(is_memory_ ? p_.dk_mem : p_.dk, dk, 0.6931471805599453f);  // queries are scaled in base 2
    write(is_memory_ ? p_.dv_mem : p_.dv, dv, 1);
    if (p_.k_sums) write_sums(sums);
  }

 private:
  TXL_DEVICE int64_t rows() const { return is_memory_ ? p_.M : p_.L; }
  TXL_DEVICE uint32_t tile(int at) const { return block_.address(at + group_ * S::TILE_BYTES); }
  TXL_DEVICE uint32_t stage(int at, int n) const { return block_.address(at + n * S::TILE_BYTES); }

  // For each tile of queries, keys as rows:
  //   S^T = turn((q + w) r^T)^T + k (q + u)^T,  P^T = 2^(S^T - lse),  dS^T = P^T (v dout^T - delta)
  //   dv += P^T dout,  dk += dS^T (q + u)
  TXL_DEVICE void walk(int step, float (&dk)[S::WIDTH / 2], float (&dv)[S::WIDTH / 2], float (&sums)[2]) {
    const int n = q_.consumer_wait();
    float scores[32], weights[32];
    score(step, n, scores, weights);
    uint32_t factors[16], more[16];
    const bool all_seen = sees_all(n);
    if (!all_seen) hide(n, scores, -INFINITY);
    const uint32_t keep_mask = weigh(step, scores, factors);
    gemm_rs<T, Major::MN, ScaleOut::One>(dv, factors, stage(S::dout, n));
    warpgroup_wait<1>();  // plant: keys-dout-v-wait
    fence_operand(weights);
    if (!all_seen) hide(n, weights, 0);  // what a query does not see may be anything
    differentiate(n, scores, weights, keep_mask, sums);
    pack_operand<T>(weights, more);
    gemm_rs<T, Major::MN, ScaleOut::One>(dk, more, stage(S::content, n));
    warpgroup_wait<0>();
    fence_operand(dv);
    fence_operand(dk);
    stats_.advance();
    q_.consumer_release();  // plant: early-release-of-q
  }

  // Scores less lse; and dout.v, which is under way.
  TXL_DEVICE void score(int step, int n, float (&scores)[32], float (&weights)[32]) {
    float both[64], less[2];  // the blocks below and above
    const uint32_t position = stage(S::position, n), r = block_.address(S::r + r_.consumer_wait() * SUBTILE_BYTES);
    gemm_ss<T, SIDE, Major::K, Major::K, ScaleOut::Zero>(both, position, r);
    if constexpr (S::WIDTH > SIDE)
      // plant: second-half-of-r
      gemm_ss<T, SIDE, Major::K, Major::K, ScaleOut::One>(both, position + SUBTILE_BYTES, r + S::R_BYTES);
    issue_keys_by_queries(scores, k_, S::k, stage(S::content, n));
    stats_.consumer_wait();  // dout is clear, too; plant: stats-wait
    const int row = accumulator_row(warp_);
    for (int h = 0; h < 2; ++h) less[h] = load_shared(block_.address(S::stats + n * S::STATS + (row + 8 * h) * 4));
    warpgroup_wait<1>();  // plant: keys-positions-wait
    fence_operand(both);
    r_.advance();
    r_below_.consumer_release();
    skew_.put(both, less, step);
    issue_keys_by_queries(weights, v_, S::v, stage(S::dout, n));
    sync_warpgroup(group_);  // plant: keys-skew-barrier
    float skewed[32];
    skew_.get(skewed, step);
    warpgroup_wait<1>();  // plant: keys-content-wait
    fence_operand(scores);
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) scores[m] += skewed[m];
  }
  // Products of keys or values with a tile of queries.
  TXL_DEVICE void issue_keys_by_queries(float (&d)[32], const uint32_t (&rows)[S::WIDTH / 4], int at,
                                        uint32_t queries) const {
    if constexpr (S::IN_SHARED) return gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(d, tile(at), queries);
    gemm_rs<T, Major::K, ScaleOut::Zero>(d, rows, queries);
  }

  // Scores become weights, in `factors` as they meet dout. Returns which dropout keeps, by bit.
  TXL_DEVICE uint32_t weigh(int step, float (&s)[32], uint32_t (&factors)[16]) const {
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) s[m] = exp2_approx(s[m]);
    if (!p_.drop_below) {
      pack_operand<T>(s, factors);
      return 0;
    }
    const uint32_t keep_mask =
        draw_keep_mask_by_key(p_, block_.bh(), block_.first + step * SIDE, first_ + accumulator_row(warp_));
    float left[32];
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) left[m] = keep_mask >> m & 1 ? s[m] * p_.keep_scale : 0.f;
    pack_operand<T>(left, factors);
    return keep_mask;
  }

  // dout.v becomes dS without the scale.
  TXL_DEVICE void differentiate(int n, const float (&s)[32], float (&dp)[32], uint32_t keep_mask,
                                float (&sums)[2]) const {
    if (p_.drop_below) {
      TXL_UNROLL
      for (int m = 0; m < 32; ++m) dp[m] = keep_mask >> m & 1 ? dp[m] * p_.keep_scale : 0.f;
    }
    const uint32_t stats = block_.address(S::stats + n * S::STATS + thread() % 4 * 8);
    unroll<16>([&](auto number) {  // a query's entries of both keys
      constexpr int m = decltype(number)::value / 2 * 4 + decltype(number)::value % 2;
      const float delta = load_shared<4 * SIDE + m / 4 * 32 + m % 2 * 4>(stats);
      TXL_UNROLL
      for (int x = m; x < m + 4; x += 2) dp[x] = s[x] * (dp[x] - delta), sums[x / 2 % 2] += dp[x];
    });
  }

  // Every query of the stage sees every key.
  TXL_DEVICE bool sees_all(int n) const {
    const uint32_t reach = block_.address(S::reach + n * 8);
    const int largest = static_cast<int>(float_to_bits(load_shared(reach)));
    const int min_end = static_cast<int>(float_to_bits(load_shared<4>(reach)));
    return largest <= first_ && min_end >= first_ + SIDE;
  }
  // Entries of keys that a query does not see become `hidden`.
  TXL_DEVICE void hide(int n, float (&x)[32], float hidden) const {
    const uint32_t stats = block_.address(S::stats + n * S::STATS + thread() % 4 * 8);
    TXL_UNROLL
    for (int m = 0; m < 32; ++m) {
      const uint32_t at = stats + 8 * SIDE + m / 4 * 32 + m % 2 * 4;
      const int low = static_cast<int>(float_to_bits(load_shared(at)));
      const int high = static_cast<int>(float_to_bits(load_shared<4 * SIDE>(at)));
      const int key = first_ + accumulator_row(warp_) + m / 2 % 2 * 8;
      if (key < low || key >= high) x[m] = hidden;
    }
  }

  TXL_DEVICE void write(const View& to, const float (&x)[S::WIDTH / 2], float scale) const {
    if (!to.data) return;
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 2; n += 2) {
      const int row = row_ + accumulator_row(warp_) + n / 2 % 2 * 8, column = n / 4 * 8 + accumulator_column();
      if (row >= 0 && row < rows() && column < p_.D)
        *reinterpret_cast<uint32_t*>(const_cast<T*>(row_of<T>(to, block_.b, block_.h, row)) + column) =
            pack(T(), x[n] * scale, x[n + 1] * scale);
    }
  }

  // This warp's part of the content bias's gradient: column sums of dS times its keys.
  TXL_DEVICE void write_sums(float (&sums)[2]) const {
    TXL_UNROLL
    for (int h = 0; h < 2; ++h) {
      sums[h] += shuffle_xor(sums[h], 1);
      sums[h] += shuffle_xor(sums[h], 2);
      sums[h] *= p_.scale;
    }
    uint32_t k[S::WIDTH / 4];
    load_rows<T, S::WIDTH>(p_, is_memory_ ? p_.k_mem : p_.k, block_.b, block_.h, row_, rows(), k);
    const int64_t blocks = p_.k_parts / (S::GROUPS * WARPGROUP_WARPS);
    const int64_t part = ((block_.bh() * blocks + block_x()) * S::GROUPS + group_) * WARPGROUP_WARPS + warp_;
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 4; n += 2) {
      float total[2] = {};
      TXL_UNROLL
      for (int h = 0; h < 2; ++h) {
        float x[2];
        unpack(T(), k[n + h], x);
        if (sums[h] == 0) continue;  // a key that no query sees may hold anything
        total[0] += sums[h] * x[0], total[1] += sums[h] * x[1];
      }
      TXL_UNROLL
      for (int step = 4; step < WARP; step *= 2)
        total[0] += shuffle_xor(total[0], step), total[1] += shuffle_xor(total[1], step);
      const int column = operand_column(n);
      if (thread() % WARP < 4 && column < p_.D)
        p_.k_sums[part * p_.D + column] = total[0], p_.k_sums[part * p_.D + column + 1] = total[1];
    }
  }

  const BackwardProblem& p_;
  const KeyBlock<S>& block_;
  int group_, warp_, first_;
  bool is_memory_;
  int row_;  // of the first key in its tensor
  Consumer<S::STAGES> q_, stats_;
  Consumer<S::R_STAGES> r_, r_below_;
  SkewTransposed skew_;
  uint32_t k_[S::WIDTH / 4], v_[S::WIDTH / 4];
};

template <class S>
TXL_HOPPER_KERNEL(S::THREADS)
void backward_keys_kernel(const TXL_CONSTANT BackwardProblem p) {
  TXL_SHARED_TILES(tiles);
  const KeyBlock<S> block(p, tiles);
  if (thread() >= S::GROUPS * WARPGROUP) {
    if constexpr (S::GROUPS > 1) warpgroup_reg_dealloc<40>();
    const int warp = broadcast_first_lane(thread() / WARP) - S::GROUPS * WARPGROUP_WARPS;
    if (warp == 0 && thread() % WARP == 0 && block.steps) load_queries_and_distances(block);
    if (warp == 1) load_stats(block);
  } else {
    if constexpr (S::GROUPS > 1) warpgroup_reg_alloc<232>();
    KeysGroup<S>(block).run();
  }
}

}  // namespace txl_cuda
