// Instead of the emulation: launches go to whoever runs the kernels' PTX. See
// tests/support/cuda_ptx.py.
#pragma once
#include <dlfcn.h>

#include "../simt_emulation.h"

#define TXL_VISIBLE __attribute__((visibility("default")))

// (name of the kernel, grid [3], threads, bytes of shared memory, parameters, their bytes, pairs of
// address and bytes that the kernel may access, how many pairs, where tensor maps lie in the
// parameters, how many)
using LaunchElsewhere = void (*)(const char*, const unsigned*, int, size_t, const void*, size_t, const uint64_t*, int,
                                 const uint64_t*, int);

extern "C" TXL_VISIBLE LaunchElsewhere txl_launch_elsewhere;

namespace simt {

template <class Problem>
auto add_backward_maps(const Problem& p, std::vector<uint64_t>& offsets, int)
    -> decltype(static_cast<void>(p.dout_rows)) {
  for (const auto* map : {&p.dout_rows.map, &p.q_content_rows.map, &p.q_position_rows.map, &p.dr_rows})
    offsets.push_back(reinterpret_cast<const char*>(map) - reinterpret_cast<const char*>(&p));
}
template <class Problem>
void add_backward_maps(const Problem&, std::vector<uint64_t>&, long) {}

// What only backward reads and writes.
template <class Problem, class Add>
auto add_backward_spans(const Problem& p, const Add& add, int) -> decltype(static_cast<void>(p.stats)) {
  const uint64_t item = 2, heads = p.B * p.H, end = heads * p.L;
  const auto rows = [&](const auto& view, uint64_t H, uint64_t n, uint64_t columns) {
    if (view.data && n) add(view.data, ((p.B - 1) * view.s0 + (H - 1) * view.s1 + (n - 1) * view.s2 + columns) * item);
  };
  rows(p.dout, p.H, p.L, p.D), rows(p.dq, p.H, p.L, p.D), rows(p.dq_pos, p.H, p.L, p.Dr);
  rows(p.dk, p.Hkv, p.L, p.D), rows(p.dv, p.Hkv, p.L, p.D);
  rows(p.dk_mem, p.Hkv, p.M, p.D), rows(p.dv_mem, p.Hkv, p.M, p.D);
  const auto& dsink = p.dsink;
  if (dsink.data) add(dsink.data, ((p.B - 1) * dsink.s0 + (p.H - 1) * dsink.s1 + (p.L - 1) * dsink.s2 + 1) * 4);
  add(p.dlse, end * 4);
  add(p.dr, p.tables * p.H * (128 + p.T) * p.Dr * 4);
  add(p.q_content, p.workspace_bytes);
  if (p.dr_out.data) add(p.dr_out.data, ((p.H - 1) * p.dr_out.s0 + (p.T - 1) * p.dr_out.s1 + p.Dr) * item);
  for (const auto* view : {&p.du, &p.dw})
    if (view->data) add(view->data, ((p.H - 1) * view->s0 + p.D) * item);
}
template <class Problem, class Add>
void add_backward_spans(const Problem&, const Add&, long) {}

// Offsets of a call's tensor maps.
template <class Problem>
auto maps_of(const Problem& p, int) -> decltype(std::vector<uint64_t>{sizeof(p.k_rows)}) {
  std::vector<uint64_t> offsets;
  for (const auto* rows : {&p.k_rows, &p.v_rows, &p.k_mem_rows, &p.v_mem_rows, &p.r_rows})
    offsets.push_back(reinterpret_cast<const char*>(&rows->map) - reinterpret_cast<const char*>(&p));
  add_backward_maps(p, offsets, 0);
  return offsets;
}
template <class Problem>
std::vector<uint64_t> maps_of(const Problem&, long) {
  return {};
}

template <class Problem>
void launch_elsewhere(void (*kernel)(Problem), dim3 grid, int threads, size_t shared, const Problem& p) {
  Dl_info symbol;
  if (!dladdr(reinterpret_cast<void*>(kernel), &symbol) || !symbol.dli_sname) die("a kernel without a name");
  const uint64_t item = p.type == decltype(p.type)::f32 ? 4 : 2;
  const uint64_t B = p.B, H = p.H, L = p.L, M = p.M, T = p.T, D = p.D;
  uint64_t spans[64];
  int count = 0;
  const auto may_access = [&](const void* data, uint64_t bytes) {
    if (!data || !bytes) return;
    spans[2 * count] = reinterpret_cast<uint64_t>(data), spans[2 * count + 1] = bytes, ++count;
  };
  const auto elements = [&](const auto& view, uint64_t n0, uint64_t n1, uint64_t n2, uint64_t width, uint64_t bytes) {
    if (n0 && n1 && n2)
      may_access(view.data, ((n0 - 1) * view.s0 + (n1 - 1) * view.s1 + (n2 - 1) * view.s2 + width) * bytes);
  };
  const auto rows = [&](const auto& view, uint64_t n0, uint64_t n1, uint64_t n2) {
    elements(view, n0, n1, n2, D, item);
  };
  const uint64_t Hkv = p.Hkv, Dr = p.Dr;
  rows(p.q, B, H, L), rows(p.k, B, Hkv, L), rows(p.v, B, Hkv, L), rows(p.k_mem, B, Hkv, M), rows(p.v_mem, B, Hkv, M);
  rows(p.u, H, 1, 1), rows(p.out, B, H, L);
  elements(p.r, H, T, 1, Dr, item), elements(p.w, H, 1, 1, Dr, item), elements(p.q_pos, B, H, L, Dr, item);
  elements(p.sink, B, H, L, 1, sizeof(float));
  for (const auto& x : {p.start, p.end}) may_access(x.data, ((B - 1) * x.s0 + (L - 1) * x.s1 + 1) * sizeof(int32_t));
  may_access(p.seed, sizeof(int64_t));
  may_access(p.lse, B * H * L * sizeof(float));
  if (p.parts > 1) may_access(p.partial, B * H * L * p.parts * (D + 2) * sizeof(float));
  add_backward_spans(p, may_access, 0);
  const unsigned sizes[3] = {grid.x, grid.y, grid.z};
  const std::vector<uint64_t> maps = maps_of(p, 0);
  txl_launch_elsewhere(symbol.dli_sname, sizes, threads, shared, &p, sizeof(p), spans, count, maps.data(),
                       static_cast<int>(maps.size()));
}

}  // namespace simt

#undef TXL_LAUNCH
#define TXL_LAUNCH(kernel, grid, threads, shared, stream, ...) \
  (static_cast<void>(stream), simt::launch_elsewhere(kernel, grid, threads, shared, __VA_ARGS__))
