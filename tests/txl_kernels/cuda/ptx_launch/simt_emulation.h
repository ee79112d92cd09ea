// Instead of the emulation: launches go to whoever runs the kernels' PTX. See
// tests/support/cuda_ptx.py.
#pragma once
#include <dlfcn.h>

#include "../simt_emulation.h"

#define TXL_VISIBLE __attribute__((visibility("default")))

// (name of the kernel, grid [3], threads, bytes of shared memory, parameters, their bytes, pairs of
// address and bytes that the kernel may access, how many pairs)
using LaunchElsewhere = void (*)(const char*, const unsigned*, int, size_t, const void*, size_t, const uint64_t*, int);

extern "C" TXL_VISIBLE LaunchElsewhere txl_launch_elsewhere;

namespace simt {

template <class Problem>
void launch_elsewhere(void (*kernel)(Problem), dim3 grid, int threads, size_t shared, const Problem& p) {
  Dl_info symbol;
  if (!dladdr(reinterpret_cast<void*>(kernel), &symbol) || !symbol.dli_sname) die("a kernel without a name");
  const uint64_t item = p.type == decltype(p.type)::f32 ? 4 : 2;
  const uint64_t B = p.B, H = p.H, L = p.L, M = p.M, T = p.T, D = p.D;
  uint64_t spans[32];
  int count = 0;
  const auto may_access = [&](const void* data, uint64_t bytes) {
    if (!data || !bytes) return;
    spans[2 * count] = reinterpret_cast<uint64_t>(data), spans[2 * count + 1] = bytes, ++count;
  };
  const auto rows = [&](const auto& view, uint64_t n0, uint64_t n1, uint64_t n2) {
    if (n0 && n1 && n2)
      may_access(view.data, ((n0 - 1) * view.s0 + (n1 - 1) * view.s1 + (n2 - 1) * view.s2 + D) * item);
  };
  rows(p.q, B, H, L), rows(p.k, B, H, L), rows(p.v, B, H, L), rows(p.k_mem, B, H, M), rows(p.v_mem, B, H, M);
  rows(p.r, H, T, 1), rows(p.u, H, 1, 1), rows(p.w, H, 1, 1), rows(p.out, B, H, L);
  for (const auto& x : {p.start, p.end}) may_access(x.data, ((B - 1) * x.s0 + (L - 1) * x.s1 + 1) * sizeof(int32_t));
  may_access(p.seed, sizeof(int64_t));
  may_access(p.lse, B * H * L * sizeof(float));
  if (p.parts > 1) may_access(p.partial, B * H * L * p.parts * (D + 2) * sizeof(float));
  const unsigned sizes[3] = {grid.x, grid.y, grid.z};
  txl_launch_elsewhere(symbol.dli_sname, sizes, threads, shared, &p, sizeof(p), spans, count);
}

}  // namespace simt

#undef TXL_LAUNCH
#define TXL_LAUNCH(kernel, grid, threads, shared, stream, ...) \
  (static_cast<void>(stream), simt::launch_elsewhere(kernel, grid, threads, shared, __VA_ARGS__))
