// Backward, gradients of queries and of r: a block of queries goes through its part of the tiles of keys.
#pragma once
#include "queries_consumer.cuh"
#include "queries_halves.cuh"

namespace txl_cuda {

template <class S>
TXL_HOPPER_KERNEL(S::THREADS)
void backward_queries_kernel(const TXL_CONSTANT BackwardProblem p) {
  TXL_SHARED_TILES(tiles);
  assume_threads<S::THREADS>();
  if constexpr (EARLY_START) launch_dependent_grids();
  int batch_row = block_z();
  auto number = static_cast<uint32_t>(block_x());
  if (p.slots) {
    const uint32_t n = static_cast<uint32_t>(p.launch_index * p.slots) + number;
    const auto blocks = static_cast<uint32_t>(p.rows) / S::QUERIES;
    if (n >= static_cast<uint32_t>(p.B) * blocks) return;
    batch_row = static_cast<int>(n / blocks), number = n % blocks;
  }
  const QueryBlock<S> block(p, tiles, batch_row, number);
  if (thread() >= S::GROUPS * WARPGROUP) {
    if constexpr (S::GROUPS > 1) warpgroup_reg_dealloc<S::PRODUCER_REGISTERS>();
    const int warp = broadcast_first_lane(thread() / WARP) - S::GROUPS * WARPGROUP_WARPS;
    if (warp == 0 && thread() % WARP == 0 && block.tiles) load_tiles(block);
    if (warp == 1 && block.tiles) prepare_keys_and_distances(block);
  } else {
    if constexpr (S::GROUPS > 1) warpgroup_reg_alloc<S::CONSUMER_REGISTERS>();
    using Consumer = std::conditional_t<S::QUERY_GROUPS == S::GROUPS, QueriesConsumer<S>, QueriesHalvesConsumer<S>>;
    Consumer(p, block).run();
  }
}

}  // namespace txl_cuda
