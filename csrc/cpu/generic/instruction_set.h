// The instruction set that the kernels are compiled for. The build defines TXL_ISA_<its name>; this file defines the
// rest, or nothing if the architecture lacks the instruction set.
//
//   TXL_ISA          the namespace of its code
//   TXL_TARGET       target features that the compiler may use beyond the architecture's baseline
//   TXL_LANES        floats in a vector register
//   TXL_AVX512       AVX-512F intrinsics are available
//   TXL_AVX512_BF16  AVX512_BF16 intrinsics are available
//   TXL_ARM_BF16     instructions of FEAT_BF16 are available
//   TXL_BF16_DOT     products are bf16 dot products: factors are pairs of bfloat16; only bfloat16 calls are compiled
//   TXL_MICROKERNEL  the header of the microkernel. It defines MR, NR and DEPTH (the register tile is MR x NR, its
//   inner
//                    dimension a multiple of DEPTH), TileConfig (state that a thread needs for it) and microkernel();
//                    with TXL_BF16_DOT also peak_loop() and peak_loop_operations(), which measure peak throughput
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef TXL_BASELINE_LANES
#define TXL_BASELINE_LANES 4  // a test sets 16, to run code for 16 lanes on any processor
#endif

#if defined(TXL_ISA_baseline)
#define TXL_ISA isa_baseline
#define TXL_LANES TXL_BASELINE_LANES

#elif defined(TXL_ISA_neon) && defined(__aarch64__)  // part of the architecture
#define TXL_ISA isa_neon
#define TXL_LANES 4

#elif defined(TXL_ISA_neon_bf16) && defined(__aarch64__)
#define TXL_ISA isa_neon_bf16
#ifdef __clang__  // accepts GCC's form only from version 16 on
#define TXL_TARGET "bf16"
#else
#define TXL_TARGET "arch=armv8.2-a+bf16"
#endif
#define TXL_LANES 4
#define TXL_ARM_BF16
#define TXL_BF16_DOT
#define TXL_MICROKERNEL "../isa/neon_bf16.h"

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
#define TXL_AVX512_BF16
#define TXL_BF16_DOT
#define TXL_MICROKERNEL "../isa/avx512_bf16.h"

#elif defined(TXL_ISA_amx) && defined(__x86_64__)  // every processor with AMX has AVX512_BF16
#define TXL_ISA isa_amx
#define TXL_TARGET "avx512f,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma"
#define TXL_LANES 16
#define TXL_AVX512
#define TXL_AVX512_BF16
#define TXL_BF16_DOT
#define TXL_MICROKERNEL "../isa/amx.h"

#elif defined(TXL_ISA_emulated_bf16)  // avx512_bf16 with its dot products emulated, for any processor
#define TXL_ISA isa_emulated_bf16
#define TXL_LANES TXL_BASELINE_LANES
#define TXL_BF16_DOT
#define TXL_MICROKERNEL "../isa/emulated.h"
#define TXL_TILE_ROWS 8
#define TXL_TILE_DEPTH 2

#elif defined(TXL_ISA_emulated_amx)  // amx with its tile products emulated
#define TXL_ISA isa_emulated_amx
#define TXL_LANES TXL_BASELINE_LANES
#define TXL_BF16_DOT
#define TXL_MICROKERNEL "../isa/emulated.h"
#define TXL_TILE_ROWS 32
#define TXL_TILE_DEPTH 32
#endif

#ifndef TXL_MICROKERNEL
#define TXL_MICROKERNEL "../isa/float32.h"
#endif

#define TXL_PRAGMA(x) _Pragma(#x)

// Begin and end of code that may use TXL_TARGET.
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

// Unrolls the next loop, whose counter indexes an array of vectors: the array stays in registers only if the loop is
// unrolled before the compiler assigns them.
#ifdef __clang__
#define TXL_UNROLL(n) _Pragma("unroll")
#elif defined(__GNUC__)
#define TXL_UNROLL(n) TXL_PRAGMA(GCC unroll n)
#endif
#define TXL_INLINE static inline __attribute__((always_inline))
