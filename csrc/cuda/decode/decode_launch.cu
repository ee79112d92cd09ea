// The split of decode's keys into parts, and dispatch by element type.
//
// Why these kernels are kept beside Triton's: a call of one query takes 10.5 us of the host's time up to its launch, by
// Triton 23 to 40 us, and Triton does not run everywhere (docs/kernels-gpu.md, "CUDA C++ for short calls").
#include <algorithm>

#include "decode_launch.cuh"

namespace txl_cuda {

namespace {

constexpr int64_t STEP = 64;  // keys that a block has in flight at a time
constexpr int64_t MAX_PART_KEYS = 512;
constexpr int64_t BLOCK_OVERHEAD = 48;           // cost of a block's beginning and end, in keys: an estimate
constexpr int64_t MAX_SHARED_BYTES = 47 * 1024;  // of a block without opt-in, less one KB that the system reserves

int64_t div_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// The Q of the instance that with_shape chooses.
int64_t instance_queries(const DecodeProblem& p) {
  const int64_t queries = p.heads * p.L;
  return !p.aligned || queries > 4 ? MAX_DECODE_QUERIES : queries == 1 && !p.with_terms ? 1 : 4;
}

// Sets which query heads a block has: as many of one head of keys as the instances have queries, in blocks of nearly
// the same size.
void group_heads(DecodeProblem& p) {
  if (p.L > MAX_TERM_QUERIES || p.Hkv < 1 || p.H % p.Hkv || p.Dr < 8 || p.Dr > p.D || p.Dr % 8)
    throw std::invalid_argument("sizes that the CUDA kernels do not take");
  const int64_t group = p.H / p.Hkv;
  p.group_blocks = div_up(group, MAX_DECODE_QUERIES / p.L);
  p.heads = div_up(group, p.group_blocks);
  p.group_blocks = div_up(group, p.heads);
}

// The maximum of keys whose scores fit in shared memory beside the queries.
int64_t max_part_keys(const DecodeProblem& p) {
  const int Q = static_cast<int>(instance_queries(p));
  const int width = !p.aligned ? MAX_WIDTH : p.D <= 64 ? 64 : p.D <= 128 ? 128 : MAX_WIDTH;
  int64_t keys = MAX_PART_KEYS;
  while (static_cast<int64_t>(sizeof(float)) * layout(Q, width, static_cast<int>(keys)).floats > MAX_SHARED_BYTES)
    keys -= STEP;
  return keys;
}

}  // namespace

int64_t split_decode(DecodeProblem& p, int multiprocessors) {
  if (p.L < 1 || p.L > MAX_DECODE_QUERIES || p.D < 8 || p.D > MAX_WIDTH || p.D % 8 || p.B < 1 || p.H < 1)
    throw std::invalid_argument("sizes that the CUDA kernels do not take");
  if (p.with_terms) group_heads(p);
  p.first_key = std::max<int64_t>(0, p.M - p.left);
  const int64_t S = p.M + p.L - p.first_key, blocks = p.B * p.Hkv * p.group_blocks;
  // The number of resident blocks follows from the registers of the instances. The split with the least estimated time
  // for all waves of blocks is chosen.
  const int64_t Q = instance_queries(p), resident = std::max(1, multiprocessors) * (Q == 1 ? 4 : Q == 4 ? 3 : 2);
  int64_t keys = 0, min_cost = INT64_MAX;
  for (int64_t candidate = max_part_keys(p); candidate > 0; candidate -= STEP) {
    const int64_t cost = div_up(blocks * div_up(S, candidate), resident) * (candidate + BLOCK_OVERHEAD);
    if (cost < min_cost) min_cost = cost, keys = candidate;
  }
  p.part_keys = std::min(keys, div_up(S, STEP) * STEP);
  p.parts = div_up(S, p.part_keys);
  if (p.parts > MAX_GRID || p.H > MAX_GRID || p.B > INT32_MAX)
    throw std::invalid_argument("more keys or batch rows than a grid of blocks can have");
  return p.parts > 1 ? p.B * p.H * p.L * p.parts * (p.D + 2) : 0;
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
