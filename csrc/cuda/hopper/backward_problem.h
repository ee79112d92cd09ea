// A backward call as the Hopper kernels see it.
#pragma once
#include "../launch.h"
#include "prefill_problem.h"

namespace txl_cuda {

// A query's lse and delta, for the kernel of keys.
struct alignas(8) Stats {
  float lse, delta;  // lse in base 2, +inf for a query that sees nothing; share dout . out - dlse, see compute_stats
};

// The tensors of gradients: null for one that is not wanted. The rest is workspace; rows of a batch row are padded
// to a multiple of QueriesShape::QUERIES.
struct BackwardProblem : PrefillProblem {
  View dout;
  const float* dlse = nullptr;      // [B, H, L] contiguous, or null
  View dq, dk, dv, dk_mem, dv_mem;  // as q, k, v and the memory
  View dq_pos, dsink;               // as q_pos and the sink
  float* dr = nullptr;              // [slots, groups, H, DR_MARGIN + T, Dr], zero before; slots 0: no first two axes;
                                    // null: dr_out is not wanted
  // Deterministic sums of dr: a launch has `slots` blocks of a head, launch n the blocks slots * n .. of all batch
  // rows' queries. Each warpgroup of each slot has a table of its own, so that each element takes one addition a
  // launch. slots 0: one launch of all blocks, which add to one table in any order.
  int64_t slots = 0, launch_index = 0;
  // [B, H, parts, D]: sums of dq by the warps of its blocks, and of its content part by those of keys;
  // null: du and dw are not wanted.
  float *q_sums = nullptr, *k_sums = nullptr;
  int64_t q_parts = 0, k_parts = 0;
  // [parts, B, H, rows, D] and Dr, where the keys of a block of queries are split
  float *dq_parts = nullptr, *dq_pos_parts = nullptr;
  // For finish_kernel: the number of tables of dr, its outputs, its blocks of r, of queries and of position queries.
  int64_t tables = 1, r_blocks = 0, q_blocks = 0, q_pos_blocks = 0;
  View dr_out, du, dw;                               // [H, T, Dr], [H, D]
  void *q_content = nullptr, *q_position = nullptr;  // [B, H, rows, D]: q + u, q + w, scaled; or q, and q_pos [.., 16]
  void* dout_beside_sink = nullptr;                  // [B, H, rows, D]: dout times the keys' share, with a sink
  Stats* stats = nullptr;                            // [B, H, rows]
  int64_t workspace_bytes = 0;                       // from q_content on, without dr, which comes last
  int64_t rows = 0;                                  // L, padded
  RowsMap dout_rows, q_content_rows, q_position_rows;
  TensorMap dr_rows;  // dr, in boxes of QueriesShape::DR_ROWS rows and 32 columns
};

}  // namespace txl_cuda
