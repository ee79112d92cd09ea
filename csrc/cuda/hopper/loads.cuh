// How tiles come to shared memory: one warp asks the copy engine for them, one clears rows that nobody
// sees, which may hold anything, since 0 times NaN is NaN; warpgroups wait, use, and give back.
#pragma once
#include "queries.cuh"

namespace txl_cuda {

// Barriers of a ring of stages: full, cleared of what nobody sees, and empty again.
template <int STAGES>
struct Stages {
  static constexpr int BARRIERS = 3 * STAGES;
  Barrier* first;
  TXL_DEVICE Barrier* full(int n = 0) const { return first + n; }
  TXL_DEVICE Barrier* clear(int n = 0) const { return first + STAGES + n; }
  TXL_DEVICE Barrier* empty(int n = 0) const { return first + 2 * STAGES + n; }
  TXL_DEVICE void make(int readers) const {
    for (int n = 0; n < STAGES; ++n)
      make_barrier(full(n), 1), make_barrier(clear(n), 1), make_barrier(empty(n), readers);
  }
};

// Asks for rows `row` .. + 63 of a tensor, whose bytes were announced; LEAP: from 64 columns to the next.
template <class S, int LEAP = TILE>
TXL_DEVICE void copy_tile(char* shared, int to, Barrier* full, const RowsMap& rows, int row, int h, int b) {
  TXL_UNROLL
  for (int x = 0; x < S::WIDTH; x += SIDE)
    copy_box(shared + to + x / SIDE * LEAP, rows.map, full, x, row, h * rows.h, b * rows.n);
}
// Announces them, too.
template <class S>
TXL_DEVICE void load_tile(char* shared, int to, Barrier* full, const RowsMap& rows, int row, int h, int b) {
  arrive_expecting(full, S::BYTES);  // plant: bytes-expected
  copy_tile<S>(shared, to, full, rows, row, h, b);
}

// A place in a ring of stages that several warpgroups walk in the same order.
template <int STAGES>
struct Walk {
  int stage = 0, parity = 0;
  TXL_DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;  // plant: stage-count
  }
};

// A warpgroup's way through a ring: it waits for a tile, uses it, and gives it back by warp.
template <int STAGES>
class Reader {
 public:
  TXL_DEVICE Reader(Barrier* ready, Barrier* empty) : ready_(ready), empty_(empty) {}
  // Number of the stage, once it is ready.
  TXL_DEVICE int take() const {
    await(ready_ + walk_.stage, walk_.parity);  // plant: full-wait
    return walk_.stage;
  }
  TXL_DEVICE void give_back() {
    meet_warp();  // plant: release-warp-barrier
    if (thread() % WARP == 0) arrive(empty_ + walk_.stage);
    walk_.next();
  }
  // To the next, without giving this one back.
  TXL_DEVICE void skip() { walk_.next(); }
  TXL_DEVICE int stage() const { return walk_.stage; }
  TXL_DEVICE void pass() {
    take();
    give_back();
  }

 private:
  Barrier *ready_, *empty_;
  Walk<STAGES> walk_;
};

// The other side: waits until a stage is empty, which it is at first.
template <int STAGES>
class Writer {
 public:
  TXL_DEVICE explicit Writer(Barrier* empty) : empty_(empty) { walk_.parity = 1; }  // plant: producer-parity
  TXL_DEVICE int take() {
    await(empty_ + walk_.stage, walk_.parity);  // plant: empty-wait
    const int stage = walk_.stage;
    walk_.next();
    return stage;
  }

 private:
  Barrier* empty_;
  Walk<STAGES> walk_;
};

// Clears a tile's rows whose bit is 0; by a warp.
template <class S>
TXL_DEVICE void clear_unseen(uint32_t tile, uint64_t seen) {
  TXL_ROLLED
  for (int x = thread() % WARP; x < SIDE * ROW / 4; x += WARP) {
    if (seen >> (x / (ROW / 4)) & 1) continue;
    TXL_UNROLL
    for (int n = 0; n < S::BYTES; n += TILE) put_shared(tile + static_cast<uint32_t>(n + x * 4), 0u);
  }
}

// Waits for the next tile of a ring, clears what `seen` says that nobody sees, and passes it on.
template <class S, int STAGES>
TXL_DEVICE void clear_next(const Stages<STAGES>& stages, Walk<STAGES>& at, uint32_t tiles, uint64_t seen) {
  await(stages.full(at.stage), at.parity);
  if (~seen) {
    clear_unseen<S>(tiles + static_cast<uint32_t>(at.stage * S::BYTES), seen);
    fence_units();  // plant: clearing-fence
  }
  meet_warp();
  if (thread() % WARP == 0) arrive(stages.clear(at.stage));
  at.next();
}

}  // namespace txl_cuda
