#include "runtime.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <thread>

namespace txl {
namespace {

constexpr size_t kAlign = 64;

#ifndef TXL_POISON
// Small blocks wait for the thread's next call: the C library would give their pages back and fault
// them in again, which costs more than a small kernel.
constexpr size_t kSpares = 4, kLargest = size_t{1} << 23;

struct Spares {
  void* block[kSpares] = {};
  size_t bytes[kSpares] = {};

  ~Spares() {
    for (void* p : block) std::free(p);
  }
};

thread_local Spares g_spares;

void* take(size_t& bytes) {
  for (size_t i = 0; i < kSpares; ++i)
    if (g_spares.block[i] && g_spares.bytes[i] >= bytes && g_spares.bytes[i] <= 4 * bytes + kLargest / 16) {
      void* p = g_spares.block[i];
      bytes = g_spares.bytes[i];
      g_spares.block[i] = nullptr;
      return p;
    }
  return nullptr;
}

// Puts a block in a free place, or in that of a smaller one.
void give_back(void* p, size_t bytes) {
  size_t place = 0;
  for (size_t i = 0; i < kSpares && g_spares.block[place]; ++i)
    if (!g_spares.block[i] || g_spares.bytes[i] < g_spares.bytes[place]) place = i;
  if (bytes > kLargest || (g_spares.block[place] && g_spares.bytes[place] >= bytes)) return std::free(p);
  std::free(g_spares.block[place]);
  g_spares.block[place] = p;
  g_spares.bytes[place] = bytes;
}
#else  // every block new, so that a sanitizer sees its ends
void* take(size_t&) { return nullptr; }
void give_back(void* p, size_t) { std::free(p); }
#endif

size_t bytes_of(int64_t floats) {
  if (floats < 0 || static_cast<uint64_t>(floats) > std::numeric_limits<size_t>::max() / 8) throw std::bad_alloc();
  return (static_cast<size_t>(floats) * sizeof(float) + kAlign) / kAlign * kAlign;
}

float* allocate(size_t& bytes) {
  void* p = take(bytes);
  if (!p) p = std::aligned_alloc(kAlign, bytes);
  if (!p) throw std::bad_alloc();
#ifdef TXL_POISON
  std::memset(p, 0xFF, bytes);  // NaN: what is read before it is written shows
#endif
  return static_cast<float*>(p);
}

// The entry point every GNU-compatible OpenMP runtime exports: run fn(data) on a team of
// num_threads.
using GompParallel = void (*)(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);

std::atomic<GompParallel> g_gomp{nullptr};

struct Loop {
  Body body;
  void* context;
  int64_t items;
  std::atomic<int64_t> next{0};
  std::atomic<int> entered{0};
};

void work(void* p) {
  Loop& loop = *static_cast<Loop*>(p);
  const int thread = loop.entered.fetch_add(1, std::memory_order_relaxed);
  for (;;) {
    const int64_t item = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= loop.items) return;
    loop.body(loop.context, item, thread);
  }
}

// Threads of our own. They are started when a loop first asks for so many, wait for the next one, and never end.
class Pool {
 public:
  // Runs the loop on the caller and so many others, or fewer where the system gives no more: they still finish every
  // item. A loop that finds the threads taken (by another caller, or by the loop it is called from) runs on its
  // caller alone.
  void run(Loop& loop, int others) {
    if (taken_.exchange(true)) return work(&loop);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      try {
        for (; threads_ < others; ++threads_) std::thread([this] { serve(); }).detach();
      } catch (...) {
      }
      loop_ = &loop, seats_ = others;
    }
    for (int i = 0; i < others; ++i) start_.notify_one();
    work(&loop);
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // nobody waits for threads that come late
    end_.wait(lock, [this] { return inside_ == 0; });
    taken_ = false;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [this] { return seats_ > 0; });
      --seats_, ++inside_;
      Loop* const loop = loop_;
      lock.unlock();
      work(loop);
      lock.lock();
      if (--inside_ == 0) end_.notify_one();
    }
  }

  std::atomic<bool> taken_{false};
  std::mutex mutex_;  // of all below
  std::condition_variable start_, end_;
  Loop* loop_ = nullptr;
  int threads_ = 0, seats_ = 0, inside_ = 0;  // seats: for threads to take; inside: those in the loop
};

// Never destroyed, since threads wait in it until the process ends.
alignas(Pool) std::byte g_pool_memory[sizeof(Pool)];
Pool* g_pool = new (g_pool_memory) Pool;

// A forked child has none of its parent's threads: OpenMP would wait for them for ever, and a pool starts anew.
std::atomic<bool> g_forked{false};
// Once the module is loaded, since others use OpenMP before the first kernel does.
const int registered = pthread_atfork(nullptr, nullptr, [] {
  g_forked.store(true);
  g_pool = new (g_pool_memory) Pool;
});

GompParallel usable_openmp() { return g_forked.load(std::memory_order_relaxed) ? nullptr : g_gomp.load(); }

}  // namespace

Buffer::Buffer(int64_t floats) : bytes_(bytes_of(floats)), data(allocate(bytes_)) {}
Buffer::~Buffer() { give_back(data, bytes_); }

void set_openmp(uint64_t gomp_parallel) {
  if (registered == 0) g_gomp.store(reinterpret_cast<GompParallel>(gomp_parallel));
}

const char* threading() { return usable_openmp() ? "torch-openmp" : "threads"; }

void parallel_for(int threads, int64_t items, Body body, void* context) {
  Loop loop{body, context, items};
  if (threads <= 1 || items <= 1) {
    work(&loop);
  } else if (GompParallel gomp = usable_openmp()) {
    // Always the whole team: libgomp ends the threads that a smaller one leaves over and starts
    // them anew for the next.
    gomp(work, &loop, static_cast<unsigned>(threads), 0);
  } else {
    g_pool->run(loop, static_cast<int>(std::min<int64_t>(threads, items)) - 1);
  }
}

}  // namespace txl
