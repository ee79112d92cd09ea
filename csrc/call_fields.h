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

// X(type, enumerator, name) for each field that is no tensor. An integer that is None is INT64_MAX.
#define TXL_SETTINGS(X) \
  X(int64_t, LEFT, left) \
  X(int64_t, RIGHT, right) \
  X(int64_t, ZERO_ROW, zero_row) \
  X(double, SCALE, scale) \
  X(double, DROPOUT_P, dropout_p) \
  X(double, SOFTCAP, softcap) \
  X(double, POSITION_SCALE, position_scale) \
  X(int, ZERO_OUTSIDE, zero_outside)

// X(name) for each setting of txl_call.
#define TXL_C_SETTINGS(X) \
  X(left) \
  X(right) \
  X(zero_row) \
  X(scale) \
  X(dropout_p) \
  X(softcap) \
  X(position_scale) \
  X(zero_outside)

// X(letter) for each size of txl_call.
#define TXL_SIZES(X) \
  X(B) \
  X(H) \
  X(L) \
  X(D) \
  X(Hkv) \
  X(Dv) \
  X(M) \
  X(Dp) \
  X(T)

// X(name, member of txl::Attention, letters of the axes, whether it is float32 beside any type, whether its last
// axis may have any stride) for each input of txl_call.
#define TXL_C_INPUTS(X) \
  X(q, q, "B H L D", false, false) \
  X(k, k, "B Hkv L D", false, false) \
  X(v, v, "B Hkv L Dv", false, false) \
  X(r, r, "H T Dp", false, false) \
  X(content_bias, u, "H D", false, false) \
  X(position_bias, w, "H Dp", false, false) \
  X(k_mem, k_mem, "B Hkv M D", false, false) \
  X(v_mem, v_mem, "B Hkv M Dv", false, false) \
  X(r_bias, r_bias, "H T", false, true) \
  X(q_pos, q_pos, "B H L Dp", false, false) \
  X(sink, sink, "B H L", true, true)

// X(last field of txl_call, last field of txl_gradients) for each version of the C interface.
#define TXL_C_VERSIONS(X) \
  X(end, sink)
// clang-format on
