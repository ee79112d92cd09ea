// Gradients of queries and of r: a block of GROUPS x 64 queries walks its tiles of keys, as in
// forward.cuh. Six products a tile; dS of a tile goes to distances (unskew.cuh), where a block of 64,
// once whole, gives G.r to dq and G^T.(q + w) to dr, which is added up in global memory. With q + w in
// registers dr comes transposed: (q + w)^T.G reads only G from shared memory.
#pragma once
#include "backward_problem.h"
#include "query_block.cuh"
#include "skew.cuh"
#include "softmax.cuh"
#include "unskew.cuh"

namespace txl_cuda {

template <class T_, int WIDTH_, int GROUPS_, int STAGES_, int V_STAGES_, int R_STAGES_, bool IN_SHARED_>
struct QueriesShape {
  using T = T_;
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_, STAGES = STAGES_, R_STAGES = R_STAGES_;
  static constexpr int V_STAGES = V_STAGES_;
  static constexpr bool IN_SHARED = IN_SHARED_;  // queries and dout, which else stay in registers
  // dr leaves by TMA reductions. With queries in registers it comes transposed, and a warpgroup's tile leaves at once;
  // else each warp's 16 rows leave in two halves of 64 columns in turn.
  static constexpr bool DR_IN_HALVES = IN_SHARED;
  static constexpr int THREADS = (GROUPS + 1) * WARPGROUP, QUERIES = GROUPS * SIDE;
  static constexpr int TILE_BYTES = WIDTH / SIDE * SUBTILE_BYTES;
  static constexpr int DR_ROWS = DR_IN_HALVES ? 16 : SIDE, DR_BOX = DR_ROWS * ROW_BYTES;  // of a reduction; bytes
  static_assert(R_STAGES > GROUPS + 2);  // a tile of r is used again two tiles of keys later

  static constexpr int distances = 0, ring = distances + GROUPS * 2 * SUBTILE_BYTES;
  static constexpr int k = ring + GROUPS * WARPGROUP_WARPS * RING, v = k + STAGES * TILE_BYTES,
                       r = v + V_STAGES * TILE_BYTES;
  static constexpr int position = r + R_STAGES * TILE_BYTES, content = position + GROUPS * TILE_BYTES;
  static constexpr int dout = content + (IN_SHARED ? GROUPS * TILE_BYTES : 0);
  // Width 64: where a group's dr waits to be added up, columns 0 to 31 and 32 to 63. q + w, which lay in the first, is
  // in registers by then.
  static constexpr int dr_low = position, dr_high = dout;
  // In halves: a warp's two boxes, of 32 columns each.
  static constexpr int dr = dout + GROUPS * (IN_SHARED ? TILE_BYTES : SUBTILE_BYTES);
  static constexpr int barriers = dr + (DR_IN_HALVES ? GROUPS * WARPGROUP_WARPS * 2 * DR_BOX : 0);
  static constexpr int BARRIERS = 3 * (STAGES + V_STAGES + R_STAGES);
  static constexpr int seen = barriers + BARRIERS * 8, shared = seen + QUERIES * 8;
  static_assert(shared <= MAX_SHARED);
};

// Clears rows of k and of r that no query sees: they may hold anything, and meet a dS of 0.
template <class S>
TXL_DEVICE void clear_keys_and_distances(const QueryBlock<S>& block) {
  PipelineState<S::STAGES> k;
  PipelineState<S::R_STAGES> r;
  TXL_ROLLED
  for (int j = -S::GROUPS; j <= block.tiles; ++j) {
    clear_next<S>(block.r, r, block.address(S::r), block.seen_distances(j));
    if (j >= 0 && j < block.tiles) clear_next<S>(block.k, k, block.address(S::k), block.seen_keys(j));
  }
}

constexpr float LOG2_LN2 = -0.5287663729448977f;
// The largest |lse|, in base 2: its rounding changes weights by 1% here, as much as that of bfloat16; gradients of what
// is larger are NaN rather than wrong.
constexpr float MAX_LSE = 65536;

// One warpgroup's queries.
template <class S>
class QueriesGroup {
 public:
  using T = typename S::T;

  TXL_DEVICE QueriesGroup(const BackwardProblem& p, const QueryBlock<S>& block)
      : p_(p),
        block_(block),
        group_(broadcast_first_lane(thread() / WARPGROUP)),
        warp_(broadcast_first_lane(thread() % WARPGROUP / WARP)),
        first_(block.first + group_ * SIDE),
        query_(first_ + accumulator_row(warp_)),
        k_(block.k.clear(), block.k.empty()),
        v_(block.v.full(), block.v.empty()),
        r_(block.r.clear(), block.r.empty()),
        r_again_(block.r.clear(), block.r.empty()),
        skew_(block.address(0), S::ring + (group_ * WARPGROUP_WARPS + warp_) * RING, warp_),
        unskew_(block.address(0), S::distances + group_ * 2 * SUBTILE_BYTES, warp_) {
    const int row = accumulator_row(warp_), column = accumulator_column();
    table_ = p.slots ? block_x() * S::GROUPS + group_ : 0;
    // plant: rows-of-dr
    r_row_ = static_cast<int>(p.zero_row) + block.distance(-1 - group_);
    if constexpr (S::DR_IN_HALVES) {
      // dr[8 k + column + e] of row + 8 h: 16 bytes' chunk 2 (k % 4) + column / 4 of a row of 128 bytes, swizzled.
      // Lanes of odd rows store k ^ 2 where the others store k, so that half a warp's pairs meet 32 different banks.
      const int x = row % 8, chunk = (column / 4 + x % 2 * 4) ^ x;
      dr_at_[0] = block_.address(dr_box()) + static_cast<uint32_t>(x * ROW_BYTES + chunk * 16 + column % 4 * 4);
    } else {
      // dr[column + e + 8 k][row + 8 h] is in chunk (row / 4 % 8) ^ 2 h, of 16 bytes, of its row of 128; the swizzle
      // adds the row's number, without carries.
      TXL_UNROLL
      for (int e = 0; e < 2; ++e) {
        const uint32_t at =
            static_cast<uint32_t>((column + e) * ROW_BYTES + ((row / 4 % 8) ^ (column + e)) * 16 + row % 4 * 4);
        dr_at_[e] = block.address((row < 32 ? S::dr_low : S::dr_high) + group_ * SUBTILE_BYTES) + at;
      }
    }
  }

  TXL_DEVICE void run() {
    const Tiles own = block_.tiles_of_group(group_);
    prepare();
    float dq[S::WIDTH / 2] = {};
    if (block_.tiles) run_tiles(own, dq);  // plant: gradient-block-without-tiles
    write(dq);
  }

 private:
  // Walks the group's own of the block's tiles and releases the others unused.
  TXL_DEVICE void run_tiles(const Tiles& own, float (&dq)[S::WIDTH / 2]) {
    for (int j = -S::GROUPS; j < -1 - group_; ++j) skip_r();
    int t = 0;
    TXL_ROLLED
    for (; t < own.from; ++t) k_.skip(), skip_r(), v_.skip();
    int j = t - 1 - group_;
    if (own.from < own.to) {
      walk(own, dq);
      t = own.to, j = t + 1 - group_;
    }
    TXL_ROLLED
    for (; t < block_.tiles; ++t, ++j) k_.skip(), skip_r(), v_.skip();
    TXL_ROLLED
    for (; j <= block_.tiles; ++j) skip_r();
  }
  TXL_DEVICE void skip_r() { r_.advance(), r_again_.skip(); }

  // Factors of the products; what the other kernel wants of these queries; what they see.
  TXL_DEVICE void prepare() {
    load_queries<T, S::WIDTH>(p_, block_.b, block_.h, first_, position_, content_);
    load_rows<T, S::WIDTH>(p_, p_.dout, block_.b, block_.h, first_, p_.L, dout_);
    clear_unseeing(position_), clear_unseeing(content_), clear_unseeing(dout_);
    store_operand<S::WIDTH>(position_, tile(S::position));
    if constexpr (S::IN_SHARED) {
      store_operand<S::WIDTH>(content_, tile(S::content));
      store_operand<S::WIDTH>(dout_, tile(S::dout));
    }
    find_stats();
    if (block_.part == 0) keep_queries(p_.content, content_), keep_queries(p_.position, position_);
    const uint32_t none[16] = {};
    unskew_.put(none, 0), unskew_.put(none, 1);
    fence_view_async_shared();  // plant: factors-fence
    sync_warpgroup(group_);     // plant: factors-barrier
    if constexpr (!S::IN_SHARED) load_operand_transposed(tile(S::position), transposed_);
  }

  // Queries that see nothing may hold anything, and meet a dS of 0.
  TXL_DEVICE void clear_unseeing(uint32_t (&a)[S::WIDTH / 4]) const {
    const bool sees[2] = {low(0) < high(0), low(1) < high(1)};
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 4; ++n) a[n] = sees[n % 2] ? a[n] : 0;
  }

  TXL_DEVICE void find_stats() {
    float delta[2] = {};
    uint32_t out[S::WIDTH / 4];
    load_rows<T, S::WIDTH>(p_, p_.out, block_.b, block_.h, first_, p_.L, out);
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
      const bool none = low(h) >= high(h) || lse == -INFINITY;
      delta_[h] = none ? 0.f : delta[h] - (p_.dlse ? p_.dlse[at] : 0.f);
      const float base = none ? INFINITY : lse > MAX_LSE || lse < -MAX_LSE ? NAN : lse;
      base_[h] = base - LOG2_LN2;
      if (thread() % 4 == 0 && block_.part == 0) p_.stats[block_.bh() * p_.rows + i] = {base, delta_[h]};
    }
  }

  TXL_DEVICE void keep_queries(void* to, const uint32_t (&a)[S::WIDTH / 4]) const {
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 4; ++n) {
      const int x = operand_column(n), row = first_ + operand_row(n);
      if (x < p_.D) *reinterpret_cast<uint32_t*>(static_cast<T*>(to) + (block_.bh() * p_.rows + row) * p_.D + x) = a[n];
    }
  }

  // Keys of the block's tiles that this thread's queries see. Read anew: registers are scarce.
  TXL_DEVICE int low(int h) const { return block_.seen[query_ + 8 * h - block_.first] - block_.tile * SIDE; }
  TXL_DEVICE int high(int h) const {
    return block_.seen[S::QUERIES + query_ + 8 * h - block_.first] - block_.tile * SIDE;
  }

  TXL_DEVICE uint32_t tile(int at) const { return block_.address(at + group_ * S::TILE_BYTES); }
  TXL_DEVICE uint32_t stage(int at, int n) const { return block_.address(at + n * S::TILE_BYTES); }

  TXL_DEVICE void issue_positions(float (&block)[32]) {
    const uint32_t r = stage(S::r, r_.consumer_wait());
    r_.advance();  // plant: early-release-of-r
    if constexpr (S::IN_SHARED)
      return gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(block, tile(S::position), r);
    gemm_rs<T, Major::K, ScaleOut::Zero>(block, position_, r);
  }
  // Products of queries with k, added to what was skewed; of dout with v.
  TXL_DEVICE void issue_content(float (&scores)[32]) {
    const uint32_t k = stage(S::k, k_.consumer_wait());
    if constexpr (S::IN_SHARED)
      return gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::One>(scores, tile(S::content), k);
    gemm_rs<T, Major::K, ScaleOut::One>(scores, content_, k);
  }
  TXL_DEVICE void issue_weights(float (&weights)[32]) {
    const uint32_t v = stage(S::v, v_.consumer_wait());
    if constexpr (S::IN_SHARED)
      return gemm_ss<T, S::WIDTH, Major::K, Major::K, ScaleOut::Zero>(weights, tile(S::dout), v);
    gemm_rs<T, Major::K, ScaleOut::Zero>(weights, dout_, v);
  }
  // The block of distances that came with the tile before `t` is whole.
  TXL_DEVICE uint32_t distances(int t) const {
    return block_.address(S::distances + group_ * 2 * SUBTILE_BYTES) + slot(t) * SUBTILE_BYTES;
  }
  TXL_DEVICE uint32_t slot(int t) const { return static_cast<uint32_t>(t & 1); }  // plant: distances-slot
  TXL_DEVICE void issue_distances(float (&dq)[S::WIDTH / 2], float (&dr)[S::WIDTH / 2], int t) {
    gemm_ss<T, 64, Major::K, Major::MN, ScaleOut::One>(dq, distances(t), stage(S::r, r_again_.stage()));
    if constexpr (!S::IN_SHARED) return gemm_rs<T, Major::MN, ScaleOut::Zero>(dr, transposed_, distances(t));
    gemm_ss<T, 64, Major::MN, Major::MN, ScaleOut::Zero>(dr, distances(t), tile(S::position));
  }
  // In halves: this warp's rows and columns 64 HALF .. + 63, once the half before has been read.
  TXL_DEVICE int dr_box() const { return S::dr + (group_ * WARPGROUP_WARPS + warp_) * 2 * S::DR_BOX; }
  template <int HALF>
  TXL_DEVICE void add_half(const float (&dr)[S::WIDTH / 2], int t) const {
    if (!p_.dr) return;
    const bool starts = thread() % WARP == 0, is_odd = thread() / 4 % 2;
    if (starts) tma_store_wait();  // plant: dr-half-wait
    sync_warp();
    unroll<16>([&](auto number) {
      constexpr int n = decltype(number)::value, k = n / 2, h = n % 2;
      constexpr int even = 4 * (8 * HALF + k) + 2 * h, odd = 4 * (8 * HALF + (k ^ 2)) + 2 * h;
      store_shared_pair<k / 4 * S::DR_BOX + 8 * h * ROW_BYTES>(dr_at_[0] ^ (k % 4 * 32), is_odd ? dr[odd] : dr[even],
                                                               is_odd ? dr[odd + 1] : dr[even + 1]);
    });
    fence_view_async_shared();  // plant: dr-half-fence
    sync_warp();                // plant: dr-half-barrier
    if (!starts) return;
    const int row = r_row_ - t * SIDE + static_cast<int>(DR_MARGIN) + warp_ * S::DR_ROWS;
    for (int n = 0; n < 2; ++n)
      tma_reduce_add_box(p_.dr_rows, block_.shared + dr_box() + n * S::DR_BOX, HALF * SIDE + n * 32, row, block_.h,
                         table_);
    tma_store_arrive();
  }
  TXL_DEVICE void add_first_half(const float (&dr)[S::WIDTH / 2], int t) const {
    if constexpr (S::DR_IN_HALVES) add_half<0>(dr, t);
  }
  TXL_DEVICE void add_second_half(const float (&dr)[S::WIDTH / 2], int t) const {
    if constexpr (S::DR_IN_HALVES) add_half<1>(dr, t);
  }
  // Width 64: dr goes to shared memory, and two threads start adding 32 columns each. Between them lie a fence and a
  // barrier of the warpgroup; before put_dr, a barrier after what wait_dr waits for.
  TXL_DEVICE bool starts_dr() const { return thread() % (WARPGROUP / 2) == 0; }
  TXL_DEVICE void wait_dr() const {
    if (!S::IN_SHARED && starts_dr()) tma_store_wait();  // plant: dr-wait
  }
  TXL_DEVICE void put_dr(const float (&dr)[S::WIDTH / 2]) const {
    if constexpr (!S::IN_SHARED)
      unroll<32>([&](auto number) {
        constexpr int n = decltype(number)::value;  // 4 k + 2 h + e
        store_shared<8 * ROW_BYTES*(n / 4)>(dr_at_[n % 2] ^ (n / 2 % 2 * 32), dr[n]);
      });
  }
  TXL_DEVICE void start_dr(int t) const {
    const int row = r_row_ - t * SIDE + static_cast<int>(DR_MARGIN), half = thread() % WARPGROUP / (WARPGROUP / 2);
    if (S::IN_SHARED || !p_.dr || !starts_dr()) return;
    tma_reduce_add_box(p_.dr_rows, block_.shared + (half ? S::dr_high : S::dr_low) + group_ * SUBTILE_BYTES, half * 32,
                       row, block_.h, table_);
    tma_store_arrive();
  }
  TXL_DEVICE void skew(const float (&block)[32], float (&scores)[32], int t) {
    skew_.put(block, t);
    sync_warp();
    skew_.get(scores, t);  // releasing a stage orders this before what the next tile puts there
  }

  // Scores and dout.v become dS without scale and times ln 2, as scaled queries want it for r; what it
  // gives dq is scaled at the end.
  TXL_DEVICE void differentiate(float (&s)[32], float (&dp)[32], int t) const {
    if (p_.drop_below) {
      const uint32_t keep_mask = draw_keep_mask(p_, block_.bh(), query_, block_.first_key(t));
      TXL_UNROLL
      for (int n = 0; n < 32; ++n) dp[n] = keep_mask >> n & 1 ? dp[n] * p_.keep_scale : 0.f;
    }
    TXL_UNROLL
    for (int n = 0; n < 32; ++n) s[n] = exp2_approx(s[n] - base_[n / 2 % 2]) * (dp[n] - delta_[n / 2 % 2]);
    const int first = t * SIDE, last = first + SIDE;
    const int lows[2] = {low(0), low(1)}, highs[2] = {high(0), high(1)};
    if (all_of_warp(lows[0] <= first && highs[0] >= last && lows[1] <= first && highs[1] >= last)) return;
    TXL_UNROLL
    for (int n = 0; n < 32; ++n) {
      const int h = n / 2 % 2, key = first + accumulator_column() + n / 4 * 8 + n % 2;
      if (key < lows[h] || key >= highs[h]) s[n] = 0;
    }
  }

  // Once the products of distances were waited for; r's tile has been used twice and is released.
  TXL_DEVICE void finish_distances(float (&dq)[S::WIDTH / 2], float (&dr)[S::WIDTH / 2]) {
    fence_operand(dq);
    fence_operand(dr);
    r_again_.consumer_release();
  }

  // For each tile of keys, with G = unskew(dS):
  //   S = skew((q + w) r^T) + (q + u) k^T,  P = 2^(S - lse),  dS = P (dout v^T - delta)
  //   dq += dS k + G r,  dr += G^T (q + w)
  // Tile t, whose position scores `scores` holds; the products of the block of distances that was whole at tile t - 1,
  // whose dr is added up in this step (width 64), or one half in this step and one in the next (128); and position
  // scores of tile t + 1.
  template <bool FIRST>
  TXL_DEVICE void step(float (&scores)[32], float (&dq)[S::WIDTH / 2], float (&dr)[S::WIDTH / 2], int t) {
    float weights[32], block[32];
    uint32_t pairs[16];
    issue_content(scores);
    issue_weights(weights);
    if constexpr (!FIRST) add_second_half(dr, t - 2), issue_distances(dq, dr, t - 1);
    wait_dr();
    warpgroup_wait<FIRST ? 0 : 2>();  // plant: tile-scores-wait
    fence_operand(scores);
    fence_operand(weights);
    v_.consumer_release();
    differentiate(scores, weights, t);
    pack_operand<T>(scores, pairs);
    if constexpr (!FIRST) {
      warpgroup_wait<0>();  // plant: distances-wait
      finish_distances(dq, dr);
    }
    sync_warpgroup(group_);  // all have read what is overwritten here; plant: distances-barrier
    issue_positions(block);
    unskew_.put(pairs, t & 1);  // plant: operand-read
    if constexpr (!FIRST) put_dr(dr);
    gemm_rs<T, Major::MN, ScaleOut::One>(dq, pairs, stage(S::k, k_.stage()));
    fence_view_async_shared();  // plant: distances-fence
    sync_warpgroup(group_);
    if constexpr (!FIRST) start_dr(t - 1), add_first_half(dr, t - 1);
    warpgroup_wait<1>();  // plant: next-scores-wait
    fence_operand(block);
    skew(block, scores, t + 1);
    warpgroup_wait<0>();
    fence_operand(dq);
    k_.consumer_release();
  }

  TXL_DEVICE void walk(const Tiles& own, float (&dq)[S::WIDTH / 2]) {
    float block[32], scores[32], dr[S::WIDTH / 2] = {};
    issue_positions(block);
    warpgroup_wait<0>();
    fence_operand(block);
    skew_.put(block, own.from - 1);
    issue_positions(block);
    warpgroup_wait<0>();
    fence_operand(block);
    skew(block, scores, own.from);
    step<true>(scores, dq, dr, own.from);
    TXL_ROLLED
    for (int t = own.from + 1; t < own.to; ++t) step<false>(scores, dq, dr, t);
    // The last two blocks; the last one's other half is empty.
    add_second_half(dr, own.to - 2);
    TXL_UNROLL
    for (int t = own.to - 1; t <= own.to; ++t) {
      issue_distances(dq, dr, t);
      warpgroup_wait<0>();
      finish_distances(dq, dr);
      wait_dr();
      sync_warpgroup(group_);
      put_dr(dr);
      const uint32_t none[16] = {};
      if (t < own.to) unskew_.put(none, own.to & 1);
      fence_view_async_shared();
      sync_warpgroup(group_);
      add_first_half(dr, t);
      add_second_half(dr, t);
      start_dr(t);
    }
    wait_dr();
    if (S::DR_IN_HALVES && thread() % WARP == 0) tma_store_wait();
    r_again_.consumer_release();  // the block that was loaded after the last tile
  }

  TXL_DEVICE void write(float (&dq)[S::WIDTH / 2]) const {
    const float scale = scale_of(p_);
    const int column = accumulator_column();
    const int64_t blocks = p_.rows / S::QUERIES * p_.parts, block = block_.first / S::QUERIES * p_.parts + block_.part;
    const int64_t sums_at = ((block_.bh() * blocks + block) * S::GROUPS + group_) * WARPGROUP_WARPS + warp_;
    TXL_UNROLL
    for (int n = 0; n < S::WIDTH / 2; n += 4) {
      const int x = n / 4 * 8 + column;
      float sums[2] = {};
      TXL_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int i = query_ + 8 * h;
        const float one = scale * dq[n + 2 * h], two = scale * dq[n + 2 * h + 1];
        sums[0] += one, sums[1] += two;
        if (!p_.dq.data || i >= p_.L || x >= p_.D) continue;
        if (p_.parts > 1) {
          float* const to = p_.dq_parts + ((block_.part * p_.B * p_.H + block_.bh()) * p_.rows + i) * p_.D + x;
          to[0] = one, to[1] = two;
        } else {
          *reinterpret_cast<uint32_t*>(const_cast<T*>(row_of<T>(p_.dq, block_.b, block_.h, i)) + x) =
              pack(T(), one, two);
        }
      }
      if (!p_.q_sums) continue;
      TXL_UNROLL
      for (int step = 4; step < WARP; step *= 2)
        sums[0] += shuffle_xor(sums[0], step), sums[1] += shuffle_xor(sums[1], step);
      if (thread() % WARP < 4 && x < p_.D)
        p_.q_sums[sums_at * p_.D + x] = sums[0], p_.q_sums[sums_at * p_.D + x + 1] = sums[1];
    }
  }

  const BackwardProblem& p_;
  const QueryBlock<S>& block_;
  int group_, warp_, first_, query_;  // first query of the group, this thread's first
  Consumer<S::STAGES> k_;
  Consumer<S::V_STAGES> v_;
  Consumer<S::R_STAGES> r_, r_again_;
  Skew skew_;
  Unskew unskew_;
  int r_row_;          // first row of dr of the block that is whole after tile 0
  int table_;          // of dr
  uint32_t dr_at_[2];  // this thread's first places of dr in shared memory; one, in halves
  uint32_t content_[S::WIDTH / 4], position_[S::WIDTH / 4], dout_[S::WIDTH / 4];
  uint32_t transposed_[16];   // (q + w)^T
  float base_[2], delta_[2];  // lse, less log2 ln 2
};

template <class S>
TXL_HOPPER_KERNEL(S::THREADS)
void backward_queries_kernel(const TXL_CONSTANT BackwardProblem p) {
  TXL_SHARED_TILES(tiles);
  int batch_row = block_z(), number = block_x();
  if (p.slots) {
    const int64_t n = p.turn * p.slots + block_x(), blocks = p.rows / S::QUERIES;
    if (n >= p.B * blocks) return;
    batch_row = static_cast<int>(n / blocks), number = static_cast<int>(n % blocks);
  }
  const QueryBlock<S> block(p, tiles, batch_row, number);
  if (thread() >= S::GROUPS * WARPGROUP) {
    if constexpr (S::GROUPS > 1) warpgroup_reg_dealloc<24>();
    const int warp = broadcast_first_lane(thread() / WARP) - S::GROUPS * WARPGROUP_WARPS;
    if (warp == 0 && thread() % WARP == 0 && block.tiles) load_tiles(block);
    if (warp == 1 && block.tiles) clear_keys_and_distances(block);
  } else {
    if constexpr (S::GROUPS > 1) warpgroup_reg_alloc<240>();
    QueriesGroup<S>(p, block).run();
  }
}

}  // namespace txl_cuda
