#include "launch.cuh"

namespace txl_cuda {

void forward_f16(const Problem& p, void* stream) { forward_by_shape<F16>(p, stream); }
void load_f16(const Problem& p) { load_by_shape<F16>(p); }

}  // namespace txl_cuda
