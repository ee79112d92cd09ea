// The kernels and probes of one instruction set: the build compiles this file once for each. Kernels are chosen at run
// time (dispatch.h), so only code between TXL_BEGIN_TARGET and TXL_END_TARGET may use the instructions, and headers of
// other code are included before. Between the two no template of the standard library is instantiated: the linker could
// give that instance to callers that run on an older processor.
#include "generic/instruction_set.h"
#include "cpu_problem.h"
#include "runtime.h"

#ifdef TXL_ISA
TXL_BEGIN_TARGET
#include "generic/backward.h"
#include "generic/forward.h"

namespace txl::TXL_ISA {

void forward(const Problem& p) {
  if (p.B * p.H * p.L == 0) return;
#ifndef TXL_BF16_DOT
  if (p.type == Type::f32) return run_forward<float>(p);
#endif
  run_forward<bf16>(p);
}

void backward(const Problem& p, const Gradients& g) {
#ifndef TXL_BF16_DOT
  if (p.type == Type::f32) return run_backward<float>(p, g);
#endif
  run_backward<bf16>(p, g);
}

// Probes of dispatch.h, for benchmarks and tests.

#ifdef TXL_TILE_ROWS  // an emulated microkernel
int64_t multiplications() { return __atomic_load_n(&multiply_count, __ATOMIC_RELAXED); }
#endif

#ifdef TXL_BF16_DOT
double bf16_dot(int64_t iterations, int threads) {
  parallel_for(threads, threads, [&](int64_t, int) {
    [[maybe_unused]] const TileConfig tile_config;
    peak_loop(iterations);
  });
  return peak_loop_operations(iterations) * threads;
}

#else
// FMA on independent registers, in every thread.
double fma(int64_t iterations, int threads) {
  constexpr int sums = 2 * MR;  // as the register tile has: Arm's largest cores have 16 FMA in flight
  volatile float sink = 0;
  parallel_for(threads, threads, [&](int64_t, int) {
    uint32_t state = 1;
    const vf x[2] = {0.5f * (vf)random_operand(state), 0.5f * (vf)random_operand(state)};  // below 1: sums stay finite
    const vf y[2] = {(vf)random_operand(state), (vf)random_operand(state)};
    vf acc[sums];
    TXL_UNROLL(24)
    for (int z = 0; z < sums; ++z) acc[z] = (vf)random_operand(state);
    for (int64_t n = 0; n < iterations; ++n) {
      TXL_UNROLL(24)
      for (int z = 0; z < sums; ++z) acc[z] = acc[z] * x[z % 2] + y[z / 2 % 2];
    }
    vf sum = acc[0];
    for (int z = 1; z < sums; ++z) sum += acc[z];
    const float total = reduce_add(sum);
    if (total == 1.25e-38f)
      sink = total;  // never true: a store in every thread would race; without one the loop is dead code
  });
  return 2.0 * sums * LANES * static_cast<double>(iterations) * threads;
}

void read(const float* data, int64_t floats, int threads) {
  constexpr int64_t chunk = 1 << 15;
  volatile float sink = 0;
  parallel_for(threads, div_up(floats, chunk), [&](int64_t item, int) {
    const int64_t last = min_of((item + 1) * chunk, floats);
    vf acc[8] = {};
    int64_t n = item * chunk;
    for (; n + 8 * LANES <= last; n += 8 * LANES) {
      TXL_UNROLL(8)
      for (int z = 0; z < 8; ++z) acc[z] += load(data + n + z * LANES);
    }
    vf sum = acc[0];
    for (int z = 1; z < 8; ++z) sum += acc[z];
    for (; n < last; ++n) sum[0] += data[n];
    const float total = reduce_add(sum);
    if (total == 1.25e-38f) sink = total;
  });
}

void exp(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp_of(x[i]);
}
#endif

}  // namespace txl::TXL_ISA
TXL_END_TARGET
#endif
