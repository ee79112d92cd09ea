// Hopper's instructions besides wgmma, by the names that CUTLASS gives them: mbarriers, TMA loads and reductions,
// fences, setmaxnreg. Host code gets the tests' emulation.
//
// A comment `// plant: NAME` in these files marks the line that a planted fault of tests/support/planted_faults.py
// changes.
#pragma once
#include "../simt.h"

#ifdef __CUDACC__

#include <cuda.h>

namespace txl_cuda {

using TensorMap = CUtensorMap;  // 128 bytes at a multiple of 64
using Barrier = uint64_t;       // an mbarrier, in shared memory

TXL_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// A phase of the barrier ends when so many threads have arrived and all bytes that it expects have.
TXL_DEVICE void barrier_init(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA; the block's threads still have to synchronise.
TXL_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TXL_DEVICE void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives, and adds to the bytes that the phase expects of TMA loads.
TXL_DEVICE void barrier_arrive_and_expect_tx(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity has ended. With TXL_CLOCK_LIMIT, for tests, a wait of that many clocks
// stops the launch, where a wrong phase would let it hang for ever.
TXL_DEVICE void barrier_wait(Barrier* b, int parity) {
#ifdef TXL_CLOCK_LIMIT
  for (const long long begun = clock64();;) {
    int done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
    if (done) return;
    if (clock64() - begun > TXL_CLOCK_LIMIT) __trap();
  }
#else
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
#endif
}

// Issues the TMA load of a box to shared memory at a multiple of 1024 bytes; x: first column. What lies outside of the
// tensor is 0.
TXL_DEVICE void tma_load_box(void* to, const TensorMap& from, Barrier* b, int x, int row, int h, int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&from), "r"(shared_address(b)), "r"(x), "r"(row), "r"(h), "r"(n)
      : "memory");
}

// Starts adding a box of floats in shared memory, at a multiple of 1024 bytes, to global memory, in any order with
// other additions; x: first column. What lies outside of the tensor is left out.
TXL_DEVICE void tma_reduce_add_box(const TensorMap& to, const void* from, int x, int row, int h, int n) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&to),
      "r"(shared_address(from)), "r"(x), "r"(row), "r"(h), "r"(n)
      : "memory");
}
// Adds two neighbouring floats to global memory, at a multiple of 8 bytes, in any order with other additions.
TXL_DEVICE void reduce_add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
// Makes what this thread has started since the last call a group.
TXL_DEVICE void tma_store_arrive() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's groups have read shared memory, which may be written then.
TXL_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Prefetches a tensor map before the first load that uses it.
TXL_DEVICE void prefetch_tma_descriptor(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes this thread's earlier writes to shared memory visible to TMA and wgmma.
TXL_DEVICE void fence_view_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Programmatic dependent launch, by CUTLASS's names: the kernel after may begin once all blocks have called the first
// or have ended; the second waits until the kernel before has ended, and its writes are visible.
TXL_DEVICE void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
TXL_DEVICE void wait_on_dependent_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

TXL_DEVICE void sync_warp() { __syncwarp(); }
// Waits at barrier WHICH (1 to 15) until THREADS threads have.
template <int WHICH, int THREADS>
TXL_DEVICE void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(WHICH), "n"(THREADS) : "memory");
}
TXL_DEVICE bool all_of_warp(bool x) { return __all_sync(0xFFFFFFFFu, x); }
TXL_DEVICE uint32_t or_of_warp(uint32_t x) { return __reduce_or_sync(0xFFFFFFFFu, x); }
TXL_DEVICE int min_of_warp(int x) { return __reduce_min_sync(0xFFFFFFFFu, x); }
TXL_DEVICE int max_of_warp(int x) { return __reduce_max_sync(0xFFFFFFFFu, x); }
// Broadcasts the value of lane 0, so that the compiler knows it to be uniform.
TXL_DEVICE int broadcast_first_lane(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

// Tells the compiler how many threads a block has. A thread's number is then not negative, and divisions of it by
// powers of two are shifts.
template <int THREADS>
TXL_DEVICE void assume_threads() {
  __builtin_assume(threadIdx.x < THREADS);
}

// The same value, from which the compiler computes nothing before this place: registers are scarce before.
TXL_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Sets the number of registers of each thread of this warpgroup to N, fewer or more than before.
template <int N>
TXL_DEVICE void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
TXL_DEVICE void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Words of shared memory by their address plus OFFSET bytes, without a generic pointer.
template <int OFFSET = 0>
TXL_DEVICE void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0+%2], %1;" ::"r"(address), "f"(x), "n"(OFFSET) : "memory");
}
template <int OFFSET = 0>
TXL_DEVICE void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0+%2], %1;" ::"r"(address), "r"(x), "n"(OFFSET) : "memory");
}
template <int OFFSET = 0>
TXL_DEVICE float load_shared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1+%2];" : "=f"(x) : "r"(address), "n"(OFFSET) : "memory");
  return x;
}

// Two neighbouring words, at a multiple of 8 bytes.
template <int OFFSET = 0>
TXL_DEVICE void store_shared_pair(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0+%3], {%1, %2};" ::"r"(address), "f"(x), "f"(y), "n"(OFFSET) : "memory");
}
template <int OFFSET = 0>
TXL_DEVICE void load_shared_pair(uint32_t address, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2+%3];" : "=f"(x), "=f"(y) : "r"(address), "n"(OFFSET) : "memory");
}
// Stores the lower or upper half of a word.
template <int OFFSET>
TXL_DEVICE void store_shared_low(uint32_t address, uint32_t x) {
  asm volatile("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nst.shared.b16 [%0+%2], low;\n}" ::"r"(address),
               "r"(x), "n"(OFFSET)
               : "memory");
}
template <int OFFSET>
TXL_DEVICE void store_shared_high(uint32_t address, uint32_t x) {
  asm volatile("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nst.shared.b16 [%0+%2], high;\n}" ::"r"(address),
               "r"(x), "n"(OFFSET)
               : "memory");
}
// Words of global memory OFFSET bytes from an address that others share, if they exist: without a branch, and without
// an instruction for each address. Loads a word that the launch does not write; 0 if it does not exist. Other loads can
// be in flight.
template <int OFFSET>
TXL_DEVICE uint32_t load_word(const void* from, bool exists) {
  uint32_t x;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\nmov.b32 %0, 0;\n@there ld.global.nc.b32 %0, [%1+%3];\n}"
      : "=r"(x)
      : "l"(from), "r"(static_cast<int>(exists)), "n"(OFFSET));
  return x;
}
template <int OFFSET>
TXL_DEVICE void store_word(void* to, uint32_t x, bool exists) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there st.global.b32 [%0+%3], %1;\n}" ::"l"(to),
               "r"(x), "r"(static_cast<int>(exists)), "n"(OFFSET)
               : "memory");
}
// Two neighbouring floats, at a multiple of 8 bytes.
template <int OFFSET>
TXL_DEVICE void store_pair(float* to, float x, float y, bool exists) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n@there st.global.v2.f32 [%0+%4], {%1, %2};\n}" ::"l"(to),
      "f"(x), "f"(y), "r"(static_cast<int>(exists)), "n"(OFFSET)
      : "memory");
}

TXL_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Rounds two numbers to 16 bits, the first in the lower half of the word.
TXL_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
TXL_DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

}  // namespace txl_cuda

#define TXL_HOPPER_KERNEL(threads) __global__ __launch_bounds__(threads, 1)
#define TXL_CONSTANT __grid_constant__

#else
#include "hopper_emulation.h"
#endif
