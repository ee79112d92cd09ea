// One forward call of the CUDA kernels: sizes, mask, and where the tensors lie on the device. Symbols follow DESIGN.md.
#pragma once
#include <cstdint>

namespace txl_cuda {

enum class Type : int { f32, bf16, f16 };

// A [n0, n1, n2, D] tensor in elements: any strides, last axis contiguous.
struct View {
  const void* data;
  int64_t s0, s1, s2;
};

// An int32 [B, L] tensor of interval ends; strides may be 0. data == nullptr: not given.
struct Bounds {
  const int32_t* data;
  int64_t s0, s1;
};

struct Problem {
  int64_t B, H, L, M, D;  // L in [1, 16], D a multiple of 8 up to 256
  int64_t T, zero_row;    // r has T rows; row zero_row + d is distance d
  int64_t window;         // 0: no window
  int32_t causal;
  int32_t aligned;  // all rows of k, v and r start at multiples of 16 bytes
  float scale;
  uint32_t drop_below;         // an entry whose Philox word is below this is dropped; 0: no dropout
  float keep_scale;            // 1 / (1 - p)
  const int64_t* seed;         // one element, on the device; read only with dropout
  View q, k, v, k_mem, v_mem;  // [B, H, rows, D]
  View r, u, w;                // r [H, T, D]: s0 head, s1 row; biases [H, D]: s0 head
  Bounds start, end;
  View out;                  // [B, H, L, D], written
  float* lse;                // [B, H, L] contiguous or null, written
  int64_t first_key;         // of the first part: what lies before is outside the window of all
  int64_t parts, part_keys;  // keys of a part; first_key + parts * part_keys >= M + L
  float* partial;            // B * H * L * parts * (D + 2) floats, see merge.cuh; unused if parts == 1
};

}  // namespace txl_cuda
