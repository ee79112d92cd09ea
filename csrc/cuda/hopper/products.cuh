// wgmma: D = A B or D += A B by the four warps of a warpgroup, M = 64 rows, K in steps of 16, float32 accumulators,
// asynchronous.
//
// Accumulator in registers, d[N / 2] of a thread: d[4 k + 2 h + e] is row 16 warp + lane / 4 + 8 h, column
// 8 k + 2 (lane % 4) + e. An A operand in registers holds the same places, two columns a register:
// a[4 s + 2 c + h] is row .. + 8 h, columns 16 s + 8 c + 2 (lane % 4) and the next.
//
// An operand in shared memory is one subtile or several: 64 rows of 64 elements, 128 bytes each with the 128-byte
// swizzle, at a multiple of 1024 bytes. Columns from 64 on are in another subtile, SUBTILE_BYTES later. A narrow one
// has rows of 16 elements, 32 bytes each with the 32-byte swizzle.
#pragma once
#include "../element.cuh"
#include "hardware.cuh"

namespace txl_cuda {

constexpr int SIDE = 64;  // rows and columns of a subtile
constexpr int ROW_BYTES = 128, SUBTILE_BYTES = SIDE * ROW_BYTES;
constexpr int NARROW = 16, NARROW_ROW_BYTES = 32, NARROW_BYTES = SIDE * NARROW_ROW_BYTES;  // of a narrow tile
constexpr int WARPGROUP = 128;                                                             // threads

// Whether an operand [M, K] or [N, K] in shared memory is contiguous along K, or along M (A) or N (B).
enum class Major { K, MN };
// The swizzle of an operand's rows.
enum class Swizzle { B128, B32 };
// What happens to the accumulator: D = A B, or D = A B + D.
enum class ScaleOut { Zero, One };

// PTX's matrix descriptor of an operand: its address, the leading byte offset (to the next subtile) and the stride byte
// offset (to the next 8 rows), all in units of 16 bytes; layout type 1, the 128-byte swizzle, or 3, the 32-byte
// swizzle.
template <Swizzle SWIZZLE = Swizzle::B128>
TXL_DEVICE uint64_t make_descriptor(uint32_t operand) {
  constexpr bool NARROW_ROWS = SWIZZLE == Swizzle::B32;
  constexpr int LEADING = NARROW_ROWS ? NARROW_BYTES : SUBTILE_BYTES;
  constexpr int STRIDE = 8 * (NARROW_ROWS ? NARROW_ROW_BYTES : ROW_BYTES);
  return uint64_t{operand >> 4 & 0x3FFF} | uint64_t{LEADING / 16} << 16 | uint64_t{STRIDE / 16} << 32 |
         uint64_t{NARROW_ROWS ? 3 : 1} << 62;
}
// What a descriptor advances by to the n-th 16 of K, in units of 16 bytes. K-major: the fifth begins the next subtile.
template <Major MAJOR, Swizzle SWIZZLE = Swizzle::B128>
TXL_DEVICE constexpr uint64_t advance_k(int n) {
  if (SWIZZLE == Swizzle::B32) return static_cast<uint64_t>(MAJOR == Major::K ? 0 : n * (16 * NARROW_ROW_BYTES / 16));
  return static_cast<uint64_t>(MAJOR == Major::K ? n / 4 * (SUBTILE_BYTES / 16) + n % 4 * (32 / 16)
                                                 : n * (16 * ROW_BYTES / 16));
}

#ifdef __CUDACC__

// clang-format off
#define TXL_8(d, n) "+f"(d[n]), "+f"(d[n+1]), "+f"(d[n+2]), "+f"(d[n+3]), "+f"(d[n+4]), "+f"(d[n+5]), "+f"(d[n+6]), "+f"(d[n+7])
#define TXL_16(d) TXL_8(d, 0), TXL_8(d, 8)
#define TXL_32(d) TXL_8(d, 0), TXL_8(d, 8), TXL_8(d, 16), TXL_8(d, 24)
#define TXL_64(d) TXL_32(d), TXL_8(d, 32), TXL_8(d, 40), TXL_8(d, 48), TXL_8(d, 56)
#define TXL_FIRST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TXL_FIRST_16 TXL_FIRST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TXL_FIRST_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TXL_NEXT_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The instruction: M = 64, N columns, K = 16; adds to the accumulator unless scale_d is 0.
#define TXL_WGMMA(T, N, D, A, B, SCALE_D, MAJORS) \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " SCALE_D ", 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." T "." T " {" D "}, " A ", " B ", add, 1, 1, " MAJORS ";\n}"

// For one type of element: A in four registers (RS) or by its descriptor (SS), B by its descriptor.
#define TXL_PRODUCTS(Element, T) \
  template <Major B> \
  TXL_DEVICE void wgmma(Element, float (&d)[16], const uint32_t* a, uint64_t b, int scale_d) { \
    asm volatile(TXL_WGMMA(T, "32", TXL_FIRST_16, "{%16, %17, %18, %19}", "%20", "%21", "%22") \
                 : TXL_16(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(B == Major::MN)); \
  } \
  template <Major B> \
  TXL_DEVICE void wgmma(Element, float (&d)[32], const uint32_t* a, uint64_t b, int scale_d) { \
    asm volatile(TXL_WGMMA(T, "64", TXL_FIRST_32, "{%32, %33, %34, %35}", "%36", "%37", "%38") \
                 : TXL_32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(B == Major::MN)); \
  } \
  template <Major B> \
  TXL_DEVICE void wgmma(Element, float (&d)[64], const uint32_t* a, uint64_t b, int scale_d) { \
    asm volatile(TXL_WGMMA(T, "128", TXL_FIRST_32 ", " TXL_NEXT_32, "{%64, %65, %66, %67}", "%68", "%69", "%70") \
                 : TXL_64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(B == Major::MN)); \
  } \
  template <Major A, Major B> \
  TXL_DEVICE void wgmma(Element, float (&d)[8], uint64_t a, uint64_t b, int scale_d) { \
    asm volatile(TXL_WGMMA(T, "16", TXL_FIRST_8, "%8", "%9", "%10", "%11, %12") \
                 : TXL_8(d, 0) : "l"(a), "l"(b), "r"(scale_d), "n"(A == Major::MN), "n"(B == Major::MN)); \
  } \
  template <Major A, Major B> \
  TXL_DEVICE void wgmma(Element, float (&d)[16], uint64_t a, uint64_t b, int scale_d) { \
    asm volatile(TXL_WGMMA(T, "32", TXL_FIRST_16, "%16", "%17", "%18", "%19, %20") \
                 : TXL_16(d) : "l"(a), "l"(b), "r"(scale_d), "n"(A == Major::MN), "n"(B == Major::MN)); \
  } \
  template <Major A, Major B> \
  TXL_DEVICE void wgmma(Element, float (&d)[32], uint64_t a, uint64_t b, int scale_d) { \
    asm volatile(TXL_WGMMA(T, "64", TXL_FIRST_32, "%32", "%33", "%34", "%35, %36") \
                 : TXL_32(d) : "l"(a), "l"(b), "r"(scale_d), "n"(A == Major::MN), "n"(B == Major::MN)); \
  } \
  template <Major A, Major B> \
  TXL_DEVICE void wgmma(Element, float (&d)[64], uint64_t a, uint64_t b, int scale_d) { \
    asm volatile(TXL_WGMMA(T, "128", TXL_FIRST_32 ", " TXL_NEXT_32, "%64", "%65", "%66", "%67, %68") \
                 : TXL_64(d) : "l"(a), "l"(b), "r"(scale_d), "n"(A == Major::MN), "n"(B == Major::MN)); \
  }
TXL_PRODUCTS(Bf16, "bf16")
TXL_PRODUCTS(F16, "f16")
// clang-format on

// Keeps the compiler from moving accesses to these registers across the warpgroup_arrive or warpgroup_wait beside it.
template <int N>
TXL_DEVICE void fence_operand(float (&d)[N]) {
  TXL_UNROLL
  for (int n = 0; n < N; ++n) asm volatile("" : "+f"(d[n])::"memory");
}
template <int N>
TXL_DEVICE void fence_operand(const uint32_t (&a)[N]) {
  TXL_UNROLL
  for (int n = 0; n < N; ++n) asm volatile("" ::"r"(a[n]) : "memory");
}
// Makes registers written before visible to the products after it, which are one group until the commit.
TXL_DEVICE void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TXL_DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <Major B, ScaleOut SCALE, class T, int N, int K>
TXL_DEVICE void issue_rs(T, float (&d)[N], const uint32_t (&a)[K], uint64_t b) {
  if (SCALE == ScaleOut::One) fence_operand(d);
  fence_operand(a);
  warpgroup_arrive();
  TXL_UNROLL
  for (int n = 0; n < K / 4; ++n) wgmma<B>(T(), d, a + 4 * n, b + advance_k<B>(n), SCALE == ScaleOut::One || n > 0);
  warpgroup_commit();
}
template <int DEPTH, Major A, Major B, ScaleOut SCALE, Swizzle SWIZZLE_A, Swizzle SWIZZLE_B, class T, int N>
TXL_DEVICE void issue_ss(T, float (&d)[N], uint64_t a, uint64_t b) {
  static_assert(SWIZZLE_A == Swizzle::B128 || A == Major::MN || DEPTH == NARROW);
  static_assert(SWIZZLE_B == Swizzle::B128 || B == Major::MN || DEPTH == NARROW);
  if (SCALE == ScaleOut::One) fence_operand(d);
  warpgroup_arrive();
  TXL_UNROLL
  for (int n = 0; n < DEPTH / 16; ++n)
    wgmma<A, B>(T(), d, a + advance_k<A, SWIZZLE_A>(n), b + advance_k<B, SWIZZLE_B>(n),
                SCALE == ScaleOut::One || n > 0);
  warpgroup_commit();
}

// Waits until at most LEFT of this warpgroup's last groups of products are pending.
template <int LEFT>
TXL_DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
#else

}  // namespace txl_cuda
#include "products_emulation.h"
namespace txl_cuda {

#endif

// Issues D = A B or D += A B as a group of its own. RS: A [64, 4 K] in registers; b: address of an operand in shared
// memory.
template <class T, Major B, ScaleOut SCALE, int N, int K>
TXL_DEVICE void gemm_rs(float (&d)[N], const uint32_t (&a)[K], uint32_t b) {
  issue_rs<B, SCALE>(T(), d, a, make_descriptor(b));
}
// SS: a and b are addresses of operands in shared memory; DEPTH: their extent along K.
template <class T, int DEPTH, Major A, Major B, ScaleOut SCALE, Swizzle SWIZZLE_A = Swizzle::B128,
          Swizzle SWIZZLE_B = Swizzle::B128, int N>
TXL_DEVICE void gemm_ss(float (&d)[N], uint32_t a, uint32_t b) {
  issue_ss<DEPTH, A, B, SCALE, SWIZZLE_A, SWIZZLE_B>(T(), d, make_descriptor<SWIZZLE_A>(a),
                                                     make_descriptor<SWIZZLE_B>(b));
}

}  // namespace txl_cuda
