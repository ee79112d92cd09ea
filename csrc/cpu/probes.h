// What the machine itself can do, for benchmarks to put beside a kernel; and the kernels' exp, for
// a test of its accuracy. In the instruction set in use.
#pragma once
#include <cstdint>

namespace txl {

struct Probes {
  double (*fma)(int64_t iterations, int threads);                // keeps the float32 units busy; operations done
  double (*pairs)(int64_t iterations, int threads);              // the same of those that bfloat16 is multiplied by
  void (*read)(const float* data, int64_t floats, int threads);  // reads memory once
  void (*exp)(const float* x, float* y, int64_t n);              // the kernels' own
};

Probes probes();

}  // namespace txl
