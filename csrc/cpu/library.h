// The functions of libtxl_cpu for the Python module, which loads the library from its own folder. Unlike those of
// txl_attention.h they check no arguments. No exception leaves them, since module and library may come from different
// compilers: they return the codes of txl_attention.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dispatch.h"
#include "intervals.h"

namespace txl {

struct CpuLibrary {
  const char* source_hash;  // first: a module of other sources reads only this one
  const char* (*last_error)();
  int (*forward)(const Problem&);
  int (*backward)(const Problem&, const Gradients&);
  int (*intervals)(const Mask&, int32_t* start, int32_t* end, int threads, int64_t* hole);
  int (*kernels)(const Kernels** in_use);
  const Kernels* (*all_kernels)(size_t* count);
  int (*force_isa)(const char* name);
  int (*why_not_amx)(const char** reason);
  int64_t (*emulated_multiplications)();
  void (*set_openmp)(uint64_t gomp_parallel);
  const char* (*threading)();
};

}  // namespace txl

extern "C" __attribute__((visibility("default"))) const txl::CpuLibrary* txl_cpu_library();
