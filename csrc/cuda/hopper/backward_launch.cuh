// Backward's instances for one element type.
#pragma once
#include "backward_keys.cuh"
#include "backward_queries.cuh"
#include "launch.cuh"

namespace txl_cuda {

template <class T>
using QueriesNarrow = QueriesShape<T, 64, 2, 3, 5, false>;
template <class T>
using QueriesWide = QueriesShape<T, 128, 1, 2, 4, true>;
template <class T>
using KeysNarrow = KeysShape<T, 64, 2, 3, 4, false>;
template <class T>
using KeysWide = KeysShape<T, 128, 1, 2, 3, true>;

inline int64_t blocks_of(int64_t rows, int64_t size) { return (rows + size - 1) / size; }

template <class Q, class K>
int64_t key_blocks(const Problem& p) {
  return blocks_of(blocks_of(p.M, SIDE) + blocks_of(p.L, SIDE), K::GROUPS);
}

template <class Q, class K>
Workspace workspace_as(const Problem& p) {
  const int64_t heads = p.B * p.H, rows = blocks_of(p.L, Q::QUERIES) * Q::QUERIES;
  Workspace x;
  x.q_parts = rows / Q::QUERIES * Q::GROUPS * WARPS_A_GROUP;
  x.k_parts = key_blocks<Q, K>(p) * K::GROUPS * WARPS_A_GROUP;
  x.q_sums = heads * rows * (p.D + 2);  // after q + u and q + w in 16 bits, and two floats a query
  x.k_sums = x.q_sums + heads * x.q_parts * p.D;
  x.floats = x.k_sums + heads * x.k_parts * p.D;
  return x;
}

template <class Q, class K>
BackwardProblem describe_backward(const Problem& p, const Gradients& gradients) {
  BackwardProblem x;
  static_cast<LongProblem&>(x) = describe_call(p);
  x.parts = 1;
  x.dout = gradients.dout, x.dlse = gradients.dlse, x.dr = gradients.dr, x.slots = gradients.slots;
  x.dq = gradients.dq, x.dk = gradients.dk, x.dv = gradients.dv, x.dk_mem = gradients.dk_mem,
  x.dv_mem = gradients.dv_mem;
  const Workspace at = workspace_as<Q, K>(p);
  x.rows = blocks_of(p.L, Q::QUERIES) * Q::QUERIES;
  const int64_t row = p.D, head = x.rows * row, text = p.H * head;
  x.content = gradients.workspace, x.position = gradients.workspace + p.B * text / 2;
  x.stats = reinterpret_cast<Stats*>(gradients.workspace + p.B * text);
  x.workspace_bytes = at.floats * static_cast<int64_t>(sizeof(float));
  x.q_sums = gradients.workspace + at.q_sums, x.k_sums = gradients.workspace + at.k_sums;
  x.dout_rows = map_rows(p, x.dout, p.B, p.L);
  x.content_rows = map_rows(p, {x.content, text, head, row}, p.B, x.rows);
  x.position_rows = map_rows(p, {x.position, text, head, row}, p.B, x.rows);
  return x;
}

template <class Q, class K>
void load_backward_of() {
  allow_shared(backward_queries_kernel<Q>, Q::shared), allow_shared(backward_keys_kernel<K>, K::shared);
}

template <class Q, class K>
void launch_backward(const Problem& p, const Gradients& gradients, void* stream) {
  const auto queries = backward_queries_kernel<Q>;
  const auto keys = backward_keys_kernel<K>;
  load_backward_of<Q, K>();
  BackwardProblem call = describe_backward<Q, K>(p, gradients);
  const dim3 in_turns(static_cast<unsigned>(gradients.slots), static_cast<unsigned>(p.H), 1);
  const int64_t blocks = call.rows / Q::QUERIES, turns = call.slots ? blocks_of(p.B * blocks, call.slots) : 1;
  for (call.turn = 0; call.turn < turns; ++call.turn) {
    TXL_LAUNCH(queries, call.slots ? in_turns : grid_of(p, blocks), Q::THREADS, Q::shared, stream, call);
    check_launch();
  }
  TXL_LAUNCH(keys, grid_of(p, key_blocks<Q, K>(p)), K::THREADS, K::shared, stream, call);
  check_launch();
}

template <class T>
void load_backward_as(const Problem& p) {
  if (p.D <= 64) return load_backward_of<QueriesNarrow<T>, KeysNarrow<T>>();
  return load_backward_of<QueriesWide<T>, KeysWide<T>>();
}

template <class T>
void backward_long_as(const Problem& p, const Gradients& gradients, void* stream) {
  if (p.D <= 64) return launch_backward<QueriesNarrow<T>, KeysNarrow<T>>(p, gradients, stream);
  return launch_backward<QueriesWide<T>, KeysWide<T>>(p, gradients, stream);
}

}  // namespace txl_cuda
