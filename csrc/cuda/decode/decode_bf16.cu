#include "decode_launch.cuh"

namespace txl_cuda {

void forward_decode_bf16(const DecodeProblem& p, void* stream) { forward_decode_as<Bf16>(p, stream); }
void load_decode_bf16(const DecodeProblem& p) { load_decode_as<Bf16>(p); }

}  // namespace txl_cuda
