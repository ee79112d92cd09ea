#include "backward_launch.cuh"

namespace txl_cuda {

void backward_bf16(const Problem& p, const Gradients& gradients, void* stream) {
  backward_as<Bf16>(p, gradients, stream);
}
void load_backward_bf16(const Problem& p) { load_backward_as<Bf16>(p); }

}  // namespace txl_cuda
