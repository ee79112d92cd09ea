// How decode splits its keys, and its kernels by element type.
#include <algorithm>

#include "decode_launch.cuh"

namespace txl_cuda {

namespace {

constexpr int64_t STEP = 64;           // keys; what a block has in flight at a time
constexpr int64_t MAX_KEYS = 512;      // of a part
constexpr int64_t START = 48;          // what a block's beginning and end cost, in keys: a guess
constexpr int64_t SHARED = 47 * 1024;  // bytes every device grants without asking, but for one KB of the system

int64_t up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Q of the instance that with_shape will take.
int64_t instance_queries(const DecodeProblem& p) {
  return !p.aligned || p.L > 4 ? MAX_DECODE_QUERIES : p.L == 1 ? 1 : 4;
}

// Most keys whose scores fit in shared memory beside the queries.
int64_t max_keys(const DecodeProblem& p) {
  const int Q = static_cast<int>(instance_queries(p));
  const int width = !p.aligned ? MAX_WIDTH : p.D <= 64 ? 64 : p.D <= 128 ? 128 : MAX_WIDTH;
  int64_t keys = MAX_KEYS;
  while (static_cast<int64_t>(sizeof(float)) * layout(Q, width, static_cast<int>(keys)).floats > SHARED) keys -= STEP;
  return keys;
}

}  // namespace

int64_t split_decode(DecodeProblem& p, int multiprocessors) {
  if (p.L < 1 || p.L > MAX_DECODE_QUERIES || p.D < 8 || p.D > MAX_WIDTH || p.D % 8 || p.B < 1 || p.H < 1)
    throw std::invalid_argument("sizes that the CUDA kernels do not take");
  p.first_key = std::max<int64_t>(0, p.M - p.left);
  const int64_t S = p.M + p.L - p.first_key, heads = p.B * p.H;
  // Blocks that run at once, by the registers of the instances; the split that takes the fewest
  // such rounds of keys.
  const int64_t Q = instance_queries(p), at_once = std::max(1, multiprocessors) * (Q == 1 ? 4 : Q == 4 ? 3 : 2);
  int64_t keys = 0, min_cost = INT64_MAX;
  for (int64_t tried = max_keys(p); tried > 0; tried -= STEP) {
    const int64_t cost = up(heads * up(S, tried), at_once) * (tried + START);
    if (cost < min_cost) min_cost = cost, keys = tried;
  }
  p.part_keys = std::min(keys, up(S, STEP) * STEP);
  p.parts = up(S, p.part_keys);
  if (p.parts > MAX_GRID || p.H > MAX_GRID || p.B > INT32_MAX)
    throw std::invalid_argument("more keys or batch rows than a grid of blocks can have");
  return p.parts > 1 ? heads * p.L * p.parts * (p.D + 2) : 0;
}

void forward_decode(const DecodeProblem& p, void* stream) {
  if (p.type == Type::f32) return forward_decode_f32(p, stream);
  if (p.type == Type::bf16) return forward_decode_bf16(p, stream);
  return forward_decode_f16(p, stream);
}

void load_decode(const DecodeProblem& p) {
  if (p.type == Type::f32) return load_decode_f32(p);
  if (p.type == Type::bf16) return load_decode_bf16(p);
  return load_decode_f16(p);
}

}  // namespace txl_cuda
