// The kernels for any processor of this architecture.
#include "generic/includes.h"

#define TXL_ISA isa_baseline
#define TXL_LANES 4
#include "generic/kernels.inl"
