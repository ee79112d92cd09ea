// The kernels, written once and compiled for each instruction set in a namespace of its own.
// TXL_ISA: the namespace. TXL_LANES: floats in a vector register.
namespace txl {
namespace TXL_ISA {
namespace {
#include "vector.inl"
#include "arena.inl"
#include "micro.inl"
#include "visible.inl"
#include "pack.inl"
#include "table.inl"
#include "scores.inl"
#include "philox.inl"
#include "decode.inl"
#include "forward.inl"
#include "backward.inl"
#include "backward_run.inl"
}  // namespace

void forward(const Problem& p) {
  if (p.B * p.H * p.L == 0) return;
  if (p.type == Type::bf16)
    run_forward<bf16>(p);
  else
    run_forward<float>(p);
}

void backward(const Problem& p, const Gradients& g) {
  if (p.type == Type::bf16)
    run_backward<bf16>(p, g);
  else
    run_backward<float>(p, g);
}

}  // namespace TXL_ISA
}  // namespace txl
