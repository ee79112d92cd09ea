// Launches of the kernels, compiled by nvcc for GPUs, and by the tests as host C++ for their emulation.
#pragma once
#include <cstdint>

#include "decode/decode_problem.h"

namespace txl_cuda {

constexpr int MAX_DECODE_QUERIES = 16, MAX_TERM_QUERIES = 4, MAX_WIDTH = 256;  // the second: see `with_terms`
constexpr int64_t MAX_GRID = 65535;                                            // maximum of a grid's y and z

// Decode, of up to 16 queries. Splits the keys that some query may see into parts: sets p.first_key, p.parts,
// p.part_keys, p.heads and p.group_blocks, which depend on sizes, p.aligned, p.with_terms and the number of
// multiprocessors alone. Returns the number of floats that p.partial must hold. Throws std::invalid_argument for sizes
// that the kernels do not support.
int64_t split_decode(DecodeProblem& p, int multiprocessors);

// Enqueues a call, which split_decode has prepared and whose p.partial is set, on a stream of the current device.
// Throws std::runtime_error with CUDA's message.
void forward_decode(const DecodeProblem& p, void* stream);

// Loads the kernels of a call onto the current device. The first call would do so, but loading cannot be captured in a
// graph. Throws std::runtime_error with CUDA's message.
void load_decode(const DecodeProblem& p);

void forward_decode_f32(const DecodeProblem& p, void* stream);
void forward_decode_bf16(const DecodeProblem& p, void* stream);
void forward_decode_f16(const DecodeProblem& p, void* stream);
void load_decode_f32(const DecodeProblem& p);
void load_decode_bf16(const DecodeProblem& p);
void load_decode_f16(const DecodeProblem& p);

// Prefill (hopper/): the same functions for calls of any L on Hopper, in 16-bit types, with D up to 128 and rows at
// multiples of 16 bytes.
int64_t split_prefill(Problem& p, int multiprocessors);
void forward_prefill(const Problem& p, void* stream);
void load_prefill(const Problem& p);  // loads backward, too

// Rows of a table of dr before its row 0. A tile of distances begins up to QUERIES - 1 rows of a block before it, and
// TMA reductions, unlike loads, take no negative rows (an illegal instruction on an H200).
constexpr int64_t DR_MARGIN = 128;
// The maximum number of tables of dr that a block uses, one for each of its warpgroups. cuda.py allocates as many.
constexpr int64_t TABLES_OF_SLOT = 2;

// The other tensors of a backward call. Gradients without data are not written.
struct Gradients {
  txl::View dout, dq, dk, dv, dk_mem, dv_mem;
  const float* dlse = nullptr;    // [B, H, L] contiguous, or null
  txl::View dr_out, du, dw;       // gradients of r, content bias and position bias
  txl::View dq_pos, dsink;        // gradients of position queries and of the sink
  float* workspace = nullptr;     // workspace_of(..) floats, at a multiple of 16 bytes
  int64_t slots = 0, tables = 1;  // deterministic: slots * TABLES_OF_SLOT tables; slots 0: sums in any order
  int64_t parts = 1;              // the keys of a block of queries are split into, see split_backward
};

// The number of parts into which backward splits the keys, which depends on sizes and the number of multiprocessors
// alone.
int64_t split_backward(const Problem& p, int multiprocessors);

// The number of floats of a backward call's workspace. It reads only which gradients have data, slots and tables.
int64_t workspace_of(const Problem& p, const Gradients& gradients);

// Enqueues a backward call. p is that of forward_prefill, with forward's out and lse.
void backward(const Problem& p, const Gradients& gradients, void* stream);
void backward_bf16(const Problem& p, const Gradients& gradients, void* stream);
void backward_f16(const Problem& p, const Gradients& gradients, void* stream);

void forward_prefill_bf16(const Problem& p, void* stream);
void forward_prefill_f16(const Problem& p, void* stream);
void load_prefill_bf16(const Problem& p);
void load_prefill_f16(const Problem& p);
void load_backward_bf16(const Problem& p);
void load_backward_f16(const Problem& p);

// Makes a device current for the module's CUDA runtime, which need not be torch's; -1 leaves the current one. The
// destructor restores the previous device if it was another: setting a device creates its context.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;  // the device to return to; -1: none
};

// Why no GPU can be used, or an empty string.
const char* no_driver();

}  // namespace txl_cuda
