"""Memory and segment as a block of queries walks their keys.

Tiles of the memory end where the memory ends and tiles of the segment start there, so that the walk
crosses from one to the other without a seam, for any M.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Source
from txl_kernels.backends.triton.kernels.rows import rows_of


@triton.jit
def memory_source(K, k_strides, V, v_strides, place, visible, sizes, BN: tl.constexpr, layout):
    """`Source` of the keys before M. Descriptors start at the first key that a window reaches."""
    start = sizes.M - tl.cdiv(tl.maximum(sizes.M - visible.first, 0), BN) * BN
    first = visible.first
    if layout.TMA:
        first = tl.maximum(sizes.M - sizes.back, 0)
    last = tl.minimum(visible.last, sizes.M)
    k = rows_of(K, k_strides, place, first, last, layout)
    v = rows_of(V, v_strides, place, first, last, layout)
    return Source(k, v, start, 0)


@triton.jit
def segment_source(K, k_strides, V, v_strides, place, visible, sizes, BN: tl.constexpr, layout):
    """`Source` of the keys from M on."""
    start = tl.maximum(visible.first - sizes.M, 0) // BN * BN
    first = tl.maximum(visible.first, sizes.M) - sizes.M
    if layout.TMA:
        first = 0
    last = visible.last - sizes.M
    k = rows_of(K, k_strides, place, first, last, layout)
    v = rows_of(V, v_strides, place, first, last, layout)
    return Source(k, v, start, sizes.M)
