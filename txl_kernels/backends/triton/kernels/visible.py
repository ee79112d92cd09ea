"""Which keys queries see: the interval of each, and what a block of queries has in common."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Visible


@triton.jit
def interval(bounds, b, i, sizes):
    """Keys low <= j < high that queries i see, and whether a query is bad; all [BM].

    Bad: a bound out of range, or no row in r. A query stands at key M + i and sees `back` keys
    before that and `ahead` keys from it on. Queries beyond L see nothing: low = high = 0, as for
    every query that sees nothing.
    """
    keys = sizes.M + sizes.L
    at = sizes.M + i
    low = tl.maximum(at - sizes.back, 0)
    high = tl.minimum(at + sizes.ahead, keys)
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
    if (bounds.start is not None) or (bounds.end is not None):
        nearest = at - high + 1 + sizes.zero_row
        farthest = at - low + sizes.zero_row
        bad = bad | (seen & ((nearest < 0) | (farthest >= sizes.T)))
    return low, high, bad


@triton.jit
def visible_to(bounds, b, i, sizes, PAST_END: tl.constexpr):
    """`Visible` of queries i [BM], and which of them are bad.

    PAST_END: whether queries past the segment's end count, which see nothing: then no tile is whole
    for their block.
    """
    low, high, bad = interval(bounds, b, i, sizes)
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
    """Whether some query does not see some key of the tile at key0."""
    return (key0 < visible.all_from) | (key0 + BN > visible.all_to)


@triton.jit
def sees(visible, key):
    """[BM, BN] bool: which query sees which key. key: int32 [BN]."""
    return (key[None, :] >= visible.low[:, None]) & (key[None, :] < visible.high[:, None])


@triton.jit
def _first_bits(n):
    """int64 with the lowest n bits set, 0 <= n <= 64."""
    one = tl.full(n.shape, 1, tl.int64)
    return tl.where(n < 64, (one << tl.minimum(n, 63).to(tl.int64)) - 1, -1)


@triton.jit
def seen_by_some(visible, key0, BN: tl.constexpr):
    """[BN] bool: which keys of the tile at key0 some query of the block sees.

    A query's keys are a run of bits, so that one number for each is combined and not BN. BN: at
    most 64.
    """
    tl.static_assert(BN <= 64)
    low = tl.minimum(tl.maximum(visible.low - key0, 0), BN)  # [BM]
    high = tl.minimum(tl.maximum(visible.high - key0, 0), BN)
    bits = tl.reduce_or(_first_bits(high) ^ _first_bits(low), 0)
    n = tl.arange(0, BN)
    word = tl.where(n < 32, bits.to(tl.int32), (bits >> 32).to(tl.int32))  # halves take fewer registers
    return ((word >> (n & 31)) & 1) != 0
