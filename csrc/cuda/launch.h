// Starts the kernels. Compiled by nvcc for GPUs, and by the tests as host C++ for their emulation.
#pragma once
#include <cstdint>

#include "problem.h"

namespace txl_cuda {

constexpr int MOST_QUERIES = 16, MOST_WIDTH = 256;

// Splits the keys that some query may see, by sizes, p.aligned and the number of multiprocessors
// alone: sets p.first_key, p.parts and p.part_keys. Returns the floats that p.partial must hold.
// Throws std::invalid_argument if the sizes are beyond what the kernels take.
int64_t split(Problem& p, int multiprocessors);

// Enqueues the call on a stream of the current device; the keys are split and p.partial is set.
// Throws std::runtime_error with CUDA's reason.
void forward(const Problem& p, void* stream);

// Loads the kernels of such a call onto the current device, which would otherwise happen at the
// first call. Throws std::runtime_error with CUDA's reason.
void load(const Problem& p);

void forward_f32(const Problem& p, void* stream);
void forward_bf16(const Problem& p, void* stream);
void forward_f16(const Problem& p, void* stream);
void load_f32(const Problem& p);
void load_bf16(const Problem& p);
void load_f16(const Problem& p);

// Why no GPU can be used, or an empty string.
const char* no_driver();

}  // namespace txl_cuda
