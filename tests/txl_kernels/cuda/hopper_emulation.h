// Hopper's barriers that count bytes and its TMA loads, on a CPU: what csrc/cuda/hopper/hardware.cuh
// is for a GPU. A copy lands as late as it can, when somebody waits for it; until then its bytes are NaN.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "simt_emulation.h"

#ifdef SIMT_THREADS
#error "the Hopper kernels' emulation runs fibers only"
#endif

namespace txl_cuda {

struct alignas(128) TensorMap {  // its bytes are read by tests/support/cuda_ptx.py
  const void* data;
  int64_t sizes[4], steps[4];  // innermost axis first; steps in bytes
  int32_t box[4], item;
  int32_t swizzle;  // bytes of a row of a box, 128 or 32
};
static_assert(sizeof(TensorMap) == 128);
inline std::atomic<int64_t> encodings{0};  // of tensor maps
inline void count_encoding() { ++encodings; }
extern "C" __attribute__((visibility("default"), used)) inline int64_t txl_encodings() { return encodings; }
using Barrier = uint64_t;

}  // namespace txl_cuda

namespace simt {

struct MBarrier {
  int count, pending;
  int64_t bytes = 0;  // to come
  int phases = 0;     // completed
  std::vector<std::pair<int, std::function<void()>>> copies;

  void settle() {
    if (pending || bytes || !copies.empty()) return;
    ++phases, pending = count;
    simt::Barrier::progress = true;
  }
};

// What a group of instructions will leave in a thread's registers once it was waited for.
struct Product {
  float* to;
  std::vector<float> values;
  uint32_t tiles[2];  // of shared memory that it reads; NONE: an A operand in registers
  size_t sizes[2];
  std::vector<char> bytes[2];  // what lay there
};

struct Group {
  Barrier meeting{128};
  std::vector<float> a, b;  // operands [64, depth] and [columns, depth]
};

// Of a block.
struct Units {
  std::map<const void*, MBarrier> barriers;
  std::map<int, std::unique_ptr<Barrier>> named;
  std::map<int, Group> groups;
  std::map<int, std::vector<Product>> products;                  // by thread
  std::map<int, std::vector<std::function<void()>>> reductions;  // started by a thread, not waited for
};

inline Units& units() {
  auto& held = current.block->units;
  if (!held) held = std::make_shared<Units>();
  return *static_cast<Units*>(held.get());
}

// Of shared memory, counted from FIRST on as sm_90 does, where the system has the bytes before.
constexpr uint32_t FIRST = 1024;
inline char* shared_at(uint32_t address) {
  if (address < FIRST) die("shared memory that belongs to the system");
  return reinterpret_cast<char*>(current.block->shared()) + (address - FIRST);
}

inline MBarrier& mbarrier(const void* at) {
  const auto found = units().barriers.find(at);
  if (found == units().barriers.end()) die("there is no mbarrier at this address");
  return found->second;
}

inline void arrive(const void* at, int64_t bytes) {
  MBarrier& barrier = mbarrier(at);
  barrier.bytes += bytes;
  if (--barrier.pending < 0) die("more threads arrive at an mbarrier than it was made for");
  barrier.settle();
}

// What all lanes of the warp gave.
inline const uint32_t* exchange(uint32_t x) {
  Warp& warp = *current.block->warps[static_cast<size_t>(current.index / WARP)];
  static thread_local uint32_t words[WARP];
  warp.word[current.index % WARP] = x;
  warp.barrier.wait();
  std::memcpy(words, warp.word, sizeof(words));
  uint32_t kept[WARP];  // another fiber may run before this one goes on
  std::memcpy(kept, words, sizeof(words));
  warp.barrier.wait();
  std::memcpy(words, kept, sizeof(words));
  return words;
}

// An address in rows of 128 or 32 bytes with the swizzle of that width.
inline uint32_t swizzled(uint32_t at, int width) { return at ^ (at >> 7 & static_cast<uint32_t>(width / 16 - 1)) << 4; }

}  // namespace simt

namespace txl_cuda {

inline uint32_t shared_address(const void* p) {
  return simt::FIRST + static_cast<uint32_t>(static_cast<const char*>(p) - simt::shared_at(simt::FIRST));
}

inline void barrier_init(Barrier* b, int arrivals) {
  if (!simt::units().barriers.emplace(b, simt::MBarrier{arrivals, arrivals, 0, 0, {}}).second)
    simt::die("an mbarrier is made where one is");
}
inline void fence_barrier_init() {}
inline void barrier_arrive(Barrier* b) { simt::arrive(b, 0); }
inline void barrier_arrive_and_expect_tx(Barrier* b, int bytes) { simt::arrive(b, bytes); }
inline void barrier_wait(Barrier* b, int parity) {
  simt::MBarrier& barrier = simt::mbarrier(b);
  for (;;) {
    const auto copies = std::move(barrier.copies);
    barrier.copies.clear();
    for (const auto& [bytes, land] : copies) barrier.bytes -= bytes, land();
    if (!copies.empty()) barrier.settle();
    if (barrier.phases % 2 != parity) return;
    simt::yield();
  }
}

// each(in shared memory, in the tensor): of the elements of a box of shared memory at `at`; null outside of the tensor.
template <class Each>
void walk_box(const TensorMap& map, uint32_t at, int x, int row, int h, int n, const Each& each) {
  for (int i = 0; i < map.box[1]; ++i)
    for (int j = 0; j < map.box[0]; ++j) {
      const int64_t place[4] = {x + j, row + i, h, n};
      int64_t offset = 0;
      bool inside = true;
      for (int d = 0; d < 4; ++d) inside &= place[d] >= 0 && place[d] < map.sizes[d], offset += place[d] * map.steps[d];
      char* const element = static_cast<char*>(const_cast<void*>(map.data)) + offset;
      const auto byte = static_cast<uint32_t>((i * map.box[0] + j) * map.item);
      each(simt::shared_at(simt::swizzled(at + byte, map.swizzle)), inside ? element : nullptr);
    }
}
inline uint32_t box_address(const void* p) {
  const uint32_t at = shared_address(p);
  if (at % 1024) simt::die("a box of shared memory that does not start at a multiple of 1024 bytes");
  return at;
}

inline void tma_load_box(void* to, const TensorMap& map, Barrier* b, int x, int row, int h, int n) {
  if (!map.item) simt::die("a load by a tensor map that describes nothing");
  const uint32_t at = box_address(to);
  const int bytes = map.box[0] * map.box[1] * map.item;
  std::memset(to, 0xFF, static_cast<size_t>(bytes));
  simt::mbarrier(b).copies.emplace_back(bytes, [=] {
    walk_box(map, at, x, row, h, n, [&](char* here, const char* there) {
      std::memset(here, 0, static_cast<size_t>(map.item));
      if (there) std::memcpy(here, there, static_cast<size_t>(map.item));
    });
  });
}

inline void prefetch_tma_descriptor(const TensorMap&) {}

// A reduction reads shared memory as late as it can, when its thread waits.
inline void tma_reduce_add_box(const TensorMap& map, const void* from, int x, int row, int h, int n) {
  const uint32_t at = box_address(from);
  if (map.item != 4) simt::die("a reduction of elements that are not float32");
  if (x < 0 || row < 0 || h < 0 || n < 0) simt::die("a reduction at negative coordinates");
  simt::units().reductions[thread()].push_back([=] {
    walk_box(map, at, x, row, h, n, [](const char* here, char* there) {
      if (!there) return;
      float one, sum;
      std::memcpy(&one, here, 4), std::memcpy(&sum, there, 4);
      sum += one;
      std::memcpy(there, &sum, 4);
    });
  });
}
inline void reduce_add_pair(float* to, float x, float y) { to[0] += x, to[1] += y; }
inline void tma_store_arrive() {}
inline void tma_store_wait() {
  auto& mine = simt::units().reductions[thread()];
  for (const auto& reduction : mine) reduction();
  mine.clear();
}
inline void fence_view_async_shared() {}
template <int THREADS>
void assume_threads() {}
inline void sync_warp() {
  simt::current.block->warps[static_cast<size_t>(simt::current.index / simt::WARP)]->barrier.wait();
}
inline simt::Barrier& named_barrier(int which, int threads) {
  auto& barrier = simt::units().named[which];
  if (!barrier) barrier = std::make_unique<simt::Barrier>(threads);
  return *barrier;
}
template <int WHICH, int THREADS>
void named_barrier_sync() {
  named_barrier(WHICH, THREADS).wait();
}
inline int opaque(int x) { return x; }
inline void launch_dependent_grids() {}
inline void wait_on_dependent_grids() {}
template <int N>
void warpgroup_reg_dealloc() {}
template <int N>
void warpgroup_reg_alloc() {}

inline bool all_of_warp(bool x) {
  const uint32_t* const words = simt::exchange(x);
  bool all = true;
  for (int n = 0; n < simt::WARP; ++n) all &= words[n] != 0;
  return all;
}
inline uint32_t or_of_warp(uint32_t x) {
  const uint32_t* const words = simt::exchange(x);
  uint32_t any = 0;
  for (int n = 0; n < simt::WARP; ++n) any |= words[n];
  return any;
}
inline int min_of_warp(int x) {
  const uint32_t* const words = simt::exchange(static_cast<uint32_t>(x));
  for (int n = 0; n < simt::WARP; ++n) x = std::min(x, static_cast<int>(words[n]));
  return x;
}
inline int max_of_warp(int x) { return -min_of_warp(-x); }
inline int broadcast_first_lane(int x) { return static_cast<int>(simt::exchange(static_cast<uint32_t>(x))[0]); }

template <int OFFSET = 0, class T>
void store_shared(uint32_t at, T x) {
  static_assert(sizeof(T) == 4);
  std::memcpy(simt::shared_at(at + OFFSET), &x, 4);
}
template <int OFFSET = 0>
float load_shared(uint32_t at) {
  float x;
  std::memcpy(&x, simt::shared_at(at + OFFSET), 4);
  return x;
}
template <int OFFSET = 0>
void store_shared_pair(uint32_t at, float x, float y) {
  store_shared<OFFSET>(at, x), store_shared<OFFSET + 4>(at, y);
}
template <int OFFSET = 0>
void load_shared_pair(uint32_t at, float& x, float& y) {
  x = load_shared<OFFSET>(at), y = load_shared<OFFSET + 4>(at);
}
template <int OFFSET>
void store_shared_low(uint32_t at, uint32_t x) {
  std::memcpy(simt::shared_at(at + OFFSET), &x, 2);
}
template <int OFFSET>
void store_shared_high(uint32_t at, uint32_t x) {
  x >>= 16;
  std::memcpy(simt::shared_at(at + OFFSET), &x, 2);
}

template <int OFFSET>
uint32_t load_word(const void* from, bool exists) {
  uint32_t x = 0;
  if (exists) std::memcpy(&x, static_cast<const char*>(from) + OFFSET, 4);
  return x;
}
template <int OFFSET>
void store_word(void* to, uint32_t x, bool exists) {
  if (exists) std::memcpy(static_cast<char*>(to) + OFFSET, &x, 4);
}
template <int OFFSET>
void store_pair(float* to, float x, float y, bool exists) {
  static_assert(OFFSET % 8 == 0);
  if (exists && reinterpret_cast<uintptr_t>(to) % 8)
    simt::die("a pair of floats that does not start at a multiple of 8");
  if (exists) to[OFFSET / 4] = x, to[OFFSET / 4 + 1] = y;
}
inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
inline uint32_t bf16_bits(float x) {
  uint32_t bits = float_to_bits(x);
  if (x == x) bits += 0x7FFFu + ((bits >> 16) & 1);
  return bits >> 16 | (x == x ? 0 : 0x40);
}
inline uint32_t pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline uint32_t pack_f16(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}

}  // namespace txl_cuda

#define TXL_HOPPER_KERNEL(threads)
#define TXL_CONSTANT
