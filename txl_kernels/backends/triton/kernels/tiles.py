"""What all kernels share: loading rows, a query's interval of keys, matrix products, dropout bits."""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(2**31 - 1)  # in key_first and row_first: no query


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a @ b (+ acc), float32. PRECISION: of float32 operands, "ieee" or "tf32"."""
    if INTERPRETED:  # its product of bfloat16 takes the raw bits for integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def row_mask(row, first, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D]: rows first <= row < last and, where D is no power of two, columns below D."""
    mask = ((row >= first) & (row < last))[:, None]
    if D != BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < D)[None, :]
    return mask


@triton.jit
def row_offsets(stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """[ROWS, BLOCK_D] elements from a block's first row; 64 bits where 32 could overflow."""
    row = tl.arange(0, ROWS)
    if WIDE:
        row = row.to(tl.int64)
    return row[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(
    x, b, h, row0, stride, first, last, keep,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_D] of x from row0 on; zeros outside rows [first, last), columns [0, D), and where keep is False.

    x: pointer to row 0, keep bool [ROWS] or None; or, with TMA, a descriptor of [B, H, rows, D] that starts at row
    `first` and ends at `last` of (b, h), or of [H, rows, D] if b is None, and no keep.
    """
    if not TMA:
        mask = row_mask(row0 + tl.arange(0, ROWS), first, last, D, BLOCK_D)
        if keep is not None:
            mask = mask & keep[:, None]
        at = x + tl.cast(row0, tl.int64) * stride + row_offsets(stride, ROWS, BLOCK_D, WIDE)
        value = tl.load(at, mask=mask, other=0.0)
    elif b is None:
        value = tl.reshape(x.load([h.to(tl.int32), row0 - first, 0]), (ROWS, BLOCK_D))
    else:
        value = tl.reshape(x.load([b.to(tl.int32), h.to(tl.int32), row0 - first, 0]), (ROWS, BLOCK_D))
    return value


@triton.jit
def rows_of(x, b, h, batch_stride, head_stride, TMA: tl.constexpr):
    """What `load_rows` takes for (b, h), or (row, h) of r: the descriptor itself, or the pointer to row 0."""
    if not TMA:
        x += tl.cast(b, tl.int64) * batch_stride + h * head_stride
    return x


@triton.jit
def store_rows(
    x, row0, stride, first, last, value, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr
):
    """Writes value [ROWS, BLOCK_D], converted to x's dtype, into rows row0 .. of x that lie in [first, last)."""
    mask = row_mask(row0 + tl.arange(0, ROWS), first, last, D, BLOCK_D)
    at = x + tl.cast(row0, tl.int64) * stride + row_offsets(stride, ROWS, BLOCK_D, WIDE)
    tl.store(at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def interval(
    START, END, b, start_batch, start_query, end_batch, end_query, i, L, M, T, zero_row, back, ahead
):  # fmt: skip
    """Keys low <= j < high that queries i see, and whether the query is bad: a bound out of range, or no row in r.

    START, END: [B, L] bounds or None; b: the batch row, 64 bits. A query stands at key M + i and sees `back` keys before
    that and `ahead` keys from it on. Queries beyond L see nothing: low = high = 0, as for every query that sees nothing.
    """
    keys = M + L
    at = M + i
    low = tl.maximum(at - back, 0)
    high = tl.minimum(at + ahead, keys)
    bad = i < 0
    real = i < L
    if START is not None:
        start = tl.load(START + b * start_batch + i.to(tl.int64) * start_query, mask=real, other=0)
        low = tl.maximum(low, start)
        bad = bad | (start < 0) | (start > keys)
    if END is not None:
        end = tl.load(END + b * end_batch + i.to(tl.int64) * end_query, mask=real, other=0)
        high = tl.minimum(high, end)
        bad = bad | (end < 0) | (end > keys)
    seen = real & (low < high)
    low = tl.where(seen, low, 0)
    high = tl.where(seen, high, 0)
    if (START is not None) or (END is not None):
        bad = bad | (seen & ((at - high + 1 + zero_row < 0) | (at - low + zero_row >= T)))
    return low, high, bad


@triton.jit
def hull(low, high, i, L, M):
    """(first, last, all_from, all_to): keys [first, last) are those some query sees, [all_from, all_to) those all see."""
    keys = M + L
    seen = low < high
    first = tl.min(tl.where(seen, low, keys), 0)
    last = tl.max(high, 0)
    all_from = tl.max(low, 0)
    all_to = tl.min(tl.where(i < L, high, keys), 0)
    return first, last, all_from, all_to


@triton.jit
def _kept_words(seed, bh, group, key, drop_below):
    """Four bools for each (group of four queries, key): not dropped. drop_below: less 2**31, so that it is an int32."""
    zero = tl.zeros_like(group + key)
    w0, w1, w2, w3 = tl.philox(seed, zero + key, zero + group, zero + bh.to(tl.int32), zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return (words ^ 0x80000000).to(tl.int32, bitcast=True) >= drop_below


@triton.jit
def kept(seed, bh, m0, key0, drop_below, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN] bool: entries of the tile at query m0 (a multiple of 4) and key0 that dropout leaves. See `philox`."""
    group = (m0 // 4 + tl.arange(0, BM // 4))[:, None]
    words = _kept_words(seed, bh, group, (key0 + tl.arange(0, BN))[None, :], drop_below)
    return tl.reshape(tl.permute(tl.reshape(words, (BM // 4, BN, 4)), (0, 2, 1)), (BM, BN))


@triton.jit
def kept_transposed(seed, bh, m0, key0, drop_below, BM: tl.constexpr, BN: tl.constexpr):
    """The same as [BN, BM]."""
    group = (m0 // 4 + tl.arange(0, BM // 4))[None, :]
    words = _kept_words(seed, bh, group, (key0 + tl.arange(0, BN))[:, None], drop_below)
    return tl.reshape(words, (BN, BM))
