"""Softmax weights from what forward left."""

import triton
import triton.language as tl


@triton.jit
def weights(s, scale_log2, lse2):
    """exp2(s * scale_log2 - lse2), at most 1.

    s: scores, float32. Forward's tiles may have summed a score in another order: of huge ones the
    difference is no longer small, and exp2 of it has no bound. NaN stays.
    """
    return tl.math.exp2(tl.minimum(s * scale_log2 - lse2, 0.0, propagate_nan=tl.PropagateNan.ALL))
