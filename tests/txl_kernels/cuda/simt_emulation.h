// CUDA's execution model on a CPU, as far as csrc/cuda uses it: blocks one after the other, the
// threads of a block as fibers (or, with SIMT_THREADS, as OS threads, for ThreadSanitizer),
// barriers, warp shuffles, shared memory.
//
// A fiber runs until it waits, so what reads before a barrier that is missing reads what nobody has
// written: shared memory starts every block as NaN. Threads that wait for what never comes, and
// lanes that shuffle differently, end the process.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#ifdef SIMT_THREADS
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#else
#include <setjmp.h>
#include <ucontext.h>
#endif

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y, unsigned z) : x(x), y(y), z(z) {}
};

namespace simt {

constexpr int WARP = 32;

[[noreturn]] inline void die(const char* why) {
  std::fprintf(stderr, "SIMT emulation: %s\n", why);
  std::abort();
}

struct Block;

struct Thread {
  Block* block = nullptr;
  int index = 0;
};

#ifdef SIMT_THREADS
inline thread_local Thread current;

// Nobody passes before all have come.
class Barrier {
 public:
  explicit Barrier(int members) : members_(members) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t turn = turn_;
    if (++waiting_ == members_) {
      waiting_ = 0, ++turn_;
      come_.notify_all();
    } else if (!come_.wait_for(lock, std::chrono::seconds(60), [&] { return turn_ != turn; })) {
      die("a thread waits at a barrier that others do not reach");
    }
  }

 private:
  const int members_;
  int waiting_ = 0;
  uint64_t turn_ = 0;
  std::mutex mutex_;
  std::condition_variable come_;
};
#else
inline Thread current;
void yield();

class Barrier {
 public:
  explicit Barrier(int members) : members_(members) {}
  void wait() {
    const uint64_t turn = turn_;
    arrive();
    while (turn_ == turn) yield();
  }
  void arrive() {
    if (++waiting_ < members_) return;
    waiting_ = 0, ++turn_;
    progress = true;
  }
  static inline bool progress = false;  // somebody passed a barrier or ended since it was last cleared

 private:
  const int members_;
  int waiting_ = 0;
  uint64_t turn_ = 0;
};
#endif

#ifdef SIMT_THREADS
// Relaxed: to ThreadSanitizer lanes that shuffle have not waited for each other, since a GPU orders
// no memory by it.
class WarpBarrier {
 public:
  void wait() {
    const uint64_t goal = (come_.fetch_add(1, std::memory_order_relaxed) / WARP + 1) * WARP;
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (come_.load(std::memory_order_relaxed) < goal) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > late) die("a thread waits at a barrier that others do not reach");
    }
  }

 private:
  std::atomic<uint64_t> come_{0};
};
template <class T>
using Exchanged = std::atomic<T>;
#else
struct WarpBarrier : Barrier {
  WarpBarrier() : Barrier(WARP) {}
};
template <class T>
using Exchanged = T;
#endif

// The m-th block of a grid.
inline dim3 place(dim3 grid, unsigned m) { return {m % grid.x, m / grid.x % grid.y, m / grid.x / grid.y}; }

struct Warp {
  WarpBarrier barrier;
  Exchanged<float> value[WARP];
  Exchanged<int> step[WARP];
  uint32_t word[WARP];  // of other exchanges
};

struct Block {
  Block(int threads, size_t shared_bytes)
      : all(threads), memory(shared_bytes / sizeof(float) + 1 + ALIGNED / sizeof(float)) {
    if (threads % WARP) die("a block must be whole warps");
    for (int w = 0; w < threads / WARP; ++w) warps.push_back(std::make_unique<Warp>());
  }
  void clear() {
    for (float& x : memory) x = NAN;
  }
  // Shared memory begins at a multiple of what swizzles need.
  float* shared() {
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (ALIGNED - at % ALIGNED) % ALIGNED / sizeof(float);
  }
  static constexpr uintptr_t ALIGNED = 1024;
  dim3 at{0, 0, 0};
  Barrier all;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<float> memory;
  std::shared_ptr<void> units;  // see hopper_emulation.h
};

template <class T>
void set(T& to, T x) {
  to = x;
}
template <class T>
T get(const T& from) {
  return from;
}
#ifdef SIMT_THREADS
template <class T>
void set(std::atomic<T>& to, T x) {
  to.store(x, std::memory_order_relaxed);
}
template <class T>
T get(const std::atomic<T>& from) {
  return from.load(std::memory_order_relaxed);
}
#endif

inline float shuffle_xor(float x, int step) {
  Warp& warp = *current.block->warps[static_cast<size_t>(current.index / WARP)];
  const int lane = current.index % WARP;
  set(warp.value[lane], x), set(warp.step[lane], step);
  warp.barrier.wait();
  if (step <= 0 || step >= WARP) die("a shuffle leaves its warp");
  if (get(warp.step[lane ^ step]) != step) die("lanes of a warp shuffle differently");
  const float result = get(warp.value[lane ^ step]);
  warp.barrier.wait();
  return result;
}

#ifdef SIMT_THREADS

inline void launch(dim3 grid, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
  Block block(threads, shared_bytes);
  std::vector<std::thread> running;
  for (int n = 0; n < threads; ++n)
    running.emplace_back([&, n] {
      current = {&block, n};
      for (unsigned m = 0; m < grid.x * grid.y * grid.z; ++m) {
        if (n == 0) block.at = place(grid, m), block.clear();
        block.all.wait();
        kernel();
        block.all.wait();
      }
    });
  for (std::thread& t : running) t.join();
}

#else

struct Fiber {
  ucontext_t first;  // where it begins
  jmp_buf waits;     // where it goes on: unlike swapcontext, a jump asks nothing of the system
  std::vector<char> stack = std::vector<char>(256 * 1024);
  bool begun = false, done = false;
};

inline jmp_buf scheduler;
inline Fiber* running = nullptr;
inline const std::function<void()>* body = nullptr;

[[gnu::noinline]] inline void yield() {
  if (!_setjmp(running->waits)) _longjmp(scheduler, 1);
}

[[gnu::noinline]] inline void resume() {
  if (_setjmp(scheduler)) return;
  if (running->begun) _longjmp(running->waits, 1);
  running->begun = true;
  setcontext(&running->first);
}

inline void start() {
  (*body)();
  running->done = true;
  Barrier::progress = true;
  yield();
}

// SIMT_ORDER=reversed runs the warps of a block, and their lanes, from the last to the first.
inline void launch(dim3 grid, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
  const char* const order = std::getenv("SIMT_ORDER");
  const bool reversed = order && !std::strcmp(order, "reversed");
  std::vector<Fiber> fibers(static_cast<size_t>(threads));
  body = &kernel;
  for (unsigned m = 0; m < grid.x * grid.y * grid.z; ++m) {
    Block block(threads, shared_bytes);
    block.at = place(grid, m), block.clear();
    for (Fiber& fiber : fibers) {
      getcontext(&fiber.first);
      fiber.first.uc_stack.ss_sp = fiber.stack.data();
      fiber.first.uc_stack.ss_size = fiber.stack.size();
      fiber.first.uc_link = nullptr;
      fiber.begun = fiber.done = false;
      makecontext(&fiber.first, start, 0);
    }
    int left = threads, idle = 0;
    for (int turn = 0; left; ++turn) {
      const int n = turn % (threads / WARP), warp = reversed ? threads / WARP - 1 - n : n;
      bool moved = false;
      do {
        Barrier::progress = false;
        for (int lane = 0; lane < WARP; ++lane) {
          const int index = warp * WARP + (reversed ? WARP - 1 - lane : lane);
          running = &fibers[static_cast<size_t>(index)];
          if (running->done) continue;
          current = {&block, index};
          resume();
          left -= running->done;
        }
        moved |= Barrier::progress;
      } while (Barrier::progress);
      idle = moved ? 0 : idle + 1;
      if (left && idle > threads / WARP) die("a thread waits at a barrier that others do not reach");
    }
  }
}

#endif

}  // namespace simt

#define TXL_DEVICE inline
#define TXL_ANYWHERE inline
#define TXL_UNROLL
#define TXL_UNROLL_BY_4
#define TXL_ROLLED
#define TXL_KERNEL
#define TXL_SHARED(name) float* const name = simt::current.block->shared()
#define TXL_SHARED_TILES(name) char* const name = reinterpret_cast<char*>(simt::current.block->shared())
#define TXL_LAUNCH(kernel, grid, threads, shared, stream, ...) \
  (static_cast<void>(stream), simt::launch(grid, threads, shared, [&] { kernel(__VA_ARGS__); }))

namespace txl_cuda {

inline int thread() { return simt::current.index; }
inline int block_x() { return static_cast<int>(simt::current.block->at.x); }
inline int block_z() { return static_cast<int>(simt::current.block->at.z); }
inline int block_y() { return static_cast<int>(simt::current.block->at.y); }
inline void barrier() { simt::current.block->all.wait(); }
inline float shuffle_xor(float x, int step) { return simt::shuffle_xor(x, step); }

inline float bits_to_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t float_to_bits(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t shuffle_bits_xor(uint32_t x, int step) { return float_to_bits(shuffle_xor(bits_to_float(x), step)); }
inline float half_to_float(uint16_t x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return static_cast<float>(y);
}
inline uint16_t float_to_half(float x) {
  const _Float16 y = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}

struct alignas(16) Chunk {
  uint32_t word[4];
};

inline Chunk load_16_bytes(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) simt::die("a 16-byte load from an address that is no multiple of 16");
  Chunk c;
  std::memcpy(&c, from, 16);
  return c;
}

}  // namespace txl_cuda
