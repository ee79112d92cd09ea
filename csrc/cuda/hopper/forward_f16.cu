#include "launch.cuh"

namespace txl_cuda {

void forward_long_f16(const Problem& p, void* stream) { forward_long_as<F16>(p, stream); }
void load_forward_f16(const Problem& p) { load_forward_as<F16>(p); }

}  // namespace txl_cuda
