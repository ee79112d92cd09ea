#include "decode_launch.cuh"

namespace txl_cuda {

void forward_decode_f32(const DecodeProblem& p, void* stream) { forward_decode_as<float>(p, stream); }
void load_decode_f32(const DecodeProblem& p) { load_decode_as<float>(p); }

}  // namespace txl_cuda
