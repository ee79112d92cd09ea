// wgmma: products of four warps together, 64 rows, float32 sums, asynchronous.
//
// A sum in registers, d[N / 2] of a thread: d[4 k + 2 h + e] is row 16 warp + lane / 4 + 8 h, column
// 8 k + 2 (lane % 4) + e. A left factor in registers holds the same places, two columns a register:
// a[4 s + 2 c + h] is row .. + 8 h, columns 16 s + 8 c + 2 (lane % 4) and the next.
//
// A factor in shared memory is a tile of 64 rows of 64 elements, 128 bytes each with the 128-byte
// swizzle, at a multiple of 1024 bytes; columns from 64 on are another tile, TILE bytes later.
#pragma once
#include "../element.cuh"
#include "hardware.cuh"

namespace txl_cuda {

constexpr int SIDE = 64;          // rows and columns of a tile
constexpr int ROW = 128;          // bytes of a row
constexpr int TILE = SIDE * ROW;  // bytes of a tile
constexpr int GROUP = 128;        // threads of a warpgroup

// A tile as a factor: its rows are the product's own rows (left) or columns (right), or its depth.
enum class Rows { own, depth };

// PTX's matrix descriptor: address, TILE to what lies beyond 64 elements, 1024 bytes to the next 8
// rows, all in units of 16 bytes; swizzle of 128 bytes.
TXL_DEVICE uint64_t describe(uint32_t tile) {
  return uint64_t{tile >> 4 & 0x3FFF} | uint64_t{TILE / 16} << 16 | uint64_t{8 * ROW / 16} << 32 | uint64_t{1} << 62;
}
// To the n-th 16 of a factor's depth, in units of 16 bytes: the fifth begins the next tile.
template <Rows ROWS>
TXL_DEVICE constexpr uint64_t part(int n) {
  return static_cast<uint64_t>(ROWS == Rows::own ? n / 4 * (TILE / 16) + n % 4 * (32 / 16) : n * (16 * ROW / 16));
}

#ifdef __CUDACC__

// clang-format off
#define TXL_8(d, n) "+f"(d[n]), "+f"(d[n+1]), "+f"(d[n+2]), "+f"(d[n+3]), "+f"(d[n+4]), "+f"(d[n+5]), "+f"(d[n+6]), "+f"(d[n+7])
#define TXL_32(d) TXL_8(d, 0), TXL_8(d, 8), TXL_8(d, 16), TXL_8(d, 24)
#define TXL_64(d) TXL_32(d), TXL_8(d, 32), TXL_8(d, 40), TXL_8(d, 48), TXL_8(d, 56)
#define TXL_FIRST_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TXL_NEXT_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The instruction: 64 rows, N columns, 16 of the depth; adds to the sums unless `add` is 0.
#define TXL_WGMMA(T, N, SUMS, LEFT, RIGHT, ADD, ORDERS) \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." T "." T " {" SUMS "}, " LEFT ", " RIGHT ", add, 1, 1, " ORDERS ";\n}"

// For one type of element: d (+)= a b, a in four registers or both by descriptors.
#define TXL_PRODUCTS(Element, T) \
  template <Rows B> \
  TXL_DEVICE void start(Element, float (&d)[32], const uint32_t* a, uint64_t b, int add) { \
    asm volatile(TXL_WGMMA(T, "64", TXL_FIRST_32, "{%32, %33, %34, %35}", "%36", "%37", "%38") \
                 : TXL_32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B == Rows::depth)); \
  } \
  template <Rows B> \
  TXL_DEVICE void start(Element, float (&d)[64], const uint32_t* a, uint64_t b, int add) { \
    asm volatile(TXL_WGMMA(T, "128", TXL_FIRST_32 ", " TXL_NEXT_32, "{%64, %65, %66, %67}", "%68", "%69", "%70") \
                 : TXL_64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B == Rows::depth)); \
  } \
  template <Rows A, Rows B> \
  TXL_DEVICE void start(Element, float (&d)[32], uint64_t a, uint64_t b, int add) { \
    asm volatile(TXL_WGMMA(T, "64", TXL_FIRST_32, "%32", "%33", "%34", "%35, %36") \
                 : TXL_32(d) : "l"(a), "l"(b), "r"(add), "n"(A == Rows::depth), "n"(B == Rows::depth)); \
  } \
  template <Rows A, Rows B> \
  TXL_DEVICE void start(Element, float (&d)[64], uint64_t a, uint64_t b, int add) { \
    asm volatile(TXL_WGMMA(T, "128", TXL_FIRST_32 ", " TXL_NEXT_32, "%64", "%65", "%66", "%67, %68") \
                 : TXL_64(d) : "l"(a), "l"(b), "r"(add), "n"(A == Rows::depth), "n"(B == Rows::depth)); \
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

template <Rows B, bool ADD, class T, int N, int K>
TXL_DEVICE void multiply_as(T, float (&d)[N], const uint32_t (&a)[K], uint64_t b) {
  if (ADD) fence_operand(d);
  fence_operand(a);
  warpgroup_arrive();
  TXL_UNROLL
  for (int n = 0; n < K / 4; ++n) start<B>(T(), d, a + 4 * n, b + part<B>(n), ADD || n > 0);
  warpgroup_commit();
}
template <int D, Rows A, Rows B, bool ADD, class T, int N>
TXL_DEVICE void multiply_shared(T, float (&d)[N], uint64_t a, uint64_t b) {
  if (ADD) fence_operand(d);
  warpgroup_arrive();
  TXL_UNROLL
  for (int n = 0; n < D / 16; ++n) start<A, B>(T(), d, a + part<A>(n), b + part<B>(n), ADD || n > 0);
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

// Starts d = a b (ADD: d += a b) as a group of its own. b (and a, if it is one) is a tile's address.
template <class T, Rows B, bool ADD, int N, int K>
TXL_DEVICE void multiply(float (&d)[N], const uint32_t (&a)[K], uint32_t b) {
  multiply_as<B, ADD>(T(), d, a, describe(b));
}
// Both in shared memory, of depth D along rows, else 64.
template <class T, int D, Rows A, Rows B, bool ADD, int N>
TXL_DEVICE void multiply(float (&d)[N], uint32_t a, uint32_t b) {
  multiply_shared<D, A, B, ADD>(T(), d, describe(a), describe(b));
}

}  // namespace txl_cuda
