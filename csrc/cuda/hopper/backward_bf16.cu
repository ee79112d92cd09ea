#include "backward_launch.cuh"

namespace txl_cuda {

void backward_long_bf16(const Problem& p, const Gradients& gradients, void* stream) {
  backward_long_as<Bf16>(p, gradients, stream);
}

}  // namespace txl_cuda
