"""Matrix products of tiles."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.interpreter import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a @ b (+ acc), float32. PRECISION: of float32 operands, "ieee" or "tf32"."""
    if INTERPRETED:  # its product of bfloat16 takes the raw bits for integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
