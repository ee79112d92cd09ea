// The functions of libtxl_cuda for the Python module, which loads the library from its own folder: those of launch.h.
// No exception leaves them, since module and library may come from different compilers: they return the codes of
// txl_attention.h.
#pragma once
#include <cstdint>

#include "launch.h"

namespace txl_cuda {

struct CudaLibrary {
  const char* source_hash;  // first: a module of other sources reads only this one
  const char* (*last_error)();
  const char *compiler, *architectures;
  int64_t clock_limit;
  const char* (*no_driver)();
  int (*enter_device)(OnDevice* uninitialised, int device);
  void (*leave_device)(OnDevice*);
  int (*split_decode)(DecodeProblem&, int multiprocessors, int64_t* floats);
  int (*forward_decode)(const DecodeProblem&, void* stream);
  int (*load_decode)(const DecodeProblem&);
  int (*split_prefill)(Problem&, int multiprocessors, int64_t* floats);
  int (*forward_prefill)(const Problem&, void* stream);
  int (*load_prefill)(const Problem&);
  int (*split_backward)(const Problem&, int multiprocessors, int64_t* parts);
  int (*workspace_of)(const Problem&, const Gradients&, int64_t* floats);
  int (*backward)(const Problem&, const Gradients&, void* stream);
};

}  // namespace txl_cuda

extern "C" __attribute__((visibility("default"))) const txl_cuda::CudaLibrary* txl_cuda_library();
