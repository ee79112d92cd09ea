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
// To the next 16 of the depth, in units of 16 bytes; and what the fifth step, in the next tile, takes more.
template <Rows ROWS>
constexpr int STEP = ROWS == Rows::own ? 32 / 16 : 16 * ROW / 16;
template <Rows ROWS>
constexpr int LEAP = ROWS == Rows::own ? (TILE - 4 * 32) / 16 : 0;

#ifdef __CUDACC__

// clang-format off
#define TXL_8(d, n) "+f"(d[n]), "+f"(d[n+1]), "+f"(d[n+2]), "+f"(d[n+3]), "+f"(d[n+4]), "+f"(d[n+5]), "+f"(d[n+6]), "+f"(d[n+7])
#define TXL_32(d) TXL_8(d, 0), TXL_8(d, 8), TXL_8(d, 16), TXL_8(d, 24)
#define TXL_64(d) TXL_32(d), TXL_8(d, 32), TXL_8(d, 40), TXL_8(d, 48), TXL_8(d, 56)
#define TXL_FIRST_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TXL_NEXT_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TXL_D64 "n64", "{" TXL_FIRST_32 "}"
#define TXL_D128 "n128", "{" TXL_FIRST_32 ", " TXL_NEXT_32 "}"
#define TXL_A4(a, n) "r"(a[n]), "r"(a[n+1]), "r"(a[n+2]), "r"(a[n+3])
#define TXL_A16(a) TXL_A4(a, 0), TXL_A4(a, 4), TXL_A4(a, 8), TXL_A4(a, 12)
#define TXL_A32(a) TXL_A16(a), TXL_A4(a, 16), TXL_A4(a, 20), TXL_A4(a, 24), TXL_A4(a, 28)
#define TXL_BEGIN(add, b) "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, " add ", 0;\nmov.b64 b, " b ";\n"
#define TXL_FENCE "wgmma.fence.sync.aligned;\n"  // registers written before are seen by the products
#define TXL_ONE(T, SHAPE, SUMS, LEFT, ORDERS) \
  "wgmma.mma_async.sync.aligned.m64" SHAPE "k16.f32." T "." T " " SUMS ", " LEFT ", b, add, 1, 1, " ORDERS ";\n" \
  "setp.eq.b32 add, 0, 0;\n"  // later steps always add
#define TXL_MOVE(x, by) "add.s64 " x ", " x ", " by ";\n"
#define TXL_END "wgmma.commit_group.sync.aligned;\n}"

// Left factor in registers: operands after it are b, its step and leap, its order, whether to add.
#define TXL_REGISTERS_4(T, D, a0, a1, a2, a3, b, step, order, add) \
  TXL_REGISTERS_4_(T, D, a0, a1, a2, a3, b, step, order, add)
#define TXL_REGISTERS_4_(T, SHAPE, SUMS, a0, a1, a2, a3, b, step, order, add) \
  TXL_BEGIN(add, b) TXL_FENCE TXL_ONE(T, SHAPE, SUMS, a0, order) TXL_MOVE("b", step) TXL_ONE(T, SHAPE, SUMS, a1, order) \
  TXL_MOVE("b", step) TXL_ONE(T, SHAPE, SUMS, a2, order) TXL_MOVE("b", step) TXL_ONE(T, SHAPE, SUMS, a3, order)
// Left factor in shared memory: a descriptor and its step.
#define TXL_SHARED_4(T, D, a, a_step, b, step, orders, add) TXL_SHARED_4_(T, D, a, a_step, b, step, orders, add)
#define TXL_SHARED_4_(T, SHAPE, SUMS, a, a_step, b, step, orders, add) \
  TXL_BEGIN(add, b) "mov.b64 a, " a ";\n" TXL_FENCE TXL_MORE_4(T, SHAPE, SUMS, a_step, step, orders)
#define TXL_MORE_4(T, SHAPE, SUMS, a_step, step, orders) \
  TXL_ONE(T, SHAPE, SUMS, "a", orders) TXL_MOVE("a", a_step) TXL_MOVE("b", step) \
  TXL_ONE(T, SHAPE, SUMS, "a", orders) TXL_MOVE("a", a_step) TXL_MOVE("b", step) \
  TXL_ONE(T, SHAPE, SUMS, "a", orders) TXL_MOVE("a", a_step) TXL_MOVE("b", step) TXL_ONE(T, SHAPE, SUMS, "a", orders)

// The instructions for one type of element. multiply(d, a, b, ..): d = a b, or d + a b if ADD.
#define TXL_PRODUCTS(Element, T) \
  template <Rows B, bool ADD> \
  TXL_DEVICE void multiply_as(Element, float (&d)[32], const uint32_t (&a)[16], uint64_t b) { \
    asm volatile(TXL_REGISTERS_4(T, TXL_D64, "{%32, %33, %34, %35}", "{%36, %37, %38, %39}", "{%40, %41, %42, %43}", \
                                 "{%44, %45, %46, %47}", "%48", "%49", "%50", "%51") TXL_END \
                 : TXL_32(d) : TXL_A16(a), "l"(b), "n"(STEP<B>), "n"(B == Rows::depth), "n"(ADD)); \
  } \
  template <Rows B, bool ADD> \
  TXL_DEVICE void multiply_as(Element, float (&d)[64], const uint32_t (&a)[16], uint64_t b) { \
    asm volatile(TXL_REGISTERS_4(T, TXL_D128, "{%64, %65, %66, %67}", "{%68, %69, %70, %71}", "{%72, %73, %74, %75}", \
                                 "{%76, %77, %78, %79}", "%80", "%81", "%82", "%83") TXL_END \
                 : TXL_64(d) : TXL_A16(a), "l"(b), "n"(STEP<B>), "n"(B == Rows::depth), "n"(ADD)); \
  } \
  template <Rows B, bool ADD> \
  TXL_DEVICE void multiply_as(Element, float (&d)[32], const uint32_t (&a)[32], uint64_t b) { \
    asm volatile(TXL_REGISTERS_4(T, TXL_D64, "{%32, %33, %34, %35}", "{%36, %37, %38, %39}", "{%40, %41, %42, %43}", \
                                 "{%44, %45, %46, %47}", "%64", "%65", "%66", "%67") \
                 TXL_MOVE("b", "%65") TXL_MOVE("b", "%68") \
                 TXL_ONE(T, "n64", "{" TXL_FIRST_32 "}", "{%48, %49, %50, %51}", "%66") TXL_MOVE("b", "%65") \
                 TXL_ONE(T, "n64", "{" TXL_FIRST_32 "}", "{%52, %53, %54, %55}", "%66") TXL_MOVE("b", "%65") \
                 TXL_ONE(T, "n64", "{" TXL_FIRST_32 "}", "{%56, %57, %58, %59}", "%66") TXL_MOVE("b", "%65") \
                 TXL_ONE(T, "n64", "{" TXL_FIRST_32 "}", "{%60, %61, %62, %63}", "%66") TXL_END \
                 : TXL_32(d) : TXL_A32(a), "l"(b), "n"(STEP<B>), "n"(B == Rows::depth), "n"(ADD), "n"(LEAP<B>)); \
  } \
  template <Rows A, Rows B, bool ADD> \
  TXL_DEVICE void multiply_as(Element, float (&d)[32], uint64_t a, uint64_t b) { \
    asm volatile(TXL_SHARED_4(T, TXL_D64, "%32", "%33", "%34", "%35", "%36, %37", "%38") TXL_END \
                 : TXL_32(d) : "l"(a), "n"(STEP<A>), "l"(b), "n"(STEP<B>), "n"(A == Rows::depth), "n"(B == Rows::depth), "n"(ADD)); \
  } \
  template <Rows A, Rows B, bool ADD> \
  TXL_DEVICE void multiply_as(Element, float (&d)[64], uint64_t a, uint64_t b) { \
    asm volatile(TXL_SHARED_4(T, TXL_D128, "%64", "%65", "%66", "%67", "%68, %69", "%70") TXL_END \
                 : TXL_64(d) : "l"(a), "n"(STEP<A>), "l"(b), "n"(STEP<B>), "n"(A == Rows::depth), "n"(B == Rows::depth), "n"(ADD)); \
  } \
  template <Rows A, Rows B, bool ADD> \
  TXL_DEVICE void multiply_deep_as(Element, float (&d)[32], uint64_t a, uint64_t b) { \
    asm volatile(TXL_SHARED_4(T, TXL_D64, "%32", "%33", "%34", "%35", "%36, %37", "%38") \
                 TXL_MOVE("a", "%33") TXL_MOVE("a", "%39") TXL_MOVE("b", "%35") TXL_MOVE("b", "%40") \
                 TXL_MORE_4(T, "n64", "{" TXL_FIRST_32 "}", "%33", "%35", "%36, %37") TXL_END \
                 : TXL_32(d) : "l"(a), "n"(STEP<A>), "l"(b), "n"(STEP<B>), "n"(A == Rows::depth), "n"(B == Rows::depth), "n"(ADD), \
                   "n"(LEAP<A>), "n"(LEAP<B>)); \
  }
TXL_PRODUCTS(Bf16, "bf16")
TXL_PRODUCTS(F16, "f16")
// clang-format on

// Until at most LEFT of this warpgroup's last products are under way.
template <int LEFT>
TXL_DEVICE void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Keeps the compiler from reading results before the wait that precedes this.
template <int N>
TXL_DEVICE void results(float (&d)[N]) {
  TXL_UNROLL
  for (int n = 0; n < N; ++n) asm volatile("" : "+f"(d[n])::"memory");
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
  if constexpr (D == 64) multiply_as<A, B, ADD>(T(), d, describe(a), describe(b));
  if constexpr (D == 128) multiply_deep_as<A, B, ADD>(T(), d, describe(a), describe(b));
}

}  // namespace txl_cuda
