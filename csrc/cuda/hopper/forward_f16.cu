#include "prefill_launch.cuh"

namespace txl_cuda {

void forward_prefill_f16(const Problem& p, void* stream) { forward_prefill_as<F16>(p, stream); }
void load_prefill_f16(const Problem& p) { load_prefill_as<F16>(p); }

}  // namespace txl_cuda
