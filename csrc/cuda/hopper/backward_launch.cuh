// Launches of the backward kernels for one element type.
#pragma once
#include "backward_keys.cuh"
#include "backward_queries.cuh"
#include "finish.cuh"
#include "prefill_launch.cuh"

namespace txl_cuda {

template <class Q, class K>
int64_t key_blocks(const Problem& p) {
  return ceil_div(ceil_div(p.M, SIDE) + ceil_div(p.L, SIDE), K::GROUPS);
}

inline int64_t dr_floats(const BackwardProblem& x) { return x.tables * x.H * (DR_MARGIN + x.T) * x.Dr; }

// Returns the number of floats of a call's workspace, and points `x` to its parts.
template <class Q, class K>
int64_t lay_out_workspace(BackwardProblem& x, float* workspace) {
  static_assert(Q::QUERIES <= DR_MARGIN && Q::QUERY_GROUPS <= TABLES_OF_SLOT);
  const int64_t heads = x.B * x.H;
  int64_t floats = 0;
  const auto allocate = [&](int64_t count) {
    float* const at = workspace + floats;
    floats += (count + 3) / 4 * 4;
    return at;
  };
  x.rows = ceil_div(x.L, Q::QUERIES) * Q::QUERIES;
  x.q_parts = x.rows / Q::QUERIES * x.parts * Q::QUERY_GROUPS * WARPGROUP_WARPS;
  x.k_parts = key_blocks<Q, K>(x) * K::GROUPS * WARPGROUP_WARPS;
  const int64_t position_columns = x.has_q_pos ? NARROW : x.D;
  x.q_content = allocate(heads * x.rows * x.D / 2), x.q_position = allocate(heads * x.rows * position_columns / 2);
  if (x.has_sink) x.dout_beside_sink = allocate(heads * x.rows * x.D / 2);
  x.stats = reinterpret_cast<Stats*>(allocate(heads * x.rows * 2));
  if (x.du.data || x.dw.data) x.k_sums = allocate(heads * x.k_parts * x.D);
  if (x.dw.data) x.q_sums = allocate(heads * x.q_parts * x.D);
  if (x.parts > 1 && x.dq.data) x.dq_parts = allocate(x.parts * heads * x.rows * x.D);
  if (x.parts > 1 && x.dq_pos.data) x.dq_pos_parts = allocate(x.parts * heads * x.rows * x.Dr);
  x.workspace_bytes = floats * static_cast<int64_t>(sizeof(float));
  if (x.dr_out.data) x.dr = allocate(dr_floats(x));
  return floats;
}

// Copies where gradients are written, and how the work is split.
inline void set_gradients(BackwardProblem& x, const Gradients& given) {
  x.parts = given.slots ? 1 : given.parts;
  x.dout = given.dout, x.dlse = given.dlse, x.slots = given.slots, x.tables = given.tables;
  x.dq = given.dq, x.dk = given.dk, x.dv = given.dv, x.dk_mem = given.dk_mem, x.dv_mem = given.dv_mem;
  x.dr_out = given.dr_out, x.du = given.du, x.dw = given.dw, x.dq_pos = given.dq_pos, x.dsink = given.dsink;
}

template <class Q, class K>
int64_t workspace_as(const Problem& p, const Gradients& gradients) {
  BackwardProblem x;
  static_cast<Problem&>(x) = p;
  set_gradients(x, gradients);
  return lay_out_workspace<Q, K>(x, nullptr);
}

template <class Q, class K>
BackwardProblem make_backward_problem(const Problem& p, const Gradients& gradients) {
  BackwardProblem x;
  static_cast<PrefillProblem&>(x) = make_prefill_problem(p);
  set_gradients(x, gradients);
  lay_out_workspace<Q, K>(x, gradients.workspace);
  const auto padded = [&](void* data, int64_t columns) {
    const int64_t head = x.rows * columns;
    return View{data, p.H * head, head, columns};
  };
  x.dout_rows = x.dout_beside_sink ? map_rows(p, padded(x.dout_beside_sink, p.D), p.B, p.H, x.rows)
                                   : map_rows(p, x.dout, p.B, p.H, p.L);
  x.q_content_rows = map_rows(p, padded(x.q_content, p.D), p.B, p.H, x.rows);
  if (p.has_q_pos) {
    x.q_position_rows = map_narrow_rows(p, padded(x.q_position, NARROW), p.B, x.rows, NARROW);
  } else {
    x.q_position_rows = map_rows(p, padded(x.q_position, p.D), p.B, p.H, x.rows);
    x.dr_rows = map_sums(p, x.dr, x.slots ? x.slots * Q::QUERY_GROUPS : 1, DR_MARGIN + p.T, Q::DR_ROWS);
  }
  return x;
}

template <class Q, class K>
void load_backward_of() {
  load_kernel(finish_kernel<typename Q::T>);
  allow_shared(backward_queries_kernel<Q>, Q::SHARED_BYTES), allow_shared(backward_keys_kernel<K>, K::SHARED_BYTES);
}

template <class Q, class K>
void launch_backward(const Problem& p, const Gradients& gradients, void* stream) {
  const auto queries = backward_queries_kernel<Q>;
  const auto keys = backward_keys_kernel<K>;
  const auto finish = finish_kernel<typename Q::T>;
  BackwardProblem call = make_backward_problem<Q, K>(p, gradients);
  const dim3 slot_grid(static_cast<unsigned>(gradients.slots), static_cast<unsigned>(p.H), 1);
  if (call.dr) fill_zeros(call.dr, dr_floats(call) * static_cast<int64_t>(sizeof(float)), stream);
  const int64_t blocks = call.rows / Q::QUERIES, launches = call.slots ? ceil_div(p.B * blocks, call.slots) : 1;
  for (call.launch_index = 0; call.launch_index < launches; ++call.launch_index) {
    TXL_LAUNCH(queries, call.slots ? slot_grid : grid_of(p, blocks * call.parts), Q::THREADS, Q::SHARED_BYTES, stream,
               call);
    check_launch();
  }
  const dim3 key_grid(static_cast<unsigned>(key_blocks<Q, K>(p)), static_cast<unsigned>(p.Hkv),
                      static_cast<unsigned>(p.B));
  TXL_LAUNCH_NEXT(keys, key_grid, K::THREADS, K::SHARED_BYTES, stream, call);
  check_launch();
  call.r_blocks = call.dr_out.data ? Finish::blocks(p.T * p.Dr) : 0;
  call.q_blocks = call.dq_parts ? Finish::blocks(p.B * p.L * p.D) : 0;
  call.q_pos_blocks = call.dq_pos_parts ? Finish::blocks(p.B * p.L * p.Dr) : 0;
  const int64_t finish_blocks =
      call.r_blocks + call.q_blocks + call.q_pos_blocks + (call.k_sums ? p.D / Finish::COLUMNS : 0);
  if (!finish_blocks) return;
  const dim3 finish_grid(static_cast<unsigned>(finish_blocks), static_cast<unsigned>(p.H), 1);
  TXL_LAUNCH_NEXT(finish, finish_grid, THREADS, sizeof(float) * 2 * THREADS, stream, call);
  check_launch();
}

template <class T>
void load_backward_as(const Problem& p) {
  if (p.has_q_pos && p.D <= 64) return load_backward_of<QueriesQPos64<T>, KeysQPos64<T>>();
  if (p.has_q_pos) return load_backward_of<QueriesQPos128<T>, KeysQPos128<T>>();
  if (p.D <= 64) return load_backward_of<Queries64<T>, Keys64<T>>();
  return load_backward_of<Queries128<T>, Keys128<T>>();
}

template <class T>
void backward_as(const Problem& p, const Gradients& gradients, void* stream) {
  if (p.has_q_pos && p.D <= 64) return launch_backward<QueriesQPos64<T>, KeysQPos64<T>>(p, gradients, stream);
  if (p.has_q_pos) return launch_backward<QueriesQPos128<T>, KeysQPos128<T>>(p, gradients, stream);
  if (p.D <= 64) return launch_backward<Queries64<T>, Keys64<T>>(p, gradients, stream);
  return launch_backward<Queries128<T>, Keys128<T>>(p, gradients, stream);
}

}  // namespace txl_cuda
