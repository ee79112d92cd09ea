// Pipelines of tiles in shared memory, with CUTLASS's names: a producer acquires an empty stage and fills it, consumers
// wait until it is full and release it.
//
// The producer warpgroup has two warps that work. One thread of the first issues TMA loads. The second edits tiles that
// are loaded: it clears rows that no query sees, which may hold anything, since 0 times NaN is NaN. It is the consumer
// of the TMA loads and the producer of a second pipeline over the same stages.
#pragma once
#include "prefill_problem.h"
#include "tile.cuh"

namespace txl_cuda {

// The barriers of a ring of stages, in shared memory, for two pipelines. `full` and `empty` are those of the pipeline
// of TMA loads: a stage is full when their bytes have arrived. `prepared` are the full barriers of the second pipeline,
// whose producer is the second producer warp. It has the same empty barriers, as consumers release a stage as a whole.
template <int STAGES>
struct StageBarriers {
  static constexpr int BARRIERS = 3 * STAGES;
  Barrier* barriers;
  TXL_DEVICE Barrier* full(int stage = 0) const { return barriers + stage; }
  TXL_DEVICE Barrier* prepared(int stage = 0) const { return barriers + STAGES + stage; }
  TXL_DEVICE Barrier* empty(int stage = 0) const { return barriers + 2 * STAGES + stage; }
  // consumers: warps that release a stage.
  TXL_DEVICE void init(int consumers) const {
    for (int n = 0; n < STAGES; ++n)
      barrier_init(full(n), 1), barrier_init(prepared(n), 1), barrier_init(empty(n), consumers);
  }
};

// A stage, and the parity of its barriers' current phase.
template <int STAGES>
struct PipelineState {
  int stage = 0, phase = 0;
  TXL_DEVICE void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;  // plant: stage-count
  }
};

// A consumer warpgroup's place in a pipeline with these barriers. Each of its warps releases stages for itself.
template <int STAGES>
class Consumer {
 public:
  TXL_DEVICE Consumer(Barrier* full, Barrier* empty) : full_(full), empty_(empty) {}
  // Waits until the stage is full and returns its number.
  TXL_DEVICE int consumer_wait() const {
    barrier_wait(full_ + state_.stage, state_.phase);  // plant: full-wait
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
  Barrier *full_, *empty_;
  PipelineState<STAGES> state_;
};

// The place in a pipeline of the thread or warp that fills it. All stages are empty at first: a wait for the phase
// before the first returns at once.
template <int STAGES>
class Producer {
 public:
  TXL_DEVICE explicit Producer(Barrier* empty) : empty_(empty) { state_.phase = 1; }  // plant: producer-parity
  // Waits until the stage is empty and returns its number.
  TXL_DEVICE int producer_acquire() {
    barrier_wait(empty_ + state_.stage, state_.phase);  // plant: empty-wait
    const int stage = state_.stage;
    state_.advance();
    return stage;
  }

 private:
  Barrier* empty_;
  PipelineState<STAGES> state_;
};

// Issues the loads of rows `row` .. + 63 of a tensor to the tile at byte `to` of shared memory; their bytes count for
// the barrier `full`. SUBTILE_STRIDE: bytes from 64 columns to the next 64.
template <class S, int SUBTILE_STRIDE = SUBTILE_BYTES>
TXL_DEVICE void tma_load_tile(char* shared, int to, Barrier* full, const RowsMap& rows, int row, int h, int b) {
  TXL_UNROLL
  for (int column = 0; column < S::WIDTH; column += SIDE)
    tma_load_box(shared + to + column / SIDE * SUBTILE_STRIDE, rows.map, full, column, row, h * rows.h, b * rows.n);
}
// The same, and makes the barrier expect the bytes.
template <class S>
TXL_DEVICE void load_tile(char* shared, int to, Barrier* full, const RowsMap& rows, int row, int h, int b) {
  barrier_arrive_and_expect_tx(full, S::TILE_BYTES);  // plant: bytes-expected
  tma_load_tile<S>(shared, to, full, rows, row, h, b);
}

// The same for a tile of r, which is narrow where queries of positions have a width of their own.
template <class S>
TXL_DEVICE void load_tile_of_r(char* shared, int to, Barrier* full, const RowsMap& rows, int row, int h) {
  if constexpr (!S::HAS_Q_POS) return load_tile<S>(shared, to, full, rows, row, h, 0);
  barrier_arrive_and_expect_tx(full, NARROW_BYTES);
  tma_load_box(shared + to, rows.map, full, 0, row, h * rows.h, 0);
}

// Clears the rows of a tile of so many bytes whose bit of `visible` is 0; by a warp.
template <int BYTES>
TXL_DEVICE void clear_rows(uint32_t tile, uint64_t visible) {
  constexpr int ROW = BYTES == NARROW_BYTES ? NARROW_ROW_BYTES : ROW_BYTES;
  TXL_ROLLED
  for (int word = thread() % WARP; word < SIDE * ROW / 4; word += WARP) {
    if (visible >> (word / (ROW / 4)) & 1) continue;
    TXL_UNROLL
    for (int subtile = 0; subtile < BYTES; subtile += SIDE * ROW)
      store_shared(tile + static_cast<uint32_t>(subtile + word * 4), 0u);
  }
}

// Prepares the next of the stages, of BYTES bytes, whose tiles begin at `tiles`: waits until it is loaded, clears the
// rows whose bit of `visible` is 0, and arrives. By a warp.
template <int BYTES, int STAGES>
TXL_DEVICE void prepare_next(const StageBarriers<STAGES>& barriers, PipelineState<STAGES>& state, uint32_t tiles,
                             uint64_t visible) {
  barrier_wait(barriers.full(state.stage), state.phase);
  if (~visible) {
    clear_rows<BYTES>(tiles + static_cast<uint32_t>(state.stage * BYTES), visible);
    fence_view_async_shared();  // plant: clearing-fence
  }
  sync_warp();
  if (thread() % WARP == 0) barrier_arrive(barriers.prepared(state.stage));
  state.advance();
}

}  // namespace txl_cuda
