// The pipeline that brings tiles to shared memory. One warp, the producer, issues TMA loads; another clears rows that
// no query sees, which may hold anything, since 0 times NaN is NaN; warpgroups, the consumers, wait for a stage, use
// it and release it.
#pragma once
#include "queries.cuh"

namespace txl_cuda {

// Barriers of a ring of stages: full, clear (cleared of rows that no query sees) and empty.
template <int STAGES>
struct PipelineBarriers {
  static constexpr int BARRIERS = 3 * STAGES;
  Barrier* first;
  TXL_DEVICE Barrier* full(int n = 0) const { return first + n; }
  TXL_DEVICE Barrier* clear(int n = 0) const { return first + STAGES + n; }
  TXL_DEVICE Barrier* empty(int n = 0) const { return first + 2 * STAGES + n; }
  TXL_DEVICE void init(int consumers) const {
    for (int n = 0; n < STAGES; ++n)
      barrier_init(full(n), 1), barrier_init(clear(n), 1), barrier_init(empty(n), consumers);
  }
};

// Issues the load of rows `row` .. + 63 of a tensor, whose bytes the barrier expects. COLUMNS_STRIDE: bytes from 64
// columns to the next 64.
template <class S, int COLUMNS_STRIDE = SUBTILE_BYTES>
TXL_DEVICE void tma_load_tile(char* shared, int to, Barrier* full, const RowsMap& rows, int row, int h, int b) {
  TXL_UNROLL
  for (int x = 0; x < S::WIDTH; x += SIDE)
    tma_load_box(shared + to + x / SIDE * COLUMNS_STRIDE, rows.map, full, x, row, h * rows.h, b * rows.n);
}
// The same, and has the barrier expect the bytes.
template <class S>
TXL_DEVICE void load_tile(char* shared, int to, Barrier* full, const RowsMap& rows, int row, int h, int b) {
  barrier_arrive_and_expect_tx(full, S::TILE_BYTES);  // plant: bytes-expected
  tma_load_tile<S>(shared, to, full, rows, row, h, b);
}

// The stage of a ring, and the parity of its barriers' phase.
template <int STAGES>
struct PipelineState {
  int stage = 0, parity = 0;
  TXL_DEVICE void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;  // plant: stage-count
  }
};

// A warpgroup that reads a ring's stages. `ready`: the full or the clear barriers. Each warp releases for itself.
template <int STAGES>
class Consumer {
 public:
  TXL_DEVICE Consumer(Barrier* ready, Barrier* empty) : ready_(ready), empty_(empty) {}
  // Waits until the stage is ready and returns its number.
  TXL_DEVICE int consumer_wait() const {
    barrier_wait(ready_ + state_.stage, state_.parity);  // plant: full-wait
    return state_.stage;
  }
  TXL_DEVICE void consumer_release() {
    sync_warp();  // plant: release-warp-barrier
    if (thread() % WARP == 0) barrier_arrive(empty_ + state_.stage);
    state_.advance();
  }
  // Moves to the next stage without releasing this one.
  TXL_DEVICE void advance() { state_.advance(); }
  TXL_DEVICE int stage() const { return state_.stage; }
  // Releases the stage unused.
  TXL_DEVICE void skip() {
    consumer_wait();
    consumer_release();
  }

 private:
  Barrier *ready_, *empty_;
  PipelineState<STAGES> state_;
};

// The thread or warp that fills a ring's stages: waits until a stage is empty, which each is at first.
template <int STAGES>
class Producer {
 public:
  TXL_DEVICE explicit Producer(Barrier* empty) : empty_(empty) { state_.parity = 1; }  // plant: producer-parity
  TXL_DEVICE int producer_acquire() {
    barrier_wait(empty_ + state_.stage, state_.parity);  // plant: empty-wait
    const int stage = state_.stage;
    state_.advance();
    return stage;
  }

 private:
  Barrier* empty_;
  PipelineState<STAGES> state_;
};

// Clears a tile's rows whose bit is 0; by a warp.
template <class S>
TXL_DEVICE void clear_unseen(uint32_t tile, uint64_t seen) {
  TXL_ROLLED
  for (int x = thread() % WARP; x < SIDE * ROW_BYTES / 4; x += WARP) {
    if (seen >> (x / (ROW_BYTES / 4)) & 1) continue;
    TXL_UNROLL
    for (int n = 0; n < S::TILE_BYTES; n += SUBTILE_BYTES) store_shared(tile + static_cast<uint32_t>(n + x * 4), 0u);
  }
}

// Waits until the next stage is full, clears the rows whose bit of `seen` is 0, and arrives at its clear barrier.
template <class S, int STAGES>
TXL_DEVICE void clear_next(const PipelineBarriers<STAGES>& stages, PipelineState<STAGES>& at, uint32_t tiles,
                           uint64_t seen) {
  barrier_wait(stages.full(at.stage), at.parity);
  if (~seen) {
    clear_unseen<S>(tiles + static_cast<uint32_t>(at.stage * S::TILE_BYTES), seen);
    fence_view_async_shared();  // plant: clearing-fence
  }
  sync_warp();
  if (thread() % WARP == 0) barrier_arrive(stages.clear(at.stage));
  at.advance();
}

}  // namespace txl_cuda
