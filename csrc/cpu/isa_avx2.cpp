// The kernels for AVX2 with FMA. Chosen at run time, so only what follows the pragma may use the
// instructions.
#include "generic/includes.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define TXL_ISA isa_avx2
#define TXL_LANES 8
#include "generic/kernels.inl"
#include "generic/probes.inl"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
