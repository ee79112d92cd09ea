// Forward by persistent blocks, as many as there are multiprocessors. Each computes items, a block of queries and its
// part of the keys, one after another: the producer loads an item's tiles while consumers end the one before, and their
// own loads of queries are in flight meanwhile.
#pragma once
#include "forward.cuh"

namespace txl_cuda {

// Items are ordered by section of heads, whose keys and values the L2 holds, then by block of queries, the last first
// (QueryBlock::place), then by head. Block n of a grid computes items n, n + resident, n + 2 resident, ..
struct PersistentProblem : PrefillProblem {
  int items, resident;  // of the call; blocks of the grid
  int blocks, section;  // items of a head; heads of a section
};

// An item's batch row, head and number of its block (QueryBlock::place).
struct Item {
  int b, h, number;
  TXL_DEVICE Item(const PersistentProblem& p, int n) {
    const int H = static_cast<int>(p.H), heads = static_cast<int>(p.B) * H;
    const int first_head = n / (p.section * p.blocks) * p.section, in_section = n - first_head * p.blocks;
    const int count = heads - first_head < p.section ? heads - first_head : p.section;
    const int head = first_head + in_section % count;
    number = in_section / count, b = head / H, h = head % H;
  }
};

// The pipeline of key bounds, [2][QUERIES] an item: the third producer warp writes them, all other warps read them.
template <class S>
class ItemBounds {
 public:
  static constexpr int STAGES = 2, READERS = S::GROUPS * WARPGROUP_WARPS + 2;  // warps
  TXL_DEVICE explicit ItemBounds(const QueryBlock<S>& block) : first_(block.key_bounds) {
    barriers_.barriers = reinterpret_cast<Barrier*>(first_ + STAGES * 2 * S::QUERIES);
  }
  TXL_DEVICE void init() const { barriers_.init(READERS); }  // plant: item-arrivals
  TXL_DEVICE int* stage(int n) const { return first_ + n * 2 * S::QUERIES; }
  TXL_DEVICE Producer<STAGES> producer() const { return Producer<STAGES>(barriers_.empty()); }
  TXL_DEVICE Barrier* full(int n) const { return barriers_.full(n); }
  TXL_DEVICE Barrier* empty(int n) const { return barriers_.empty(n); }

 private:
  int* first_;
  StageBarriers<STAGES> barriers_;
};
// Bytes of shared memory, from the shape's key_bounds on.
template <class S>
constexpr int PERSISTENT_SHARED_BYTES = S::key_bounds + 2 * 2 * S::QUERIES * 4 + StageBarriers<2>::BARRIERS * 8;

// Computes the key bounds of all items. By a warp.
template <class S>
TXL_DEVICE void find_bounds_of_items(const PersistentProblem& p, QueryBlock<S>& block, const ItemBounds<S>& bounds) {
  Producer<ItemBounds<S>::STAGES> producer = bounds.producer();
  TXL_ROLLED
  for (int n = block_x(); n < p.items; n += p.resident) {
    const Item item(p, n);
    block.place(item.b, item.h, item.number);
    const int stage = producer.producer_acquire();
    TXL_ROLLED
    for (int x = thread() % WARP; x < S::QUERIES; x += WARP)
      find_bounds_of_query<S::QUERIES>(p, block.key_tiles, block.b, block.first_query, x, bounds.stage(stage));
    sync_warp();  // plant: item-bounds-barrier
    if (thread() % WARP == 0) barrier_arrive(bounds.full(stage));
  }
}

// Goes through the items: compute(n, release) of item n, to which `block` is set; release(): when its key bounds have
// been read. By a warp.
template <class S, class Compute>
TXL_DEVICE void for_each_item(const PersistentProblem& p, QueryBlock<S>& block, const ItemBounds<S>& bounds,
                              const Compute& compute) {
  TXL_ROLLED
  for (int m = 0;; ++m) {  // one counter for item, stage and phase: registers are scarce
    const int n = block_x() + m * p.resident;
    const int stage = m % ItemBounds<S>::STAGES;  // plant: later-items-stage
    if (n >= p.items) return;
    const Item item(p, n);
    block.place(item.b, item.h, item.number);
    barrier_wait(bounds.full(stage), m / ItemBounds<S>::STAGES % 2);  // plant: item-bounds-wait
    block.key_bounds = bounds.stage(stage);
    block.find_tiles();
    compute(n, [&] {
      sync_warp();  // plant: item-release-barrier
      if (thread() % WARP == 0) barrier_arrive(bounds.empty(m % ItemBounds<S>::STAGES));
    });
  }
}

template <class S>
TXL_DEVICE void produce_items(const PersistentProblem& p, QueryBlock<S>& block, const ItemBounds<S>& bounds, int warp) {
  if (warp == 0) {
    TileProducers<S> producers(block);
    return for_each_item(p, block, bounds, [&](int, const auto& release) {
      if (thread() % WARP == 0 && block.tiles) load_tiles(block, producers);
      release();
    });
  }
  if (warp == 1) {
    PipelineState<S::V_STAGES> values;
    return for_each_item(p, block, bounds, [&](int, const auto& release) {
      prepare_values(block, values);
      release();
    });
  }
  if (warp == 2) find_bounds_of_items(p, block, bounds);
}

template <class S>
TXL_DEVICE void consume_items(const PersistentProblem& p, QueryBlock<S>& block, const ItemBounds<S>& bounds) {
  ForwardConsumer<S> consumer(block);
  const auto load_queries_of = [&](int n) {
    const Item item(p, n < p.items ? n : p.items - 1);  // without a branch: the registers are not live in the main loop
    consumer.load_next(item.b, item.h, block.first_query_of(item.number));
  };
  load_queries_of(block_x());
  for_each_item(p, block, bounds,
                [&](int n, const auto& release) { consumer.run(release, [&] { load_queries_of(n + p.resident); }); });
}

template <class S>
TXL_HOPPER_KERNEL(S::THREADS)
void persistent_forward_kernel(const TXL_CONSTANT PersistentProblem p) {
  TXL_SHARED_TILES(tiles);
  if constexpr (EARLY_START) launch_dependent_grids();
  QueryBlock<S> block(p, tiles);
  const ItemBounds<S> bounds(block);
  block.prefetch_descriptors();
  if (thread() == 0) bounds.init(), block.init_barriers();
  barrier();
  if (thread() >= S::GROUPS * WARPGROUP) {
    warpgroup_reg_dealloc<S::PRODUCER_REGISTERS>();
    produce_items(p, block, bounds, broadcast_first_lane(thread() / WARP) - S::GROUPS * WARPGROUP_WARPS);
  } else {
    warpgroup_reg_alloc<S::CONSUMER_REGISTERS>();
    consume_items(p, block, bounds);
  }
}

}  // namespace txl_cuda
