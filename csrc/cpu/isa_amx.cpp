// The kernels of bfloat16 for AMX, whose processors have AVX512_BF16, too. Chosen at run time, so only
// what follows the pragma may use the instructions.
#include "generic/includes.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bf16,amx-tile,amx-bf16,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bf16,amx-tile,amx-bf16,avx2,fma")
#endif
#define TXL_ISA isa_amx
#define TXL_LANES 16
#define TXL_AVX512
#define TXL_ROUNDS_BF16
#define TXL_UNIT "pairs/amx.inl"
#include "generic/kernels.inl"
#include "generic/probe_pairs.inl"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
