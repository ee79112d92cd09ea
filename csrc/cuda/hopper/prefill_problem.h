// A prefill call as the Hopper kernels see it.
#pragma once
#include "../cuda_problem.h"
#include "hardware.cuh"

namespace txl_cuda {

// The tensor map of rows [n, h, row], in boxes of 64 rows by 64 elements, or 16 for narrow tiles. An axis of stride 0
// or size 1 has one entry there: h and n, 0 or 1, are what the coordinates of heads and batch rows are multiplied by.
struct RowsMap {
  TensorMap map;
  int h = 0, n = 0;
};

// L of any size, D a multiple of 8 up to 128, rows at multiples of 16 bytes. The
// tiles of keys that a block sees are split evenly in p.parts.
struct PrefillProblem : Problem {
  RowsMap k_rows, v_rows, k_mem_rows, v_mem_rows, r_rows;
};

}  // namespace txl_cuda
