#include "prefill_launch.cuh"

namespace txl_cuda {

void forward_prefill_bf16(const Problem& p, void* stream) { forward_prefill_as<Bf16>(p, stream); }
void load_prefill_bf16(const Problem& p) { load_prefill_as<Bf16>(p); }

}  // namespace txl_cuda
