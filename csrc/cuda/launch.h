// Starts the kernels. Compiled by nvcc for GPUs, and by the tests as host C++ for their emulation.
#pragma once
#include <cstdint>

#include "problem.h"

namespace txl_cuda {

constexpr int MOST_QUERIES = 16, MOST_WIDTH = 256;

// How the keys of a call are split. Decided by sizes and the number of multiprocessors alone.
struct Split {
  int64_t parts, part_keys;  // parts * part_keys >= M + L
  int64_t partial_floats;    // that Problem::partial must hold
};

// Throws std::invalid_argument if the sizes are beyond what the kernels take.
Split split(const Problem& p, int multiprocessors);

// Enqueues the call on a stream of the current device; p.parts, p.part_keys and p.partial are set. Throws
// std::runtime_error with CUDA's reason.
void forward(Type type, const Problem& p, void* stream);

void forward_f32(const Problem& p, void* stream);
void forward_bf16(const Problem& p, void* stream);
void forward_f16(const Problem& p, void* stream);

// Why no GPU can be used, or an empty string.
const char* no_driver();

}  // namespace txl_cuda
