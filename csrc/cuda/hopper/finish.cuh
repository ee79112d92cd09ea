// Ends backward: sums what the blocks left in float32, in one order, and rounds it to gradients. Blocks of 128 threads:
// the first for dr, the next for dq and that of position queries where keys were split, the last for 8 columns each of
// the biases' gradients. The gradient of u is the content part of the sum of dq, that of w the rest.
#pragma once
#include "backward_problem.h"
#include "fragments.cuh"

namespace txl_cuda {

struct Finish {
  static constexpr int ELEMENTS = 4 * THREADS * 4;               // of dr or dq of a block, four at a time
  static constexpr int COLUMNS = 8, SLICES = THREADS / COLUMNS;  // of a bias: columns, threads that share one

  static int64_t blocks(int64_t elements) { return (elements + ELEMENTS - 1) / ELEMENTS; }
};

// Writes four elements in 16 bits: sums over `count` tables, `step` floats apart.
template <class T>
TXL_DEVICE void finish_four(const float* from, int64_t count, int64_t step, T* to) {
  Float4 sum = load_float4(from);
  for (int64_t n = 1; n < count; ++n) {
    const Float4 more = load_float4(from + n * step);
    TXL_UNROLL
    for (int e = 0; e < 4; ++e) sum.x[e] += more.x[e];
  }
  TXL_UNROLL
  for (int e = 0; e < 4; e += 2) reinterpret_cast<uint32_t*>(to)[e / 2] = pack(T(), sum.x[e], sum.x[e + 1]);
}

// Writes a block's part of dq or of the gradient of position queries, of so many columns.
template <class T>
TXL_DEVICE void finish_dq(const BackwardProblem& p, int64_t block, int h, const float* parts, int columns,
                          const View& to) {
  for (int n = 0; n < 4; ++n) {
    const int64_t at = block * Finish::ELEMENTS + (n * THREADS + thread()) * 4, batch_row = p.L * columns;
    if (at >= p.B * batch_row) continue;
    const int64_t b = at / batch_row, i = at % batch_row / columns;
    finish_four<T>(parts + ((b * p.H + h) * p.rows + i) * columns + at % columns, p.parts, p.B * p.H * p.rows * columns,
                   const_cast<T*>(row_of<T>(to, b, h, i)) + at % columns);
  }
}

template <class T>
TXL_HOPPER_KERNEL(THREADS)
void finish_kernel(const TXL_CONSTANT BackwardProblem p) {
  TXL_SHARED(shared);                                    // [2][SLICES][COLUMNS]
  if constexpr (EARLY_START) wait_on_dependent_grids();  // plant: early-finish
  const int h = block_y(), D = static_cast<int>(p.D), Dr = static_cast<int>(p.Dr);
  int64_t block = block_x();
  if (block < p.r_blocks) {
    for (int n = 0; n < 4; ++n) {
      const int64_t at = block * Finish::ELEMENTS + (n * THREADS + thread()) * 4, table = (DR_MARGIN + p.T) * Dr;
      if (at < p.T * Dr)
        finish_four<T>(p.dr + h * table + DR_MARGIN * Dr + at, p.tables, p.H * table,
                       const_cast<T*>(row_of<T>(p.dr_out, h, at / Dr, 0)) + at % Dr);
    }
    return;
  }
  block -= p.r_blocks;
  if (block < p.q_blocks) return finish_dq<T>(p, block, h, p.dq_parts, D, p.dq);
  block -= p.q_blocks;
  if (block < p.q_pos_blocks) return finish_dq<T>(p, block, h, p.dq_pos_parts, Dr, p.dq_pos);
  block -= p.q_pos_blocks;
  const int column = static_cast<int>(block) * Finish::COLUMNS + thread() % Finish::COLUMNS;
  const int slice = thread() / Finish::COLUMNS;
  const auto sum_of = [&](const float* sums, int64_t parts) {
    float sum = 0;
    if (!sums) return sum;
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t n = slice; n < parts; n += Finish::SLICES) sum += sums[((b * p.H + h) * parts + n) * D + column];
    return sum;
  };
  shared[thread()] = sum_of(p.q_sums, p.q_parts), shared[THREADS + thread()] = sum_of(p.k_sums, p.k_parts);
  barrier();  // plant: columns-barrier
  if (slice) return;
  float all = 0, content = 0;
  for (int n = thread(); n < THREADS; n += Finish::COLUMNS) all += shared[n], content += shared[THREADS + n];
  if (p.du.data) put(const_cast<T*>(row_of<T>(p.du, h, 0, 0)) + column, content);
  if (p.dw.data) put(const_cast<T*>(row_of<T>(p.dw, h, 0, 0)) + column, all - content);
}

}  // namespace txl_cuda
