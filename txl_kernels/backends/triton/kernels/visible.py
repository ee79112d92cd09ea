"""Visible keys: the interval of each query, what the intervals of a block have in common, how a
block walks its keys, and which queries see a key."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Bounds, Sizes, Source, Visible
from txl_kernels.backends.triton.kernels.tiles import rows_of

NEVER = tl.constexpr(2**31 - 1)  # in KEY_FIRST and ROW_FIRST: no query


@triton.jit
def interval(bounds, b, i, sizes, ZERO_OUTSIDE: tl.constexpr):
    """Return (low, high, bad) of queries i, all [BM]: a query sees the keys low <= j < high.

    bad, bool: a bound is out of range, or without ZERO_OUTSIDE a visible distance has no row in r.
    A query stands at key M + i and sees at most `left` keys before it and `right` keys after it.
    Queries from L on see no key; low = high = 0 for every query that sees no key.
    """
    keys = sizes.M + sizes.L
    at = sizes.M + i
    low = tl.maximum(at - sizes.left, 0)
    high = tl.minimum(at + sizes.right + 1, keys)
    bad = i < 0
    real = i < sizes.L
    if bounds.start is not None:
        pointer = bounds.start + b * bounds.start_batch + i.to(tl.int64) * bounds.start_query
        start = tl.load(pointer, mask=real, other=0)
        low = tl.maximum(low, start)
        bad = bad | (start < 0) | (start > keys)
    if bounds.end is not None:
        pointer = bounds.end + b * bounds.end_batch + i.to(tl.int64) * bounds.end_query
        end = tl.load(pointer, mask=real, other=0)
        high = tl.minimum(high, end)
        bad = bad | (end < 0) | (end > keys)
    seen = real & (low < high)
    low = tl.where(seen, low, 0)
    high = tl.where(seen, high, 0)
    if ((bounds.start is not None) or (bounds.end is not None)) and not ZERO_OUTSIDE:
        nearest = at - high + 1 + sizes.zero_row
        farthest = at - low + sizes.zero_row
        bad = bad | (seen & ((nearest < 0) | (farthest >= sizes.T)))
    return low, high, bad


@triton.jit
def visible_to(bounds, b, i, sizes, PAST_END: tl.constexpr, ZERO_OUTSIDE: tl.constexpr):
    """Return the `Visible` of queries i [BM], and `bad` of `interval`.

    PAST_END: whether queries from L on count. They see no key, so no tile is whole for their block.
    """
    low, high, bad = interval(bounds, b, i, sizes, ZERO_OUTSIDE)
    keys = sizes.M + sizes.L
    seen = low < high
    first = tl.min(tl.where(seen, low, keys), 0)
    last = tl.max(high, 0)
    all_from = tl.max(low, 0)
    ends = high
    if not PAST_END:
        ends = tl.where(i < sizes.L, high, keys)
    return Visible(low, high, first, last, all_from, tl.min(ends, 0)), bad


@triton.jit
def partly(visible, key0, BN: tl.constexpr):
    """Return True if some query of the block does not see some key of the tile at key0."""
    return (key0 < visible.all_from) | (key0 + BN > visible.all_to)


@triton.jit
def sees(visible, key):
    """Return whether each query sees each key, bool [BM, BN]. key: int32 [BN]."""
    return (key[None, :] >= visible.low[:, None]) & (key[None, :] < visible.high[:, None])


@triton.jit
def _first_bits(n):
    """Return int64 with the lowest n bits set, 0 <= n <= 64."""
    one = tl.full(n.shape, 1, tl.int64)
    return tl.where(n < 64, (one << tl.minimum(n, 63).to(tl.int64)) - 1, -1)


@triton.jit
def seen_by_some(visible, key0, BN: tl.constexpr):
    """Return whether any query of the block sees each key of the tile at key0, bool [BN].

    A query's keys are consecutive bits of one word, so that the queries' words are combined instead
    of BN bools each. BN: at most 64.
    """
    tl.static_assert(BN <= 64)
    low = tl.minimum(tl.maximum(visible.low - key0, 0), BN)  # [BM]
    high = tl.minimum(tl.maximum(visible.high - key0, 0), BN)
    bits = tl.reduce_or(_first_bits(high) ^ _first_bits(low), 0)
    n = tl.arange(0, BN)
    word = tl.where(n < 32, bits.to(tl.int32), (bits >> 32).to(tl.int32))  # 32-bit halves take fewer registers
    return ((word >> (n & 31)) & 1) != 0


# The order in which a block of queries walks the keys of memory and segment.
#
# Tiles of the memory end where the memory ends, and tiles of the segment start there. So the walk
# has no partial tile between them, for any M.


@triton.jit
def tile_starts(visible, sizes, BN: tl.constexpr):
    """Return the rows of the memory and of the segment at which the first tile with a visible key
    starts."""
    memory = sizes.M - tl.cdiv(tl.maximum(sizes.M - visible.first, 0), BN) * BN
    segment = tl.maximum(visible.first - sizes.M, 0) // BN * BN
    return memory, segment


@triton.jit
def memory_source(K, k_strides, V, v_strides, start, place, visible, sizes, k_layout, v_layout):
    """Return the `Source` of the keys before M. Descriptors start at the first key that a window
    reaches."""
    last = tl.minimum(visible.last, sizes.M)
    reached = tl.maximum(sizes.M - sizes.left, 0)
    k = rows_of(K, k_strides, place, reached if k_layout.TMA else visible.first, last, k_layout)
    v = rows_of(V, v_strides, place, reached if v_layout.TMA else visible.first, last, v_layout)
    return Source(k, v, start, 0)


@triton.jit
def segment_source(K, k_strides, V, v_strides, start, place, visible, sizes, k_layout, v_layout):
    """Return the `Source` of the keys from M on."""
    first = tl.maximum(visible.first, sizes.M) - sizes.M
    last = visible.last - sizes.M
    k = rows_of(K, k_strides, place, 0 if k_layout.TMA else first, last, k_layout)
    v = rows_of(V, v_strides, place, 0 if v_layout.TMA else first, last, v_layout)
    return Source(k, v, start, sizes.M)


# Before backward with bounds: which queries see each key and use each row of r.
#
# This limits the loops over queries, and keeps rows that no query sees out of the products, because
# they may hold any values.


@triton.jit(do_not_specialize=["L", "M", "T", "zero_row", "left", "right"])
def reach_kernel(
    START, END, KEY_FIRST, KEY_LAST, ROW_FIRST, ROW_LAST,
    start_batch, start_query, end_batch, end_query, L, M, T, zero_row, left, right,
    CELLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute the first and last query that sees each key, and that uses each row of r. A program
    has a batch row, CELLS keys and CELLS rows of r.

    KEY_FIRST, KEY_LAST: int32 [B, S]; ROW_FIRST, ROW_LAST: int32 [B, T]. They are NEVER and -1 if
    there is no such query.
    """
    sizes = Sizes(1, L, M, T, zero_row, left, right)
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
        low, high, _ = interval(bounds, b, i, sizes, True)
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
    """Return the range of queries (from, to) that use any of these cells, for `range`; and whether
    each cell is in use, bool [BLOCK].

    FIRST, LAST: pointers to the `cells` keys, or rows of r, of one batch row. cell: int32 [BLOCK],
    which may be out of range.
    """
    inside = (cell >= 0) & (cell < cells)
    from_query = tl.min(tl.load(FIRST + cell, mask=inside, other=NEVER), 0)
    last_query = tl.load(LAST + cell, mask=inside, other=-1)
    return from_query, tl.max(last_query, 0) + 1, last_query >= 0
