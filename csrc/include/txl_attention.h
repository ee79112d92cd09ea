/* Relative-position attention on the CPU: the C interface of libtxl_cpu. C99 or newer, and C++.
 *
 * What is computed is written in DESIGN.md, and in the documentation of txl_kernels.rel_attention in Python, which runs
 * the same kernels. The kernels for GPUs have no C interface.
 *
 * A call is one struct. Set every byte of it to zero, then its size and the fields that the call needs:
 *
 *   txl_call call = {0};
 *   call.struct_size = sizeof call;
 *
 * The size is the version of the header that the program was compiled with. A later version of the library takes the
 * fields that this header does not have as zeros, and an earlier one refuses the call.
 *
 * Every function may be called from any thread, and checks its arguments before it reads or writes a tensor: types,
 * sizes, strides, alignment, bounds, and that the table of positions has a row for each distance that a query sees. It
 * cannot check that a tensor's memory is as large as the sizes and strides say. A function that returns an int returns
 * TXL_OK, or another code below; then txl_last_error() has a message that names the argument, what was given and what
 * is accepted. No function ends the process or throws.
 *
 * Memory: an element that is written (of out, of lse, of a gradient) must not be one of an input or of another tensor
 * that is written, and that of a gradient not one of out, of lse or of their gradients either; else the call is
 * refused. This is decided exactly, by elements: tensors that alternate in one buffer are accepted, such as q, k and v
 * in [B, L, 3, H, D]. There is one exception: forward may write out over q, or over q_pos, with the same data and
 * strides and Dv = D (Dp). Backward cannot follow it, since it reads q. Inputs may share memory with one another.
 *
 * Threads: a thread that is in a call cannot be cancelled (pthread_cancel). It ends at its first cancellation point
 * after the call, or, if its type of cancellation is asynchronous, at the call's end. dlclose does not unload the
 * library, since its threads wait for calls until the process ends. Destructors of thread-specific data and functions
 * of atexit may make calls, too. */
#ifndef TXL_ATTENTION_H
#define TXL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TXL_API __attribute__((visibility("default")))

enum { TXL_OK = 0, TXL_INVALID_ARGUMENT = 1, TXL_OUT_OF_MEMORY = 2, TXL_FAILED = 3 };

/* The type of q, and of all other tensors except lse, sink and their gradients, which are float, and start and end. A
 * bfloat16 is the upper half of a float. */
enum { TXL_FLOAT32 = 0, TXL_BFLOAT16 = 1 };

/* left or right: no limit. */
#define TXL_ALL INT64_MAX

/* A tensor of up to four axes. stride is in elements, for each axis of its comment below, and at least 0; that of the
 * last axis is 1, where no comment says otherwise. data is NULL for a tensor that is not given. */
typedef struct txl_tensor {
  void* data;
  int64_t stride[4];
} txl_tensor;

/* One call. Sizes: B batch rows, H heads of queries, Hkv heads of keys and values (a divisor of H), L queries and keys
 * of the segment, M keys of the memory before them, D the width of queries and keys, Dv of values and out, Dp of
 * position queries and r, T rows of r and r_bias.
 *
 * q, k, v, and at least one of r and r_bias, are needed; k_mem and v_mem where M > 0. Without q_pos its value is q, Dp
 * is D, and position_scale is scale beside r. Biases that are not given are zeros. The last axes of r_bias and of sink
 * may have any stride.
 *
 * Settings: a query sees `left` keys before its own and `right` after it, or TXL_ALL (causal: right = 0). Row
 * zero_row + d of r and of r_bias holds distance d. scale multiplies the scores of contents, position_scale those of
 * positions. dropout_p is in [0, 1), and the dropout of a seed is that of Python. softcap is 0 for none. With
 * zero_outside = 1 a pair at a distance without a row has no terms of r and r_bias; with 0 it is an error.
 *
 * start and end limit the keys that a query sees to start <= key < end; keys count from the first of the memory. */
typedef struct txl_call {
  size_t struct_size; /* sizeof(txl_call) */
  int type;           /* TXL_FLOAT32 or TXL_BFLOAT16 */
  uint64_t seed;      /* of dropout */
  txl_tensor out;     /* [B, H, L, Dv]: written by forward, read by backward */
  float* lse;         /* [B, H, L] contiguous: written by forward unless NULL, read by backward */
  /* clang-format off */
  /* Written by tools/call_fields.py. */
  int64_t B, H, L, D, Hkv, Dv, M, Dp, T;
  int64_t left;
  int64_t right;
  int64_t zero_row;
  double scale;
  double dropout_p;
  double softcap;
  double position_scale;
  int zero_outside;
  txl_tensor q; /* [B, H, L, D] */
  txl_tensor k; /* [B, Hkv, L, D] */
  txl_tensor v; /* [B, Hkv, L, Dv] */
  txl_tensor r; /* [H, T, Dp] */
  txl_tensor content_bias; /* [H, D] */
  txl_tensor position_bias; /* [H, Dp] */
  txl_tensor k_mem; /* [B, Hkv, M, D] */
  txl_tensor v_mem; /* [B, Hkv, M, Dv] */
  txl_tensor r_bias; /* [H, T] */
  txl_tensor q_pos; /* [B, H, L, Dp] */
  txl_tensor sink; /* [B, H, L] */
  txl_tensor start; /* [B, L], int32_t */
  txl_tensor end; /* [B, L], int32_t */
  /* clang-format on */
} txl_call;

/* The gradients of out and lse, and those of the inputs, which backward writes. One whose data is NULL is not computed.
 * The last axis of each has stride 1, and no two elements of one share memory. */
typedef struct txl_gradients {
  size_t struct_size; /* sizeof(txl_gradients) */
  txl_tensor out;     /* [B, H, L, Dv] */
  const float* lse;   /* [B, H, L] contiguous, or NULL for zeros */
  /* clang-format off */
  /* Written by tools/call_fields.py. */
  txl_tensor q; /* [B, H, L, D] */
  txl_tensor k; /* [B, Hkv, L, D] */
  txl_tensor v; /* [B, Hkv, L, Dv] */
  txl_tensor r; /* [H, T, Dp] */
  txl_tensor content_bias; /* [H, D] */
  txl_tensor position_bias; /* [H, Dp] */
  txl_tensor k_mem; /* [B, Hkv, M, D] */
  txl_tensor v_mem; /* [B, Hkv, M, Dv] */
  txl_tensor r_bias; /* [H, T] */
  txl_tensor q_pos; /* [B, H, L, Dp] */
  txl_tensor sink; /* [B, H, L] */
  /* clang-format on */
} txl_gradients;

TXL_API int txl_forward(const txl_call* call);

/* Calls task(data, index) once for each index in [0, tasks), on any threads, and returns when all have returned. */
typedef void (*txl_parallel_for)(void* context, void (*task)(void* data, size_t index), void* data, size_t tasks);

/* As txl_forward, on the caller's threads instead of the library's: `parallel_for` is called with `context` and at most
 * txl_threads() tasks. What it leaves undone runs on this thread. The results are the same bits.
 *
 * parallel_for runs on this thread, which cannot be cancelled meanwhile. It may make calls: its txl_forward and
 * txl_backward run on the library's threads. Where it throws, the call returns an error code and out is incomplete; no
 * task may be running then, or run later. It must not end its thread (pthread_exit) or leave by longjmp. */
TXL_API int txl_forward_on(const txl_call* call, txl_parallel_for parallel_for, void* context);

/* Backward of the same call, with the out and lse that forward has written. */
TXL_API int txl_backward(const txl_call* call, const txl_gradients* gradients);

/* The name of the instruction set that calls use: the fastest that this processor has, or the one that the environment
 * variable TXL_KERNELS_ISA names. NULL if there is none of that name here. */
TXL_API const char* txl_instruction_set(void);

/* Sets the instruction set of later calls of all threads; NULL or "" for the fastest. */
TXL_API int txl_set_instruction_set(const char* name);

/* The number of threads of later calls, the caller's included; at first the number of processors. The library keeps
 * threads of its own. Results are the same bits with any number. */
TXL_API int txl_threads(void);
TXL_API int txl_set_threads(int threads);

/* The message of the last function of this thread that failed; "" if none has. It is valid until the next one fails. */
TXL_API const char* txl_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
