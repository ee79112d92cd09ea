// The kernels of the instruction set in use: the best this processor has, or the one
// TXL_KERNELS_ISA names.
#pragma once
#include <string>
#include <vector>

#include "cpu_problem.h"

namespace txl {

// The kernels of one element type.
struct Calls {
  void (*forward)(const Problem&);
  void (*backward)(const Problem&, const Gradients&);
};

// Probes of the machine, for benchmarks to compare a kernel with; and the kernels' exp, for a test of its
// accuracy.
struct Probes {
  double (*fma)(int64_t iterations, int threads);                // keeps the float32 units busy; operations done
  double (*pairs)(int64_t iterations, int threads);              // the same of those that bfloat16 is multiplied by
  void (*read)(const float* data, int64_t floats, int threads);  // reads memory once
  void (*exp)(const float* x, float* y, int64_t n);              // the kernels' own
};

struct Kernels {
  const char* isa;
  bool (*supported)();
  bool (*chosen)();  // of its own accord, if supported
  Calls f32, bf16;
  Probes probes;

  const Calls& of(const Problem& p) const { return p.type == Type::bf16 ? bf16 : f32; }
};

// Best first. Only those compiled for this architecture.
const std::vector<Kernels>& all_kernels();

// Throws std::runtime_error if TXL_KERNELS_ISA names one that is unknown or that this processor
// lacks.
const Kernels& kernels();

// Multiplications of bfloat16 by VDPBF16PS for one of float32's, measured at the first call; 0 where the processor
// lacks it, or has AMX.
double pairs_over_floats();

// Multiplications that the unit emulated_bf16 has done in this process; 0 in a build without it.
int64_t emulated_multiplications();

// An instruction set that the processor has and the system keeps from this process, and why; or an empty string.
std::string refused();

// Chooses anew: "" for the best one. For tests, which run every instruction set in one process.
void force_isa(const std::string& name);

}  // namespace txl
