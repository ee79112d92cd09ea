#include "launch.cuh"

namespace txl_cuda {

void forward_bf16(const Problem& p, void* stream) { forward_by_shape<Bf16>(p, stream); }
void load_bf16(const Problem& p) { load_by_shape<Bf16>(p); }

}  // namespace txl_cuda
