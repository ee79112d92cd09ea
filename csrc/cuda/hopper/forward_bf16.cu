#include "launch.cuh"

namespace txl_cuda {

void forward_long_bf16(const Problem& p, void* stream) { forward_long_as<Bf16>(p, stream); }
void load_forward_bf16(const Problem& p) { load_forward_as<Bf16>(p); }

}  // namespace txl_cuda
