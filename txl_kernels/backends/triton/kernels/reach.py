"""Before backward with bounds: which queries see each key and use each row of r.

It bounds the walks over queries, and keeps rows that nobody sees, which may hold anything, out of
the products.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Bounds, Sizes
from txl_kernels.backends.triton.kernels.visible import interval

NEVER = tl.constexpr(2**31 - 1)  # in KEY_FIRST and ROW_FIRST: no query


@triton.jit(do_not_specialize=["L", "M", "T", "zero_row", "back", "ahead"])
def reach_kernel(
    START, END, KEY_FIRST, KEY_LAST, ROW_FIRST, ROW_LAST,
    start_batch, start_query, end_batch, end_query, L, M, T, zero_row, back, ahead,
    CELLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (batch row, CELLS keys and CELLS rows of r): who sees the key, who uses the row.

    First and last query. KEY_FIRST, KEY_LAST: int32 [B, S]; ROW_FIRST, ROW_LAST: int32 [B, T].
    Nobody: NEVER and -1.
    """
    sizes = Sizes(1, L, M, T, zero_row, back, ahead)
    bounds = Bounds(START, start_batch, start_query, END, end_batch, end_query)
    blocks = tl.cdiv(tl.maximum(M + L, T), CELLS)
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    cell = pid % blocks * CELLS + tl.arange(0, CELLS)  # a key, and a row of r
    distance = cell - zero_row
    key_first = tl.full((CELLS,), NEVER, tl.int32)
    key_last = tl.full((CELLS,), -1, tl.int32)
    row_first = tl.full((CELLS,), NEVER, tl.int32)
    row_last = tl.full((CELLS,), -1, tl.int32)
    for i0 in range(0, L, CHUNK):
        i = i0 + tl.arange(0, CHUNK)
        low, high, _ = interval(bounds, b, i, sizes)
        sees = (cell[None, :] >= low[:, None]) & (cell[None, :] < high[:, None])  # [CHUNK, CELLS]
        key_first = tl.minimum(key_first, tl.min(tl.where(sees, i[:, None], NEVER), 0))
        key_last = tl.maximum(key_last, tl.max(tl.where(sees, i[:, None], -1), 0))
        key = M + i[:, None] - distance[None, :]
        uses = (key >= low[:, None]) & (key < high[:, None])  # [CHUNK, CELLS]
        row_first = tl.minimum(row_first, tl.min(tl.where(uses, i[:, None], NEVER), 0))
        row_last = tl.maximum(row_last, tl.max(tl.where(uses, i[:, None], -1), 0))
    tl.store(KEY_FIRST + b * (M + L) + cell, key_first, mask=cell < M + L)
    tl.store(KEY_LAST + b * (M + L) + cell, key_last, mask=cell < M + L)
    tl.store(ROW_FIRST + b * T + cell, row_first, mask=cell < T)
    tl.store(ROW_LAST + b * T + cell, row_last, mask=cell < T)


@triton.jit
def span(FIRST, LAST, cell, cells):
    """From and to which query some of these cells are in use, for `range`; and which are, bool.

    FIRST, LAST: pointers to one batch row's `cells` keys, or rows of r; cell: int32 [BLOCK], also
    out of their range.
    """
    inside = (cell >= 0) & (cell < cells)
    from_query = tl.min(tl.load(FIRST + cell, mask=inside, other=NEVER), 0)
    last_query = tl.load(LAST + cell, mask=inside, other=-1)
    return from_query, tl.max(last_query, 0) + 1, last_query >= 0
