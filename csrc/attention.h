// One call of rel_attention as every kernel sees it: sizes, mask, dropout, and where the tensors
// lie. Symbols follow DESIGN.md, "What is computed".
#pragma once
#include <cstdint>

#include "call_fields.h"

namespace txl {

enum class Type : int { f32, bf16, f16 };

// A tensor of up to four axes with the strides of the first three, in elements; the fourth is contiguous.
// data == nullptr: not given.
struct View {
  void* data = nullptr;
  int64_t s0 = 0, s1 = 0, s2 = 0;
};

// An int32 [B, L] tensor of interval ends; strides may be 0. data == nullptr: not given.
struct Bounds {
  const int32_t* data = nullptr;
  int64_t s0 = 0, s1 = 0;
};

struct Attention {
  Type type = Type::f32;
  int64_t B = 0, H = 0, L = 0, M = 0, D = 0;  // S = M + L
  int64_t Dv = 0;                             // width of values and out
  int64_t Dr = 0;                             // width of r, w and q_pos; D without q_pos
  int64_t Hkv = 0;                            // heads of keys and values: head h reads head h / (H / Hkv)
  int64_t T = 0, zero_row = 0;                // r and r_bias have T rows; row zero_row + d is distance d
  bool zero_outside = false;                  // a pair whose row is not in [0, T) has no terms of r and r_bias
  int64_t left = 0, right = 0;                // keys seen before and after a query's own, at most S each
  float scale = 1;
  float position_scale = 1;  // of the terms of r and r_bias
  float softcap = 0;         // a score is softcap * tanh(score / softcap); 0: as it is
  uint32_t drop_below = 0;   // an entry whose 16 bits are below this is dropped; 0: no dropout
  float keep_scale = 1;      // 65536 / (65536 - drop_below)
  // The inputs, whose axes call_fields.h says (Dp is Dr); the sink is float. q_pos that is not given is q.
#define TXL_VIEW(enumerator, name, member) View member;
  TXL_INPUTS(TXL_VIEW)
#undef TXL_VIEW
  Bounds start, end;
  View out;              // [B, H, L, Dv]: written by forward, read by backward
  float* lse = nullptr;  // [B, H, L] contiguous: written by forward unless null, read by backward
};

}  // namespace txl
