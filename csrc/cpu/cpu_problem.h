// One call of the CPU kernels.
#pragma once
#include "../attention.h"

namespace txl {

struct Problem : Attention {
  int threads = 1;
  uint64_t seed = 0;
};

struct Gradients {                  // what is out: data == nullptr where it is not wanted
  View dout;                        // [B, H, L, Dv], in
  const float* dlse = nullptr;      // [B, H, L] contiguous or null, in
  View dq, dk, dv, dk_mem, dv_mem;  // [B, H (dq) or Hkv, rows, D], values Dv, out
  View dq_pos;                      // [B, H, L, Dr], out
  View dr;                          // [H, T, Dr] contiguous, out
  View du, dw;                      // [H, D] and [H, Dr] contiguous, out
  View dr_bias;                     // [H, T] contiguous, out
  View dsink;                       // [B, H, L] float, last axis contiguous, out
};

}  // namespace txl
