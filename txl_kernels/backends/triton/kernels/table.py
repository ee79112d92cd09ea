"""r: its rows by distance, and the biases that go with products of queries."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Table
from txl_kernels.backends.triton.kernels.rows import load_by_pointers


@triton.jit
def table_of(R, r_head, r_row, h, sizes, layout):
    """`Table` of r [H, T, D] at a head."""
    if not layout.TMA:
        R += tl.cast(sizes.zero_row, tl.int64) * r_row + h * r_head
    return Table(R, r_row, -sizes.zero_row, sizes.T - sizes.zero_row, h)


@triton.jit
def load_distances(table, d0, keep, ROWS: tl.constexpr, layout):
    """[ROWS, BLOCK_D] of r from distance d0 on; zeros where r has none, and where keep is False.

    keep: bool [ROWS], or None.
    """
    if layout.TMA:
        tile = table.at.load([table.h.to(tl.int32), d0 - table.first, 0])
        value = tl.reshape(tile, (ROWS, layout.BLOCK_D))
        if keep is not None:
            value = tl.where(keep[:, None], value, 0.0)
    else:
        value = load_by_pointers(table, d0, keep, ROWS, layout)
    return value


@triton.jit
def load_bias(U, head_stride, h, layout):
    """[BLOCK_D] float32 of a bias [H, D]; zeros from column D on."""
    d = tl.arange(0, layout.BLOCK_D)
    return tl.load(U + h * head_stride + d, mask=d < layout.D, other=0.0).to(tl.float32)
