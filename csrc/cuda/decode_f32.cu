#include "launch.cuh"

namespace txl_cuda {

void forward_f32(const Problem& p, void* stream) { forward_by_shape<float>(p, stream); }
void load_f32(const Problem& p) { load_by_shape<float>(p); }

}  // namespace txl_cuda
