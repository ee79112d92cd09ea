// Launches the Hopper kernels: prefill and gradients, 16-bit types, D up to 128. Splits keys into parts.
#include "../launch.h"

#include <algorithm>

#include "backward_launch.cuh"

namespace txl_cuda {

namespace {

constexpr int64_t MIN_TILES = 4, MAX_PARTS = 64;
constexpr double ENOUGH = 0.8;   // of the multiprocessors have a block: keys are not split
constexpr double NEARLY = 0.85;  // of the best fullness of rounds: fewer parts are preferred

// The number of parts into which each block splits its tiles of keys, by the rule of FA2's num_splits_heuristic: one if
// blocks fill most of the multiprocessors, else the fewest whose rounds of blocks are nearly as full as those of any.
int64_t parts_by_rounds(int64_t blocks, int64_t tiles, int64_t multiprocessors) {
  if (static_cast<double>(blocks) >= ENOUGH * static_cast<double>(multiprocessors)) return 1;
  const int64_t max_parts = std::min(MAX_PARTS, ceil_div(tiles, MIN_TILES));
  const auto fullness = [&](int64_t parts) {
    return static_cast<double>(blocks * parts) /
           static_cast<double>(ceil_div(blocks * parts, multiprocessors) * multiprocessors);
  };
  double best = 0;
  for (int64_t parts = 1; parts <= max_parts; ++parts) best = std::max(best, fullness(parts));
  int64_t parts = 1;
  while (parts < max_parts && fullness(parts) < NEARLY * best) ++parts;
  return ceil_div(tiles, ceil_div(tiles, parts));  // none without tiles
}

// Whether rows of keys are 128 columns wide in tiles.
bool is_wide(const Problem& p) { return p.D > 64; }

// The number of queries of a block of forward, and of backward.
int64_t queries_of_forward(const Problem& p) {
  if (p.has_q_pos) return is_wide(p) ? ForwardQPos128<Bf16>::QUERIES : ForwardQPos64<Bf16>::QUERIES;
  return is_wide(p) ? Forward128<Bf16>::QUERIES : Forward64<Bf16>::QUERIES;
}
int64_t queries_of_backward(const Problem& p) {
  if (p.has_q_pos) return is_wide(p) ? QueriesQPos128<Bf16>::QUERIES : QueriesQPos64<Bf16>::QUERIES;
  return is_wide(p) ? Queries128<Bf16>::QUERIES : Queries64<Bf16>::QUERIES;
}

// The maximum number of tiles of keys that a block of so many queries uses.
int64_t tiles_of_block(const Problem& p, int64_t queries) {
  return ceil_div(std::min(p.M + p.L, p.left + 1 + queries), SIDE);
}

}  // namespace

int64_t split_prefill(Problem& p, int multiprocessors) {
  if (p.L < 1 || p.D < 8 || p.D > 128 || p.D % 8 || p.B < 1 || p.H < 1 || p.type == Type::f32 ||
      (p.has_q_pos ? p.Dr != 8 && p.Dr != 16 : p.Dr != p.D || p.Hkv != p.H || p.has_sink || p.zero_outside))
    throw std::invalid_argument("sizes that the Hopper kernels do not take");
  p.multiprocessors = multiprocessors;
  p.zero_row = std::min(p.zero_row, p.T + p.L);  // from there on no distance has a row; it fits an int
  const int64_t queries = queries_of_forward(p);
  const int64_t blocks = ceil_div(p.L, queries) * p.B * p.H;
  p.parts = p.L > MAX_GRID ? 1 : parts_by_rounds(blocks, tiles_of_block(p, queries), multiprocessors);
  if (p.B > MAX_GRID || p.H > MAX_GRID) throw std::invalid_argument("more batch rows or heads than a grid can have");
  return p.parts > 1 ? p.B * p.H * p.L * p.parts * (p.D + 2) : 0;
}

void forward_prefill(const Problem& p, void* stream) {
  if (p.type == Type::bf16) return forward_prefill_bf16(p, stream);
  return forward_prefill_f16(p, stream);
}

int64_t split_backward(const Problem& p, int multiprocessors) {
  const int64_t queries = queries_of_backward(p);
  return parts_by_rounds(ceil_div(p.L, queries) * p.B * p.H, tiles_of_block(p, queries), multiprocessors);
}

int64_t workspace_of(const Problem& p, const Gradients& gradients) {
  if (p.has_q_pos && (gradients.du.data || gradients.dw.data))
    throw std::invalid_argument("gradients of biases beside q_pos, which the Hopper kernels do not take");
  if (p.has_q_pos)
    return is_wide(p) ? workspace_as<QueriesQPos128<Bf16>, KeysQPos128<Bf16>>(p, gradients)
                      : workspace_as<QueriesQPos64<Bf16>, KeysQPos64<Bf16>>(p, gradients);
  return is_wide(p) ? workspace_as<Queries128<Bf16>, Keys128<Bf16>>(p, gradients)
                    : workspace_as<Queries64<Bf16>, Keys64<Bf16>>(p, gradients);
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
