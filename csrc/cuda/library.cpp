#include "library.h"

#include <new>

#include "../errors.h"

#ifndef TXL_CLOCK_LIMIT
#define TXL_CLOCK_LIMIT 0  // waits have none
#endif

namespace txl_cuda {
namespace {

const CudaLibrary LIBRARY = {
    TXL_SOURCE_HASH,
    [] { return static_cast<const char*>(txl::g_error); },
    TXL_CUDA_COMPILER,
    TXL_CUDA_ARCHITECTURES,
    static_cast<int64_t>(TXL_CLOCK_LIMIT),
    no_driver,
    [](OnDevice* x, int device) { return txl::guard([&] { new (static_cast<void*>(x)) OnDevice(device); }); },
    [](OnDevice* x) { x->~OnDevice(); },
    [](DecodeProblem& p, int n, int64_t* floats) { return txl::guard([&] { *floats = split_decode(p, n); }); },
    [](const DecodeProblem& p, void* stream) { return txl::guard([&] { forward_decode(p, stream); }); },
    [](const DecodeProblem& p) { return txl::guard([&] { load_decode(p); }); },
    [](Problem& p, int n, int64_t* floats) { return txl::guard([&] { *floats = split_prefill(p, n); }); },
    [](const Problem& p, void* stream) { return txl::guard([&] { forward_prefill(p, stream); }); },
    [](const Problem& p) { return txl::guard([&] { load_prefill(p); }); },
    [](const Problem& p, int n, int64_t* parts) { return txl::guard([&] { *parts = split_backward(p, n); }); },
    [](const Problem& p, const Gradients& g, int64_t* n) { return txl::guard([&] { *n = workspace_of(p, g); }); },
    [](const Problem& p, const Gradients& g, void* stream) { return txl::guard([&] { backward(p, g, stream); }); },
};

}  // namespace
}  // namespace txl_cuda

const txl_cuda::CudaLibrary* txl_cuda_library() { return &txl_cuda::LIBRARY; }
