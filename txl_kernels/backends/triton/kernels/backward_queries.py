"""Backward, dq: a block of queries walks its keys as forward does. 5 products a tile, 6 with dr by atomics.

Scores come from lse. The tile's dS, joined with the one before, is skewed into distance coordinates: G[m, c] is the
gradient of the score at distance d0 + c, complete for these queries, so dq through positions is G @ r, one product.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.skew import skew
from txl_kernels.backends.triton.kernels.tiles import (
    dot,
    hull,
    interval,
    kept,
    load_rows,
    row_mask,
    row_offsets,
    rows_of,
    store_rows,
)


@triton.jit
def _through_positions(
    dq, G, qw, R, DR, row_last, r_row, h, d0, T, zero_row, dr_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq + G @ r for the block of distances at d0; with DR (float32 [T, D], this head's), adds G^T @ qw to it."""
    distance = d0 + tl.arange(0, BLOCK)
    used = None
    if row_last is not None:
        row = zero_row + distance
        used = tl.load(row_last + row, mask=(row >= 0) & (row < T), other=-1) >= 0
    r = load_rows(R, None, h, d0, r_row, -zero_row, T - zero_row, used, BLOCK, D, BLOCK_D, WIDE, TMA)
    dq = dot(G, r, dq, PRECISION)
    if DR is not None:
        dr = dot(tl.trans(G), qw, None, PRECISION) * dr_scale
        at = DR + tl.cast(zero_row + d0, tl.int64) * D + row_offsets(D, BLOCK, BLOCK_D, False)
        tl.atomic_add(at, dr, mask=row_mask(distance, -zero_row, T - zero_row, D, BLOCK_D), sem="relaxed")
    return dq


@triton.jit
def _walk(
    state, qu, qw, dout, lse2, delta, K, V, key_last, row_last, k_row, v_row, first_row, shift, origin, last_row,
    R, DR, r_row, T, zero_row, b, h, m0, M, low, high, first, last, all_from, all_to, scale_log2, dr_scale, seed, bh,
    drop_below, keep_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tiles of one source from first_row to last_row. shift, origin: as in forward."""
    dq, above, ds_before, d0 = state
    from_row = first - shift
    if TMA:
        from_row = origin
    for row0 in range(first_row, last_row, BLOCK):
        key0 = row0 + shift
        d0 = M + m0 - key0
        key = key0 + tl.arange(0, BLOCK)
        seen = None
        if key_last is not None:
            seen = tl.load(key_last + key, mask=(key >= first) & (key < last), other=-1) >= 0
        k = load_rows(K, b, h, row0, k_row, from_row, last - shift, seen, BLOCK, D, BLOCK_D, WIDE, TMA)
        r = load_rows(R, None, h, d0 - BLOCK, r_row, -zero_row, T - zero_row, None, BLOCK, D, BLOCK_D, WIDE, TMA)
        v = load_rows(V, b, h, row0, v_row, from_row, last - shift, None, BLOCK, D, BLOCK_D, WIDE, TMA)
        below = dot(qw, tl.trans(r), None, PRECISION)
        s = dot(qu, tl.trans(k), None, PRECISION)
        s += skew(above, below, BLOCK, BLOCK)
        above = below
        p = tl.math.exp2(s * scale_log2 - lse2[:, None])
        dp = dot(dout, tl.trans(v), None, PRECISION)
        if DROPOUT:
            dp = tl.where(kept(seed, bh, m0, key0, drop_below, BLOCK, BLOCK), dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if (key0 < all_from) | (key0 + BLOCK > all_to):
            ds = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), ds, 0.0)
        ds = ds.to(k.dtype)
        dq = dot(ds, k, dq, PRECISION)
        G = skew(ds, ds_before, BLOCK, BLOCK)
        dq = _through_positions(
            dq, G, qw, R, DR, row_last, r_row, h, d0, T, zero_row, dr_scale, BLOCK, D, BLOCK_D, WIDE, PRECISION, TMA
        )
        ds_before = ds
    return dq, above, ds_before, d0


@triton.jit(do_not_specialize=["H", "L", "M", "T", "zero_row", "back", "ahead", "drop_below"])
def backward_queries_kernel(
    QU, QW, K, V, K_MEM, V_MEM, R, START, END, KEY_LAST, ROW_LAST, SEED, DOUT, DELTA, LSE2, DQ, DQ_SUM, DR,
    k_batch, k_head, k_row, v_batch, v_head, v_row, km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row,
    start_batch, start_query, end_batch, end_query, do_batch, do_head, do_row, dq_batch, dq_head, dq_row,
    H, L, M, T, zero_row, back, ahead, scale, scale_log2, drop_below, keep_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Program (block of queries of one (b, h)). DQ_SUM: float32 [B * H, blocks, D], the block's sum of dq.

    DR: None, or float32 [H, T, D] of zeros, to which dr is added by atomics. With TMA, K, V, K_MEM, V_MEM and R are
    descriptors as in forward.
    """
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks  # longest first
    m0 = block * BLOCK
    bh = (pid // blocks).to(tl.int64)
    b = bh // H
    h = bh % H
    i = m0 + tl.arange(0, BLOCK)
    low, high, _ = interval(
        START, END, b, start_batch, start_query, end_batch, end_query, i, L, M, T, zero_row, back, ahead
    )
    first, last, all_from, all_to = hull(low, high, i, L, M)
    # Queries past the segment's end may meet anything, and their dS must not reach dr or DQ_SUM: mask every tile.
    all_to = tl.where(m0 + BLOCK > L, 0, all_to)
    key_last = None
    row_last = None
    if KEY_LAST is not None:
        key_last = KEY_LAST + b * (M + L)
        row_last = ROW_LAST + b * T

    qu = load_rows(QU + bh * L * D, b, h, m0, D, 0, L, None, BLOCK, D, BLOCK_D, WIDE, False)
    qw = load_rows(QW + bh * L * D, b, h, m0, D, 0, L, None, BLOCK, D, BLOCK_D, WIDE, False)
    dout = load_rows(DOUT + b * do_batch + h * do_head, b, h, m0, do_row, 0, L, None, BLOCK, D, BLOCK_D, WIDE, False)
    lse2 = tl.load(LSE2 + bh * L + i, mask=i < L, other=float("inf"))
    delta = tl.load(DELTA + bh * L + i, mask=i < L, other=0.0)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)

    mem_row = M - tl.cdiv(tl.maximum(M - first, 0), BLOCK) * BLOCK
    seg_row = tl.maximum(first - M, 0) // BLOCK * BLOCK
    R = rows_of(R, zero_row, h, r_row, r_head, TMA)
    dr = None
    if DR is not None:
        dr = DR + h * T * D
    d0 = M + m0 - tl.where(first < M, mem_row, M + seg_row)
    r = load_rows(R, None, h, d0, r_row, -zero_row, T - zero_row, None, BLOCK, D, BLOCK_D, WIDE, TMA)
    above = dot(qw, tl.trans(r), None, PRECISION)
    state = (tl.zeros((BLOCK, BLOCK_D), tl.float32), above, tl.zeros((BLOCK, BLOCK), qu.dtype), d0)
    dr_scale = tl.abs(scale)
    state = _walk(
        state, qu, qw, dout, lse2, delta,
        rows_of(K_MEM, b, h, km_batch, km_head, TMA), rows_of(V_MEM, b, h, vm_batch, vm_head, TMA),
        key_last, row_last, km_row, vm_row, mem_row, 0, tl.maximum(M - back, 0), tl.minimum(last, M),
        R, dr, r_row, T, zero_row, b, h, m0, M, low, high, first, tl.minimum(last, M), all_from, all_to, scale_log2,
        dr_scale, seed, bh, drop_below, keep_scale, BLOCK, D, BLOCK_D, DROPOUT, WIDE, PRECISION, TMA,
    )  # fmt: skip
    state = _walk(
        state, qu, qw, dout, lse2, delta, rows_of(K, b, h, k_batch, k_head, TMA), rows_of(V, b, h, v_batch, v_head, TMA),
        key_last, row_last, k_row, v_row, seg_row, M, 0, last - M,
        R, dr, r_row, T, zero_row, b, h, m0, M, low, high, tl.maximum(first, M), last, all_from, all_to, scale_log2,
        dr_scale, seed, bh, drop_below, keep_scale, BLOCK, D, BLOCK_D, DROPOUT, WIDE, PRECISION, TMA,
    )  # fmt: skip
    dq, above, ds, d0 = state
    # What the last tile leaves below d0: nothing when causal, the distances of later keys otherwise.
    G = skew(tl.zeros_like(ds), ds, BLOCK, BLOCK)
    dq = _through_positions(
        dq, G, qw, R, dr, row_last, r_row, h, d0 - BLOCK, T, zero_row, dr_scale, BLOCK, D, BLOCK_D, WIDE, PRECISION, TMA
    )
    dq *= scale
    store_rows(DQ + b * dq_batch + h * dq_head, m0, dq_row, 0, L, dq, BLOCK, D, BLOCK_D, WIDE)
    d = tl.arange(0, BLOCK_D)
    tl.store(DQ_SUM + (bh * blocks + block) * D + d, tl.sum(dq, 0), mask=d < D)
