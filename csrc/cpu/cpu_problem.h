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
  View dout;                    // [B, H, L, Dv]
  const float* dlse = nullptr;  // [B, H, L] contiguous, or null for zeros
  // Written: those of r, r_bias and the biases are contiguous, that of the sink along its last axis.
#define TXL_GRADIENT(enumerator, name, member) View d##member;
  TXL_INPUTS(TXL_GRADIENT)
#undef TXL_GRADIENT
};

}  // namespace txl
