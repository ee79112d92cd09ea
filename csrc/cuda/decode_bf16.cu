#include "launch.cuh"

void txl_cuda::forward_bf16(const Problem& p, void* stream) { by_width<Bf16>(p, stream); }
