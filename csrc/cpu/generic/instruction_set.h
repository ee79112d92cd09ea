// The instruction set that the kernels are compiled for: TXL_ISA_<its name> is defined by the build. Where this
// architecture lacks it nothing else is.
//
//   TXL_ISA          namespace of its code
//   TXL_TARGET       what the compiler may use, beyond what every processor of this architecture has
//   TXL_LANES        floats in a vector register
//   TXL_AVX512       AVX-512F's intrinsics may be used
//   TXL_ROUNDS_BF16  so may those of AVX512_BF16
//   TXL_ARM_BF16     so may the instructions of FEAT_BF16
//   TXL_PAIRS        a unit multiplies pairs of bfloat16; only calls in bfloat16 are compiled
//   TXL_UNIT         the header of what multiplies: MR, NR and DEPTH, the sizes of the tile it multiplies at once;
//   Unit,
//                    what must be prepared; micro, the product. With TXL_PAIRS busy and operations_of, for a probe
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef TXL_BASELINE_LANES
#define TXL_BASELINE_LANES 4  // 16 in a test: the code of AVX-512 on any processor
#endif

#if defined(TXL_ISA_baseline)
#define TXL_ISA isa_baseline
#define TXL_LANES TXL_BASELINE_LANES

#elif defined(TXL_ISA_neon) && defined(__aarch64__)  // where it is part of the architecture
#define TXL_ISA isa_neon
#define TXL_LANES 4

#elif defined(TXL_ISA_neon_bf16) && defined(__aarch64__)
#define TXL_ISA isa_neon_bf16
#ifdef __clang__  // which learnt GCC's form in its 16th version
#define TXL_TARGET "bf16"
#else
#define TXL_TARGET "arch=armv8.2-a+bf16"
#endif
#define TXL_LANES 4
#define TXL_ARM_BF16
#define TXL_PAIRS
#define TXL_UNIT "../isa/neon_bf16.h"

#elif defined(TXL_ISA_avx2) && defined(__x86_64__)
#define TXL_ISA isa_avx2
#define TXL_TARGET "avx2,fma"
#define TXL_LANES 8

#elif defined(TXL_ISA_avx512) && defined(__x86_64__)
#define TXL_ISA isa_avx512
#define TXL_TARGET "avx512f,avx2,fma"
#define TXL_LANES 16
#define TXL_AVX512

#elif defined(TXL_ISA_avx512_bf16) && defined(__x86_64__)
#define TXL_ISA isa_avx512_bf16
#define TXL_TARGET "avx512f,avx512dq,avx512bf16,avx2,fma"
#define TXL_LANES 16
#define TXL_AVX512
#define TXL_ROUNDS_BF16
#define TXL_PAIRS
#define TXL_UNIT "../isa/avx512_bf16.h"

#elif defined(TXL_ISA_amx) && defined(__x86_64__)  // whose processors have AVX512_BF16, too
#define TXL_ISA isa_amx
#define TXL_TARGET "avx512f,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma"
#define TXL_LANES 16
#define TXL_AVX512
#define TXL_ROUNDS_BF16
#define TXL_PAIRS
#define TXL_UNIT "../isa/amx.h"

#elif defined(TXL_ISA_emulated_bf16)  // avx512_bf16, its products in plain code for any processor
#define TXL_ISA isa_emulated_bf16
#define TXL_LANES TXL_BASELINE_LANES
#define TXL_PAIRS
#define TXL_UNIT "../isa/emulated.h"
#define TXL_TILE_ROWS 8
#define TXL_TILE_DEPTH 2

#elif defined(TXL_ISA_emulated_amx)  // amx, the same
#define TXL_ISA isa_emulated_amx
#define TXL_LANES TXL_BASELINE_LANES
#define TXL_PAIRS
#define TXL_UNIT "../isa/emulated.h"
#define TXL_TILE_ROWS 32
#define TXL_TILE_DEPTH 32
#endif

#ifndef TXL_UNIT
#define TXL_UNIT "../isa/float32.h"
#endif

#define TXL_PRAGMA(x) _Pragma(#x)

// Around the code that may use TXL_TARGET.
#if !defined(TXL_TARGET)
#define TXL_BEGIN_TARGET
#define TXL_END_TARGET
#elif defined(__clang__)
#define TXL_PUSH_TARGET(target_) TXL_PRAGMA(clang attribute push(__attribute__((target(target_))), apply_to = function))
#define TXL_BEGIN_TARGET TXL_PUSH_TARGET(TXL_TARGET)
#define TXL_END_TARGET TXL_PRAGMA(clang attribute pop)
#else
#define TXL_PUSH_TARGET(target_) TXL_PRAGMA(GCC push_options) TXL_PRAGMA(GCC target(target_))
#define TXL_BEGIN_TARGET TXL_PUSH_TARGET(TXL_TARGET)
#define TXL_END_TARGET TXL_PRAGMA(GCC pop_options)
#endif

// Before a loop over registers, which must be gone before the compiler decides what lives in memory.
#ifdef __clang__
#define TXL_UNROLL(n) _Pragma("unroll")
#elif defined(__GNUC__)
#define TXL_UNROLL(n) TXL_PRAGMA(GCC unroll n)
#endif
#define TXL_INLINE static inline __attribute__((always_inline))
