#include "launch.cuh"

void txl_cuda::forward_f16(const Problem& p, void* stream) { by_width<F16>(p, stream); }
