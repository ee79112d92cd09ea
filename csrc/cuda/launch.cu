#include "launch.h"

#include <algorithm>

#include "launch.cuh"

namespace txl_cuda {

namespace {

constexpr int64_t STEP = 64;               // keys; what a block has in flight at a time
constexpr int64_t MOST_KEYS = 512;         // of a part
constexpr int64_t SHARED = 48 * 1024;      // bytes every device grants without asking
constexpr int64_t BLOCKS_A_PROCESSOR = 4;  // that are wanted, so that loads of some hide the arithmetic of others
constexpr int64_t MOST_PARTS = 65535;      // second axis of a grid

int64_t up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Most keys whose scores fit in shared memory beside the queries, in the instance that by_width will take.
int64_t most_keys(const Problem& p) {
  const int64_t Q = !p.aligned ? MOST_QUERIES : p.L == 1 ? 1 : p.L <= 4 ? 4 : MOST_QUERIES;
  const int64_t width = !p.aligned ? MOST_WIDTH : p.D <= 64 ? 64 : p.D <= 128 ? 128 : MOST_WIDTH;
  const int64_t left = SHARED / 4 - 2 * Q * width - 2 * WARPS * Q;
  return std::min(MOST_KEYS, left / Q / STEP * STEP);
}

}  // namespace

Split split(const Problem& p, int multiprocessors) {
  if (p.L < 1 || p.L > MOST_QUERIES || p.D < 8 || p.D > MOST_WIDTH || p.D % 8 || p.B < 1 || p.H < 1)
    throw std::invalid_argument("sizes that the CUDA kernels do not take");
  const int64_t S = p.M + p.L, wanted = up(BLOCKS_A_PROCESSOR * multiprocessors, p.B * p.H);
  // Parts of nearly the same length, no fewer than are wanted while each has a full tile.
  const int64_t least = std::max(up(S, most_keys(p)), std::min(wanted, up(S, STEP)));
  const int64_t keys = up(up(S, least), STEP) * STEP, parts = up(S, keys);
  if (parts > MOST_PARTS || p.B * p.H * p.L > INT32_MAX)
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
