// The kernels of the instruction set in use: the best this processor has, or the one
// TXL_KERNELS_ISA names.
#pragma once
#include <string>
#include <vector>

#include "problem.h"

namespace txl {

struct Kernels {
  const char* isa;
  bool (*supported)();
  void (*forward)(const Problem&);
  void (*backward)(const Problem&, const Gradients&);
};

// Best first. Only those compiled for this architecture.
const std::vector<Kernels>& all_kernels();

// Throws std::runtime_error if TXL_KERNELS_ISA names one that is unknown or that this processor
// lacks.
const Kernels& kernels();

// Chooses anew: "" for the best one. For tests, which run every instruction set in one process.
void force_isa(const std::string& name);

}  // namespace txl
