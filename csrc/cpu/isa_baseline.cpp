// The kernels for any processor of this architecture.
#include "generic/includes.h"

#define TXL_ISA isa_baseline
#ifndef TXL_BASELINE_LANES
#define TXL_BASELINE_LANES 4  // 16 in a test: the code of AVX-512 on any processor
#endif
#define TXL_LANES TXL_BASELINE_LANES
#include "generic/kernels.inl"
#include "generic/probes.inl"
