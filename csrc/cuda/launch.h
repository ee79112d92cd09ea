// Starts the kernels. Compiled by nvcc for GPUs, and by the tests as host C++ for their emulation.
#pragma once
#include <cstdint>

#include "decode/decode_problem.h"

namespace txl_cuda {

constexpr int MAX_DECODE_QUERIES = 16, MAX_WIDTH = 256;
constexpr int64_t MAX_GRID = 65535;  // of the later axes of a grid

// Decode, up to 16 queries. Splits the keys that some query may see, by sizes, p.aligned and the number of
// multiprocessors alone: sets p.first_key, p.parts and p.part_keys. Returns the floats that p.partial must hold. Throws
// std::invalid_argument if the sizes are beyond what the kernels take.
int64_t split_decode(DecodeProblem& p, int multiprocessors);

// Enqueues the call on a stream of the current device; the keys are split and p.partial is set.
// Throws std::runtime_error with CUDA's reason.
void forward_decode(const DecodeProblem& p, void* stream);

// Loads the kernels of such a call onto the current device, which would otherwise happen at the
// first call, not to be captured in a graph. Throws std::runtime_error with CUDA's reason.
void load_decode(const DecodeProblem& p);

void forward_decode_f32(const DecodeProblem& p, void* stream);
void forward_decode_bf16(const DecodeProblem& p, void* stream);
void forward_decode_f16(const DecodeProblem& p, void* stream);
void load_decode_f32(const DecodeProblem& p);
void load_decode_bf16(const DecodeProblem& p);
void load_decode_f16(const DecodeProblem& p);

// Prefill, the same for calls of any L on Hopper, in 16-bit types, D up to 128, rows at multiples of 16 bytes;
// hopper/.
int64_t split_prefill(Problem& p, int multiprocessors);
void forward_prefill(const Problem& p, void* stream);
void load_prefill(const Problem& p);  // backward, too

// Rows of a table of dr before its row 0. A block of distances begins up to 127 rows before it, and TMA reductions,
// unlike loads, take no negative rows (an illegal instruction on an H200).
constexpr int64_t DR_MARGIN = 128;

// Where a backward call's other tensors lie. Gradients without data are not written.
struct Gradients {
  txl::View dout, dq, dk, dv, dk_mem, dv_mem;
  const float* dlse = nullptr;    // [B, H, L] contiguous, or null
  txl::View dr_out, du, dw;       // of r, and of what is added to queries for content and for position
  float* dr = nullptr;            // zeros: [tables, H, DR_MARGIN + T, D]; or null, as dr_out is then
  float* workspace = nullptr;     // of workspace_of(..) floats; at a multiple of 16 bytes
  int64_t slots = 0, tables = 1;  // for the same bits at every run: slots * 2 tables; slots 0 for any order
  int64_t parts = 1;              // of the keys of a block of queries, see split_backward
};

// How many parts that is, by sizes and the number of multiprocessors alone.
int64_t split_backward(const Problem& p, int multiprocessors);

// Floats of a backward call's workspace; of the gradients only whether they have data matters.
int64_t workspace_of(const Problem& p, const Gradients& gradients);

// Enqueues it: p as for forward_prefill, with out and lse of forward.
void backward(const Problem& p, const Gradients& gradients, void* stream);
void backward_bf16(const Problem& p, const Gradients& gradients, void* stream);
void backward_f16(const Problem& p, const Gradients& gradients, void* stream);

void forward_prefill_bf16(const Problem& p, void* stream);
void forward_prefill_f16(const Problem& p, void* stream);
void load_prefill_bf16(const Problem& p);
void load_prefill_f16(const Problem& p);
void load_backward_bf16(const Problem& p);
void load_backward_f16(const Problem& p);

// Makes a device current for the module's runtime, which may be another than torch's and then knows
// nothing of its choice; -1: leaves it. Ends with the one before where that was another: setting a device
// creates its context.
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
