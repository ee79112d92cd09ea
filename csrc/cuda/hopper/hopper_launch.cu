// Starts the Hopper kernels: prefill and gradients, 16-bit types, D up to 128.
#include "../launch.h"

#include <algorithm>

#include "backward_launch.cuh"

namespace txl_cuda {

namespace {

constexpr int64_t MIN_TILES = 4, MAX_PARTS = 64;
constexpr double ENOUGH = 0.8, NEARLY = 0.85;  // of the multiprocessors; of the best

int64_t up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// In how many parts blocks split their tiles of keys: one, where blocks fill most of the multiprocessors;
// else the fewest whose rounds of blocks are nearly as full as those of any, as FA2 splits them.
int64_t parts_by_rounds(int64_t blocks, int64_t tiles, int64_t multiprocessors) {
  if (static_cast<double>(blocks) >= ENOUGH * static_cast<double>(multiprocessors)) return 1;
  const int64_t max_parts = std::min(MAX_PARTS, up(tiles, MIN_TILES));
  const auto fullness = [&](int64_t parts) {
    return static_cast<double>(blocks * parts) /
           static_cast<double>(up(blocks * parts, multiprocessors) * multiprocessors);
  };
  double best = 0;
  for (int64_t parts = 1; parts <= max_parts; ++parts) best = std::max(best, fullness(parts));
  int64_t parts = 1;
  while (parts < max_parts && fullness(parts) < NEARLY * best) ++parts;
  return up(tiles, up(tiles, parts));  // none without tiles
}

// Tiles of keys that a block of so many queries walks at most.
int64_t tiles_of_block(const Problem& p, int64_t queries) {
  return up(std::min(p.M + p.L, p.left + 1 + queries), SIDE);
}

}  // namespace

int64_t split_prefill(Problem& p, int multiprocessors) {
  if (p.L < 1 || p.D < 8 || p.D > 128 || p.D % 8 || p.B < 1 || p.H < 1 || p.type == Type::f32)
    throw std::invalid_argument("sizes that the Hopper kernels do not take");
  const int64_t queries = p.D <= 64 ? Narrow<Bf16>::QUERIES : Wide<Bf16>::QUERIES;
  const int64_t blocks = up(p.L, queries) * p.B * p.H;
  p.parts = p.L > MAX_GRID ? 1 : parts_by_rounds(blocks, tiles_of_block(p, queries), multiprocessors);
  if (p.B > MAX_GRID || p.H > MAX_GRID) throw std::invalid_argument("more batch rows or heads than a grid can have");
  return p.parts > 1 ? p.B * p.H * p.L * p.parts * (p.D + 2) : 0;
}

void forward_prefill(const Problem& p, void* stream) {
  if (p.type == Type::bf16) return forward_prefill_bf16(p, stream);
  return forward_prefill_f16(p, stream);
}

int64_t split_backward(const Problem& p, int multiprocessors) {
  const int64_t queries = p.D <= 64 ? QueriesNarrow<Bf16>::QUERIES : QueriesWide<Bf16>::QUERIES;
  return parts_by_rounds(up(p.L, queries) * p.B * p.H, tiles_of_block(p, queries), multiprocessors);
}

int64_t workspace_of(const Problem& p, const Gradients& gradients) {
  return p.D <= 64 ? workspace_as<QueriesNarrow<Bf16>, KeysNarrow<Bf16>>(p, gradients)
                   : workspace_as<QueriesWide<Bf16>, KeysWide<Bf16>>(p, gradients);
}

void backward(const Problem& p, const Gradients& gradients, void* stream) {
  if (p.type == Type::bf16) return backward_bf16(p, gradients, stream);
  return backward_f16(p, gradients, stream);
}

void load_prefill(const Problem& p) {
  if (p.type == Type::bf16) return load_prefill_bf16(p), load_backward_bf16(p);
  return load_prefill_f16(p), load_backward_f16(p);
}

}  // namespace txl_cuda
