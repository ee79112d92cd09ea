// Memory and threads for the kernels. Never inline: an inline function compiled for one instruction set could be
// linked into another.
#pragma once
#include <cstddef>
#include <cstdint>

namespace txl {

// Aligned float storage.
class Buffer {
 public:
  // Uninitialised. Throws std::bad_alloc.
  explicit Buffer(int64_t floats);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  size_t bytes_;  // before data, which is allocated with it

 public:
  float* const data;
};

using Body = void (*)(void* context, int64_t item, int thread);

// Runs a loop on several threads: on torch's own OpenMP pool when Python found it, else on threads of our own,
// which are kept; a loop that finds those taken by another runs on its caller alone.
// Calls body(context, item, thread) once for each item in [0, items), thread in [0, threads). Items
// are handed out in order; which thread takes which is not fixed, so a result must depend on its
// item alone. The body must not throw.
void parallel_for(int threads, int64_t items, Body body, void* context);

// Address of GOMP_parallel in the OpenMP runtime that torch has loaded; 0 forgets it.
void set_openmp(uint64_t gomp_parallel);

// "torch-openmp" or "threads": what the next parallel_for of this process will use.
const char* threading();

template <class F>
void parallel_for(int threads, int64_t items, const F& f) {
  parallel_for(
      threads, items, [](void* c, int64_t item, int thread) { (*static_cast<const F*>(c))(item, thread); },
      const_cast<F*>(&f));
}

}  // namespace txl
