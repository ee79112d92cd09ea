"""Backward, dr without atomics: a block of distances walks the diagonals of every batch row. 6 products a tile.

Tiles are [distances c, queries m]; the key of a pair is M + i - d, so content scores and dP come skewed from two blocks
of keys, and the positional product is the plain one. Batch rows are dealt to `parts` programs whose sums are added up
in order afterwards.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.skew import skew_transposed
from txl_kernels.backends.triton.kernels.tiles import (
    NEVER,
    dot,
    interval,
    kept_transposed,
    load_rows,
    rows_of,
    store_rows,
)


@triton.jit
def _key_block(
    K, K_MEM, row, mem_row, b, h, key0, M, L, unseen,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of keys or values from key0 on, wherever they lie: a block never straddles the memory's end.

    unseen: keys of the memory before any window, which are not read.
    """
    inside = key0 < M
    return load_rows(
        tl.where(inside, K_MEM, K), b, h, tl.where(inside, key0, key0 - M), tl.where(inside, mem_row, row),
        tl.where(inside, unseen, 0),        tl.where(inside, M, L), None, BLOCK, D, BLOCK_D, WIDE, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "H", "L", "M", "T", "zero_row", "back", "ahead", "drop_below"])
def backward_table_kernel(
    QU, QW, K, V, K_MEM, V_MEM, R, START, END, ROW_FIRST, ROW_LAST, SEED, DOUT, DELTA, LSE2, DR,
    k_batch, k_head, k_row, v_batch, v_head, v_row, km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row,
    start_batch, start_query, end_batch, end_query, do_batch, do_head, do_row,
    B, H, L, M, T, zero_row, back, ahead, scale, scale_log2, drop_below, keep_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Program (block of distances of one head, part of the batch). DR: float32 [parts, H, T, D].

    With TMA, QU, QW, DOUT and R are descriptors.
    """
    low_blocks = tl.cdiv(zero_row, BLOCK)  # of negative distances
    blocks = low_blocks + tl.cdiv(tl.maximum(T - zero_row, 0), BLOCK)
    pid = tl.program_id(0)
    d0 = (pid % blocks - low_blocks) * BLOCK
    h = (pid // blocks).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    row = zero_row + d0 + tl.arange(0, BLOCK)
    R = rows_of(R, zero_row, h, r_row, r_head, TMA)
    r = load_rows(R, None, h, d0, r_row, -zero_row, T - zero_row, None, BLOCK, D, BLOCK_D, WIDE, TMA)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    unseen = tl.maximum(M - back, 0)
    dr = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for b_index in range(part, B, parts):
        b = tl.cast(b_index, tl.int64)
        bh = b * H + h
        # The queries that see some key at one of these distances.
        if ROW_FIRST is not None:
            inside = (row >= 0) & (row < T)
            from_query = tl.min(tl.load(ROW_FIRST + b * T + row, mask=inside, other=NEVER), 0)
            to_query = tl.max(tl.load(ROW_LAST + b * T + row, mask=inside, other=-1), 0) + 1
        else:
            from_query = tl.maximum(d0 - M, 0)
            to_query = tl.minimum(d0 + BLOCK - 1 + L, L)
            to_query = tl.where((d0 > back) | (d0 + BLOCK - 1 < 1 - ahead), 0, to_query)
        keys = K + b * k_batch + h * k_head
        values = V + b * v_batch + h * v_head
        mem_keys = K_MEM + b * km_batch + h * km_head
        mem_values = V_MEM + b * vm_batch + h * vm_head
        qus = rows_of(QU, bh, 0, tl.cast(L, tl.int64) * D, 0, TMA)
        qws = rows_of(QW, bh, 0, tl.cast(L, tl.int64) * D, 0, TMA)
        douts = rows_of(DOUT, b, h, do_batch, do_head, TMA)
        for m0 in range(from_query // BLOCK * BLOCK, to_query, BLOCK):
            i = m0 + tl.arange(0, BLOCK)
            key0 = M + m0 - d0  # key of query m0 at distance d0; the others are up to BLOCK - 1 before and after
            qu = load_rows(qus, b, h, m0, D, 0, L, None, BLOCK, D, BLOCK_D, WIDE, TMA)
            k = _key_block(keys, mem_keys, k_row, km_row, b, h, key0, M, L, unseen, BLOCK, D, BLOCK_D, WIDE)
            above = dot(k, tl.trans(qu), None, PRECISION)
            k = _key_block(keys, mem_keys, k_row, km_row, b, h, key0 - BLOCK, M, L, unseen, BLOCK, D, BLOCK_D, WIDE)
            below = dot(k, tl.trans(qu), None, PRECISION)
            qw = load_rows(qws, b, h, m0, D, 0, L, None, BLOCK, D, BLOCK_D, WIDE, TMA)
            s = dot(r, tl.trans(qw), None, PRECISION)
            s += skew_transposed(above, below, BLOCK)
            dout = load_rows(douts, b, h, m0, do_row, 0, L, None, BLOCK, D, BLOCK_D, WIDE, TMA)
            v = _key_block(values, mem_values, v_row, vm_row, b, h, key0, M, L, unseen, BLOCK, D, BLOCK_D, WIDE)
            above = dot(v, tl.trans(dout), None, PRECISION)
            v = _key_block(values, mem_values, v_row, vm_row, b, h, key0 - BLOCK, M, L, unseen, BLOCK, D, BLOCK_D, WIDE)
            below = dot(v, tl.trans(dout), None, PRECISION)
            if DROPOUT:  # in key coordinates, where four queries share their bits
                stays = kept_transposed(seed, bh, m0, key0, drop_below, BLOCK, BLOCK)
                above = tl.where(stays, above * keep_scale, 0.0)
                stays = kept_transposed(seed, bh, m0, key0 - BLOCK, drop_below, BLOCK, BLOCK)
                below = tl.where(stays, below * keep_scale, 0.0)
            dp = skew_transposed(above, below, BLOCK)
            lse2 = tl.load(LSE2 + bh * L + i, mask=i < L, other=float("inf"))
            delta = tl.load(DELTA + bh * L + i, mask=i < L, other=0.0)
            ds = tl.math.exp2(s * scale_log2 - lse2[None, :]) * (dp - delta[None, :])
            low, high, _ = interval(
                START, END, b, start_batch, start_query, end_batch, end_query, i, L, M, T, zero_row, back, ahead
            )
            key = key0 + tl.arange(0, BLOCK)[None, :] - tl.arange(0, BLOCK)[:, None]
            ds = tl.where((key >= low[None, :]) & (key < high[None, :]), ds, 0.0)
            dr = dot(ds.to(qw.dtype), qw, dr, PRECISION)
    dr *= tl.abs(scale)
    at = DR + (part * tl.cast(tl.num_programs(0) // blocks, tl.int64) + h) * T * D
    store_rows(at, zero_row + d0, D, 0, T, dr, BLOCK, D, BLOCK_D, WIDE)
