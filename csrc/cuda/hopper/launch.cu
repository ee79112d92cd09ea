// Starts the Hopper kernels: many queries, 16-bit types, D up to 128.
#include "../launch.h"

#include <algorithm>

#include "backward_launch.cuh"

namespace txl_cuda {

namespace {

constexpr int64_t QUERIES = 128;  // of a block
constexpr int64_t FEWEST_TILES = 4, MOST_PARTS = 64;

int64_t up(int64_t x, int64_t by) { return (x + by - 1) / by; }

}  // namespace

int64_t split_long(Problem& p, int multiprocessors) {
  if (p.L < 1 || p.D < 8 || p.D > 128 || p.D % 8 || p.B < 1 || p.H < 1 || p.type == Type::f32)
    throw std::invalid_argument("sizes that the Hopper kernels do not take");
  const int64_t seen = p.window ? std::min(p.M + p.L, p.window + QUERIES) : p.M + p.L;
  const int64_t blocks = up(p.L, QUERIES), programs = blocks * p.B * p.H;
  p.parts = std::clamp<int64_t>(multiprocessors / programs, 1, std::min(MOST_PARTS, up(up(seen, SIDE), FEWEST_TILES)));
  if (p.B > MOST_GRID || p.H > MOST_GRID) throw std::invalid_argument("more batch rows or heads than a grid can have");
  return p.parts > 1 ? p.B * p.H * p.L * p.parts * (p.D + 2) : 0;
}

void forward_long(const Problem& p, void* stream) {
  if (p.type == Type::bf16) return forward_long_bf16(p, stream);
  return forward_long_f16(p, stream);
}

Workspace workspace_of(const Problem& p) {
  return p.D <= 64 ? workspace_as<QueriesNarrow<Bf16>, KeysNarrow<Bf16>>(p)
                   : workspace_as<QueriesWide<Bf16>, KeysWide<Bf16>>(p);
}

void backward_long(const Problem& p, const Gradients& gradients, void* stream) {
  if (p.type == Type::bf16) return backward_long_bf16(p, gradients, stream);
  return backward_long_f16(p, gradients, stream);
}

void load_long(const Problem& p) {
  if (p.type == Type::bf16) return load_forward_bf16(p), load_backward_bf16(p);
  return load_forward_f16(p), load_backward_f16(p);
}

}  // namespace txl_cuda
