#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace txl {
namespace {

// The entry point every GNU-compatible OpenMP runtime exports: run fn(data) on a team of
// num_threads.
using GompParallel = void (*)(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);

std::atomic<GompParallel> g_gomp{nullptr};

// A forked child has none of the pool's threads, and the runtime would wait for them for ever.
std::atomic<bool> g_forked{false};
// Once the module is loaded, since others use the pool before the first kernel does.
const int registered = pthread_atfork(nullptr, nullptr, [] { g_forked.store(true); });

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

GompParallel usable_openmp() { return g_forked.load(std::memory_order_relaxed) ? nullptr : g_gomp.load(); }

}  // namespace

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
    const int team = static_cast<int>(std::min<int64_t>(threads, items));
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(team - 1));
    try {
      for (int i = 1; i < team; ++i) others.emplace_back(work, &loop);
    } catch (...) {
      // Fewer threads than asked for still finish every item.
    }
    work(&loop);
    for (auto& t : others) t.join();
  }
}

}  // namespace txl
