// The kernels of bfloat16 for AMX, its products in plain code for any processor.
#include "generic/includes.h"

#define TXL_ISA isa_emulated_amx
#ifndef TXL_BASELINE_LANES
#define TXL_BASELINE_LANES 4  // 16 in a test: the code of AVX-512 on any processor
#endif
#define TXL_LANES TXL_BASELINE_LANES
#define TXL_TILE_ROWS 32
#define TXL_TILE_DEPTH 32
#define TXL_UNIT "pairs/emulated.inl"
#include "generic/kernels.inl"
#include "generic/probe_pairs.inl"
