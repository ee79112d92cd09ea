// A call of the CPU kernels and its gradients.
#pragma once
#include "../attention.h"

namespace txl {

struct Problem : Attention {
  int threads = 1;
  uint64_t seed = 0;
};

// The gradients of out and lse, and those that backward writes; data == nullptr: not wanted.
struct Gradients {
  View dout;                        // [B, H, L, Dv]
  const float* dlse = nullptr;      // [B, H, L] contiguous, or null for zeros
  View dq, dk, dv, dk_mem, dv_mem;  // written: [B, H (dq) or Hkv, rows, D], values Dv
  View dq_pos;                      // written: [B, H, L, Dr]
  View dr;                          // written: [H, T, Dr] contiguous
  View du, dw;                      // written: [H, D] and [H, Dr] contiguous
  View dr_bias;                     // written: [H, T] contiguous
  View dsink;                       // written: [B, H, L] float, last axis contiguous
};

}  // namespace txl
