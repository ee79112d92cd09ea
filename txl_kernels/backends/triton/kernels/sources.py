"""Memory and segment as a block of queries walks their keys.

Tiles of the memory end where the memory ends and tiles of the segment start there, so that the walk
crosses from one to the other without a seam, for any M.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Source
from txl_kernels.backends.triton.kernels.rows import rows_of


@triton.jit
def tile_starts(visible, sizes, BN: tl.constexpr):
    """Rows of the memory and of the segment at which the first tile with a visible key starts."""
    memory = sizes.M - tl.cdiv(tl.maximum(sizes.M - visible.first, 0), BN) * BN
    segment = tl.maximum(visible.first - sizes.M, 0) // BN * BN
    return memory, segment


@triton.jit
def memory_source(K, k_strides, V, v_strides, start, place, visible, sizes, k_layout, v_layout):
    """`Source` of the keys before M. Descriptors start at the first key that a window reaches."""
    last = tl.minimum(visible.last, sizes.M)
    reached = tl.maximum(sizes.M - sizes.back, 0)
    k = rows_of(K, k_strides, place, reached if k_layout.TMA else visible.first, last, k_layout)
    v = rows_of(V, v_strides, place, reached if v_layout.TMA else visible.first, last, v_layout)
    return Source(k, v, start, 0)


@triton.jit
def segment_source(K, k_strides, V, v_strides, start, place, visible, sizes, k_layout, v_layout):
    """`Source` of the keys from M on."""
    first = tl.maximum(visible.first, sizes.M) - sizes.M
    last = visible.last - sizes.M
    k = rows_of(K, k_strides, place, 0 if k_layout.TMA else first, last, k_layout)
    v = rows_of(V, v_strides, place, 0 if v_layout.TMA else first, last, v_layout)
    return Source(k, v, start, sizes.M)
