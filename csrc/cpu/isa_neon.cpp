// The kernels for 64-bit Arm, where NEON is part of the architecture.
#include "generic/includes.h"

#if defined(__aarch64__)
#define TXL_ISA isa_neon
#define TXL_LANES 4
#include "generic/kernels.inl"
#include "generic/probes.inl"
#endif
