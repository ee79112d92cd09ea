#include "launch.cuh"

void txl_cuda::forward_f32(const Problem& p, void* stream) { by_width<float>(p, stream); }
