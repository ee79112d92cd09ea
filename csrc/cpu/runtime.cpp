#include "runtime.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
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
// Small blocks are cached for the thread's next call: the C library would return their pages to the system, and page
// faults on fresh ones take longer than a small kernel.
constexpr size_t kCachedBlocks = 4, kMaxCachedBytes = size_t{1} << 23;

struct BlockCache {
  void* block[kCachedBlocks];
  size_t bytes[kCachedBlocks];
  bool closed;
};

thread_local BlockCache g_cache;  // never destroyed, since a destructor of the thread's other data may make a call

// Frees the blocks when the thread ends.
struct CacheCloser {
  ~CacheCloser() {
    for (void*& p : g_cache.block) std::free(p), p = nullptr;
    g_cache.closed = true;
  }
  void start() const {}  // naming the object makes this thread destroy it
};

thread_local CacheCloser g_closer;

// Returns a cached block of at least `bytes`, which becomes its size; null if there is none.
void* take_cached(size_t& bytes) {
  g_closer.start();
  for (size_t i = 0; i < kCachedBlocks; ++i)
    if (g_cache.block[i] && g_cache.bytes[i] >= bytes && g_cache.bytes[i] <= 4 * bytes + kMaxCachedBytes / 16) {
      void* p = g_cache.block[i];
      bytes = g_cache.bytes[i];
      g_cache.block[i] = nullptr;
      return p;
    }
  return nullptr;
}

// Caches a block in a free slot, or in place of a smaller block; else frees it.
void release(void* p, size_t bytes) {
  size_t slot = 0;
  for (size_t i = 0; i < kCachedBlocks && g_cache.block[slot]; ++i)
    if (!g_cache.block[i] || g_cache.bytes[i] < g_cache.bytes[slot]) slot = i;
  if (g_cache.closed || bytes > kMaxCachedBytes || (g_cache.block[slot] && g_cache.bytes[slot] >= bytes))
    return std::free(p);
  std::free(g_cache.block[slot]);
  g_cache.block[slot] = p;
  g_cache.bytes[slot] = bytes;
}
#else  // no cache, so that a sanitizer sees accesses outside of a block
void* take_cached(size_t&) { return nullptr; }
void release(void* p, size_t) { std::free(p); }
#endif

size_t bytes_of(int64_t floats) {
  if (floats < 0 || static_cast<uint64_t>(floats) > std::numeric_limits<size_t>::max() / 8) throw std::bad_alloc();
  return (static_cast<size_t>(floats) * sizeof(float) + kAlign) / kAlign * kAlign;
}

float* allocate(size_t& bytes) {
  void* p = take_cached(bytes);
  if (!p) p = std::aligned_alloc(kAlign, bytes);
  if (!p) throw std::bad_alloc();
#ifdef TXL_POISON
  std::memset(p, 0xFF, bytes);  // NaN, so that reads of unwritten memory show
#endif
  return static_cast<float*>(p);
}

// The entry point that every GNU-compatible OpenMP runtime exports: it runs fn(data) on a team of num_threads.
using GompParallel = void (*)(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);

std::atomic<GompParallel> g_gomp{nullptr};

struct Loop {
  Body body;
  void* context;
  int64_t items;
  std::atomic<int64_t> next{0};
  std::atomic<int> threads{0};  // that have run an item so far
};

// Runs items of a loop, a Loop*, until none is left.
void run_items(void* p) {
  Loop& loop = *static_cast<Loop*>(p);
  int thread = -1;
  for (;;) {
    const int64_t item = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= loop.items) return;
    if (thread < 0) thread = loop.threads.fetch_add(1, std::memory_order_relaxed);
    loop.body(loop.context, item, thread);
  }
}

thread_local CallersThreads g_callers;

// A condition variable. That of the standard library waits by a symbol of GCC 12, which libstdc++ of older systems
// lacks.
class Condition {
 public:
  void notify_one() { pthread_cond_signal(&condition_); }

  template <class F>
  void wait(std::unique_lock<std::mutex>& lock, const F& holds) {
    while (!holds()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

// The module's own threads. They are started when a loop first needs them, wait for the next loop, and never end.
class Pool {
 public:
  // Runs the loop on the caller and `workers` threads, or fewer if the system refuses to start more: those finish all
  // items. While the pool is in use, by another caller or by the loop that this one is nested in, a loop runs on its
  // caller alone.
  void run(Loop& loop, int workers) {
    if (in_use_.exchange(true)) return run_items(&loop);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      try {
        for (; threads_ < workers; ++threads_) std::thread([this] { serve(); }).detach();
      } catch (...) {
      }
      loop_ = &loop, wanted_ = workers;
    }
    for (int i = 0; i < workers; ++i) start_.notify_one();
    run_items(&loop);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // threads that have not woken yet are not waited for
    end_.wait(lock, [this] { return active_ == 0; });
    in_use_ = false;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_, ++active_;
      Loop* const loop = loop_;
      lock.unlock();
      run_items(loop);
      lock.lock();
      if (--active_ == 0) end_.notify_one();
    }
  }

  std::atomic<bool> in_use_{false};
  std::mutex mutex_;  // guards all members below
  Condition start_, end_;
  Loop* loop_ = nullptr;
  int threads_ = 0, wanted_ = 0, active_ = 0;  // wanted: threads yet to join the loop; active: those in it
};

// The pool is never destroyed, since threads wait in it until the process ends.
alignas(Pool) std::byte g_pool_memory[sizeof(Pool)];
Pool* g_pool = new (g_pool_memory) Pool;

// A forked child has none of its parent's threads: OpenMP would wait for them for ever, and the pool is made anew.
std::atomic<bool> g_forked{false};
// Registered when the module is loaded, since torch uses OpenMP before the first kernel does.
const int registered = pthread_atfork(nullptr, nullptr, [] {
  g_forked.store(true);
  g_pool = new (g_pool_memory) Pool;
});

GompParallel usable_openmp() { return g_forked.load(std::memory_order_relaxed) ? nullptr : g_gomp.load(); }

}  // namespace

Buffer::Buffer(int64_t floats) : bytes_(bytes_of(floats)), data(allocate(bytes_)) {}
Buffer::~Buffer() { release(data, bytes_); }

OnCallersThreads::OnCallersThreads(CallersThreads threads) : before_(g_callers) { g_callers = threads; }
OnCallersThreads::~OnCallersThreads() { g_callers = before_; }

void set_openmp(uint64_t gomp_parallel) {
  if (registered == 0) g_gomp.store(reinterpret_cast<GompParallel>(gomp_parallel));
}

const char* threading() { return usable_openmp() ? "torch-openmp" : "threads"; }

void parallel_for(int threads, int64_t items, Body body, void* context) {
  Loop loop{body, context, items};
  if (threads <= 1 || items <= 1) {
    run_items(&loop);
  } else if (const CallersThreads callers = g_callers; callers.run) {
    const auto tasks = static_cast<size_t>(std::min<int64_t>(threads, items));
    {
      const OnCallersThreads none({});  // a call that the function makes runs on the pool
      callers.run(callers.context, [](void* p, size_t) { run_items(p); }, &loop, tasks);
    }
    run_items(&loop);  // items are left if the function has failed; a task that has not run leaves its thread's number
  } else if (GompParallel gomp = usable_openmp()) {
    // The team is always whole: for a smaller one libgomp would end the other threads, and start new ones for the next
    // loop.
    gomp(run_items, &loop, static_cast<unsigned>(threads), 0);
  } else {
    g_pool->run(loop, static_cast<int>(std::min<int64_t>(threads, items)) - 1);
  }
}

}  // namespace txl
