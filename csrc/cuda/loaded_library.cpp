#include "loaded_library.h"

#include <cstring>
#include <new>
#include <stdexcept>

#include "../include/txl_attention.h"
#include "library.h"

namespace txl_cuda {
namespace {

const CudaLibrary* g_library = nullptr;

const CudaLibrary& library() {
  if (!g_library) throw std::runtime_error("set_library has not been called");
  return *g_library;
}

// Throws the exception of a code that a function of the library returned.
void check(int code) {
  if (code == TXL_OK) return;
  if (code == TXL_OUT_OF_MEMORY) throw std::bad_alloc();
  if (code == TXL_INVALID_ARGUMENT) throw std::invalid_argument(library().last_error());
  throw std::runtime_error(library().last_error());
}

}  // namespace

void define_library(pybind11::module_& m) {
  m.def("set_library", [m](int64_t address) mutable {
    const auto* const found = reinterpret_cast<const CudaLibrary*>(address);
    if (std::strcmp(found->source_hash, TXL_SOURCE_HASH) != 0) return false;
    g_library = found;
    m.attr("compiler") = found->compiler;
    m.attr("architectures") = found->architectures;
    m.attr("clock_limit") = found->clock_limit;
    return true;
  });
}

const char* no_driver() { return library().no_driver(); }
OnDevice::OnDevice(int device) { check(library().enter_device(this, device)); }
OnDevice::~OnDevice() { library().leave_device(this); }

int64_t split_decode(DecodeProblem& p, int multiprocessors) {
  int64_t floats = 0;
  check(library().split_decode(p, multiprocessors, &floats));
  return floats;
}
void forward_decode(const DecodeProblem& p, void* stream) { check(library().forward_decode(p, stream)); }
void load_decode(const DecodeProblem& p) { check(library().load_decode(p)); }

int64_t split_prefill(Problem& p, int multiprocessors) {
  int64_t floats = 0;
  check(library().split_prefill(p, multiprocessors, &floats));
  return floats;
}
void forward_prefill(const Problem& p, void* stream) { check(library().forward_prefill(p, stream)); }
void load_prefill(const Problem& p) { check(library().load_prefill(p)); }

int64_t split_backward(const Problem& p, int multiprocessors) {
  int64_t parts = 0;
  check(library().split_backward(p, multiprocessors, &parts));
  return parts;
}
int64_t workspace_of(const Problem& p, const Gradients& gradients) {
  int64_t floats = 0;
  check(library().workspace_of(p, gradients, &floats));
  return floats;
}
void backward(const Problem& p, const Gradients& gradients, void* stream) {
  check(library().backward(p, gradients, stream));
}

}  // namespace txl_cuda
