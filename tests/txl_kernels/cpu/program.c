/* A user's program in C: reads calls from stdin, runs forward and backward, and writes codes, messages and results to
 * stdout. test_c_library.py writes the calls, and names the fields of the structs by the macros SIZES, INTEGERS, REALS,
 * TENSORS and BOUNDS. Forward runs on the library's threads, or by the function below that the argument names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "txl_attention.h"

static void read_exactly(void* to, size_t bytes) {
  if (fread(to, 1, bytes, stdin) != bytes) exit(3);
}

static int64_t read_integer(void) {
  int64_t x;
  read_exactly(&x, sizeof x);
  return x;
}

static double read_real(void) {
  double x;
  read_exactly(&x, sizeof x);
  return x;
}

/* Bytes of memory, or -1 for none; bytes before them; strides; the memory's contents. */
static int64_t read_tensor(txl_tensor* x) {
  const int64_t bytes = read_integer(), offset = read_integer();
  char* memory;
  read_exactly(x->stride, sizeof x->stride);
  x->data = NULL;
  if (bytes < 0) return 0;
  memory = malloc((size_t)(bytes + offset + 1));
  if (!memory) exit(4);
  x->data = memory + offset;
  read_exactly(x->data, (size_t)bytes);
  return bytes;
}

static void write_tensor(txl_tensor* x, int64_t bytes) { fwrite(x->data, 1, (size_t)bytes, stdout); }

static void write_outcome(int code) {
  const char* const message = code ? txl_last_error() : "";
  const int64_t head[2] = {code, (int64_t)strlen(message)};
  fwrite(head, sizeof head[0], 2, stdout);
  fwrite(message, 1, strlen(message), stdout);
}

static txl_parallel_for on_callers_threads;
static int64_t tasks_run;

static void reversed(void* context, void (*task)(void* data, size_t index), void* data, size_t tasks) {
  if (tasks < 2 || tasks > 3) exit(10); /* txl_threads() is 3 */
  for (; tasks; ++*(int64_t*)context) task(data, --tasks);
}

static void failed(void* context, void (*task)(void* data, size_t index), void* data, size_t tasks) {
  if (tasks > 2) task(data, 1);
  ++*(int64_t*)context;
}

static void one_call(int64_t struct_size) {
  txl_call call;
  txl_gradients gradients;
  txl_tensor lse, dlse;
  int64_t sizes[64], out_bytes, lse_bytes;
  int n = 0, code, backward;

  memset(&call, 0, sizeof call);
  memset(&gradients, 0, sizeof gradients);
  call.struct_size = struct_size < 0 ? sizeof call : (size_t)struct_size;
  call.type = (int)read_integer();
  call.seed = (uint64_t)read_integer();
#define READ_INTEGER(name) call.name = read_integer();
  SIZES(READ_INTEGER)
  INTEGERS(READ_INTEGER)
#define READ_REAL(name) call.name = read_real();
  REALS(READ_REAL)
  call.zero_outside = (int)read_integer();
#define READ_TENSOR(name) read_tensor(&call.name);
  TENSORS(READ_TENSOR)
  BOUNDS(READ_TENSOR)
  out_bytes = read_tensor(&call.out);
  lse_bytes = read_tensor(&lse);
  call.lse = lse.data;
  code = on_callers_threads ? txl_forward_on(&call, on_callers_threads, &tasks_run) : txl_forward(&call);
  write_outcome(code);
  backward = (int)read_integer();
  if (!code) write_tensor(&call.out, out_bytes);
  if (!code) write_tensor(&lse, lse_bytes);
  if (!backward) return;

  struct_size = read_integer();
  gradients.struct_size = struct_size < 0 ? sizeof gradients : (size_t)struct_size;
  read_tensor(&gradients.out);
  read_tensor(&dlse);
  gradients.lse = dlse.data;
#define READ_GRADIENT(name) sizes[n++] = read_tensor(&gradients.name);
  TENSORS(READ_GRADIENT)
  code = txl_backward(&call, &gradients);
  write_outcome(code);
  n = 0;
#define WRITE_GRADIENT(name)                                          \
  if (!code && sizes[n] > 0) write_tensor(&gradients.name, sizes[n]); \
  ++n;
  TENSORS(WRITE_GRADIENT)
}

int main(int count, char** arguments) {
  int64_t struct_size;
  const char* const isa = txl_instruction_set();
  if (txl_set_threads(0) != TXL_INVALID_ARGUMENT || !strstr(txl_last_error(), "threads")) return 5;
  if (txl_set_instruction_set("mmx") != TXL_FAILED) return 6;
  fprintf(stderr, "%s\n", txl_last_error());
  fprintf(stderr, "%s, %d threads\n", isa ? isa : "none", txl_threads());
  if (!isa) return 7;
  if (txl_set_threads(3) || txl_threads() != 3) return 8;
  if (txl_forward(NULL) != TXL_INVALID_ARGUMENT || txl_backward(NULL, NULL) != TXL_INVALID_ARGUMENT) return 9;
  if (txl_forward_on(NULL, reversed, NULL) != TXL_INVALID_ARGUMENT) return 11;
  if (txl_forward_on(NULL, NULL, NULL) != TXL_INVALID_ARGUMENT || !strstr(txl_last_error(), "parallel_for")) return 12;
  if (count > 1) on_callers_threads = strcmp(arguments[1], "reversed") ? failed : reversed;
  while (fread(&struct_size, sizeof struct_size, 1, stdin) == 1) one_call(struct_size); /* memory is freed at the end */
  return count > 1 && !tasks_run ? 13 : 0;
}
