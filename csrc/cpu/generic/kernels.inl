// The kernels, written once and compiled for each instruction set in a namespace of its own.
// TXL_ISA: the namespace. TXL_LANES: floats in a vector register. TXL_UNIT: the file of a unit that
// multiplies pairs of bfloat16; then only calls in bfloat16 are compiled.
namespace txl {
namespace TXL_ISA {
namespace {
#include "vector.inl"
#include "arena.inl"
#ifdef TXL_UNIT
#include TXL_UNIT
#include "pairs/product.inl"
#else
#include "float/product.inl"
#endif
#include "visible.inl"
#include "pack.inl"
#include "table.inl"
#include "scores.inl"
#include "philox.inl"
#include "decode.inl"
#include "forward.inl"
#include "backward_plan.inl"
#include "skew.inl"
#ifdef TXL_UNIT
#include "pairs/gradients.inl"
#else
#include "float/gradients.inl"
#endif
#include "backward.inl"
#include "backward_few.inl"
#include "backward_run.inl"
}  // namespace

void forward(const Problem& p) {
  if (p.B * p.H * p.L == 0) return;
#ifndef TXL_UNIT
  if (p.type == Type::f32) return run_forward<float>(p);
#endif
  run_forward<bf16>(p);
}

void backward(const Problem& p, const Gradients& g) {
#ifndef TXL_UNIT
  if (p.type == Type::f32) return run_backward<float>(p, g);
#endif
  run_backward<bf16>(p, g);
}

}  // namespace TXL_ISA
}  // namespace txl
