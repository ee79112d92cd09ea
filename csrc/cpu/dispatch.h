// The choice of an instruction set and its kernels: the fastest that this processor supports, or the one that
// TXL_KERNELS_ISA names.
#pragma once
#include <string>
#include <vector>

#include "cpu_problem.h"

namespace txl {

// The entry points for one element type.
struct EntryPoints {
  void (*forward)(const Problem&);
  void (*backward)(const Problem&, const Gradients&);
};

// Measurements of the machine's peak, with which benchmarks compare kernels, and the kernels' exp, whose accuracy a
// test measures.
struct Probes {
  double (*fma)(int64_t iterations, int threads);                // float32 FMA at peak rate; returns operations done
  double (*bf16_dot)(int64_t iterations, int threads);           // the same for products of bfloat16
  void (*read)(const float* data, int64_t floats, int threads);  // reads memory once
  void (*exp)(const float* x, float* y, int64_t n);              // y = exp(x)
};

struct Kernels {
  const char* isa;
  bool (*supported)();
  bool (*preferred)();  // false: used only if TXL_KERNELS_ISA names it
  EntryPoints f32, bf16;
  Probes probes;

  const EntryPoints& entry_points(const Problem& p) const { return p.type == Type::bf16 ? bf16 : f32; }
};

// The kernels compiled for this architecture, fastest instruction set first.
const std::vector<Kernels>& all_kernels();

// The kernels in use. Throws std::runtime_error if TXL_KERNELS_ISA names an instruction set that is unknown or that
// this processor lacks.
const Kernels& kernels();

// Multiplications that the microkernel of emulated_bf16 has done in this process; 0 in a build without it.
int64_t emulated_multiplications();

// Why the system does not let this process use AMX although the processor has it; empty otherwise.
std::string why_not_amx();

// Sets the instruction set from now on; "" for the fastest. Tests run every instruction set in one process.
void force_isa(const std::string& name);

}  // namespace txl
