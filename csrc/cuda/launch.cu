#include "launch.h"

#include <algorithm>

#include "launch.cuh"

namespace txl_cuda {

namespace {

constexpr int64_t STEP = 64;                // keys; what a block has in flight at a time
constexpr int64_t MOST_KEYS = 512;          // of a part
constexpr int64_t SHARED = 48 * 1024;       // bytes every device grants without asking
constexpr int64_t BLOCKS_A_PROCESSOR = 4;   // that are wanted, so that loads of some hide the arithmetic of others
constexpr int64_t MOST_GRID_Y = 65535;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Queries an instance is compiled for, which its shared memory is laid out for.
int64_t instance_queries(int64_t L) { return L == 1 ? 1 : L <= 4 ? 4 : MOST_QUERIES; }

}  // namespace

int64_t shared_bytes(int64_t L, int64_t D, int64_t part_keys) {
  const int64_t Q = instance_queries(L);
  return 4 * (2 * Q * D + Q * part_keys + 2 * Q);
}

Split split(const Problem& p, int multiprocessors) {
  if (p.L < 1 || p.L > MOST_QUERIES || p.D < 8 || p.D > MOST_WIDTH || p.D % 8 || p.B < 1 || p.H < 1)
    throw std::invalid_argument("sizes that the CUDA kernels do not take");
  const int64_t S = p.M + p.L;
  int64_t most = MOST_KEYS;
  while (shared_bytes(p.L, p.D, most) > SHARED) most -= STEP;
  const int64_t wanted = std::max<int64_t>(1, BLOCKS_A_PROCESSOR * multiprocessors / (p.B * p.H));
  const int64_t keys = std::min(most, round_up((S + wanted - 1) / wanted, STEP));
  const int64_t parts = (S + keys - 1) / keys;
  if (parts > MOST_GRID_Y || p.B * p.H * p.L > INT32_MAX)
    throw std::invalid_argument("more keys or batch rows than a grid of blocks can have");
  return {parts, keys, parts > 1 ? p.B * p.H * p.L * parts * (p.D + 2) : 0};
}

void forward(Type type, const Problem& p, void* stream) {
  if (type == Type::f32) return forward_f32(p, stream);
  if (type == Type::bf16) return forward_bf16(p, stream);
  return forward_f16(p, stream);
}

const char* no_driver() {
#ifdef __CUDACC__
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaErrorInsufficientDriver) return "no usable NVIDIA driver";
  if (error != cudaSuccess) return cudaGetErrorString(error);
#endif
  return "";
}

}  // namespace txl_cuda
