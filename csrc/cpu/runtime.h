// Memory and threads for the kernels. Nothing here is inline: the linker could give an inline function that was
// compiled for one instruction set to all others.
#pragma once
#include <cstddef>
#include <cstdint>

namespace txl {

// A block of floats, at a multiple of 64 bytes.
class Buffer {
 public:
  // Leaves the memory uninitialised. Throws std::bad_alloc.
  explicit Buffer(int64_t floats);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  size_t bytes_;  // declared before data, whose initialiser sets it

 public:
  float* const data;
};

using Body = void (*)(void* context, int64_t item, int thread);

// Calls body(context, item, thread) once for each item in [0, items), with thread in [0, threads): on torch's own
// OpenMP pool if set_openmp was given one, else on a pool of the module. While another loop runs on the module's pool,
// a loop runs on its caller alone. Items are started in order, each on any thread, so a result must depend on its item
// alone. The body must not throw.
void parallel_for(int threads, int64_t items, Body body, void* context);

// Runs task(data, index) once for each index in [0, tasks), on any threads, and returns when all have ended.
using CallersParallelFor = void (*)(void* context, void (*task)(void* data, size_t index), void* data, size_t tasks);

struct CallersThreads {
  CallersParallelFor run = nullptr;
  void* context = nullptr;
};

// While it exists, the loops of the thread that made it run by the caller's function, and use neither pool; without a
// function they use a pool again.
class OnCallersThreads {
 public:
  explicit OnCallersThreads(CallersThreads threads);
  ~OnCallersThreads();
  OnCallersThreads(const OnCallersThreads&) = delete;
  OnCallersThreads& operator=(const OnCallersThreads&) = delete;

 private:
  const CallersThreads before_;  // of a call during which the caller's function makes this one
};

// Sets the address of GOMP_parallel in the OpenMP runtime that torch has loaded; 0 for none.
void set_openmp(uint64_t gomp_parallel);

// The pool that the next parallel_for will use: "torch-openmp" or "threads".
const char* threading();

template <class F>
void parallel_for(int threads, int64_t items, const F& f) {
  parallel_for(
      threads, items, [](void* c, int64_t item, int thread) { (*static_cast<const F*>(c))(item, thread); },
      const_cast<F*>(&f));
}

}  // namespace txl
