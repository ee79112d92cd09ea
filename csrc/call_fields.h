// The fields of txl_kernels.call.Call, written by tools/call_fields.py from txl_kernels/call.py.
#pragma once

// clang-format off
// X(enumerator, name, member of txl::Attention) for each input.
#define TXL_INPUTS(X) \
  X(Q, q, q)  /* [B, H, L, D] */ \
  X(K, k, k)  /* [B, Hkv, L, D] */ \
  X(V, v, v)  /* [B, Hkv, L, Dv] */ \
  X(R, r, r)  /* [H, T, Dp] */ \
  X(CONTENT_BIAS, content_bias, u)  /* [H, D] */ \
  X(POSITION_BIAS, position_bias, w)  /* [H, Dp] */ \
  X(K_MEM, k_mem, k_mem)  /* [B, Hkv, M, D] */ \
  X(V_MEM, v_mem, v_mem)  /* [B, Hkv, M, Dv] */ \
  X(R_BIAS, r_bias, r_bias)  /* [H, T] */ \
  X(Q_POS, q_pos, q_pos)  /* [B, H, L, Dp] */ \
  X(SINK, sink, sink)  /* [B, H, L] */

// X(enumerator, name) for each other field.
#define TXL_OTHER_FIELDS(X) \
  X(START, start) \
  X(END, end) \
  X(SEED, seed) \
  X(LEFT, left) \
  X(RIGHT, right) \
  X(ZERO_ROW, zero_row) \
  X(SCALE, scale) \
  X(DROPOUT_P, dropout_p) \
  X(SOFTCAP, softcap) \
  X(POSITION_SCALE, position_scale) \
  X(ZERO_OUTSIDE, zero_outside)
// clang-format on
