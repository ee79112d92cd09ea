"""Backward, dk and dv: a block of keys, of memory or segment, walks the queries that see it. 6 products a tile.

Tiles are transposed, [keys, queries], so that the products with p and dS take them as they are. The bias u needs no
product: its gradient is the sum over keys of (the key's column sum of dS) times k.
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


@triton.jit(do_not_specialize=["H", "L", "M", "T", "zero_row", "back", "ahead", "drop_below"])
def backward_keys_kernel(
    QU, QW, K, V, K_MEM, V_MEM, R, START, END, KEY_FIRST, KEY_LAST, SEED, DOUT, DELTA, LSE2,
    DK, DV, DK_MEM, DV_MEM, DU,
    k_batch, k_head, k_row, v_batch, v_head, v_row, km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row,
    start_batch, start_query, end_batch, end_query, do_batch, do_head, do_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    dkm_batch, dkm_head, dkm_row, dvm_batch, dvm_head, dvm_row,
    H, L, M, T, zero_row, back, ahead, scale, scale_log2, drop_below, keep_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Program (block of keys of one (b, h)). DU: float32 [B * H, blocks, D], the block's share of the gradient of u.

    With TMA, QU, QW, DOUT and R are descriptors.
    """
    mem_blocks = tl.cdiv(M, BLOCK)
    blocks = mem_blocks + tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    block = pid % blocks
    bh = (pid // blocks).to(tl.int64)
    b = bh // H
    h = bh % H
    key0 = M + (block - mem_blocks) * BLOCK  # below 0 where the memory's first block is ragged
    key = key0 + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)

    # The queries that see some key of the block.
    seen = None
    if KEY_FIRST is not None:
        inside = (key >= 0) & (key < M + L)
        from_query = tl.min(tl.load(KEY_FIRST + b * (M + L) + key, mask=inside, other=NEVER), 0)
        last_query = tl.load(KEY_LAST + b * (M + L) + key, mask=inside, other=-1)
        to_query = tl.max(last_query, 0) + 1
        seen = last_query >= 0
    else:
        from_query = tl.maximum(key0 - M - ahead + 1, 0)
        to_query = tl.minimum(key0 + BLOCK - M + back, L)

    unseen = tl.maximum(M - back, 0)  # keys of the memory before any window: not read
    if key0 < M:
        k = load_rows(
            K_MEM + b * km_batch + h * km_head, b, h, key0, km_row, unseen, M, seen, BLOCK, D, BLOCK_D, WIDE, False
        )
        v = load_rows(
            V_MEM + b * vm_batch + h * vm_head, b, h, key0, vm_row, unseen, M, seen, BLOCK, D, BLOCK_D, WIDE, False
        )
    else:
        k = load_rows(K + b * k_batch + h * k_head, b, h, key0 - M, k_row, 0, L, seen, BLOCK, D, BLOCK_D, WIDE, False)
        v = load_rows(V + b * v_batch + h * v_head, b, h, key0 - M, v_row, 0, L, seen, BLOCK, D, BLOCK_D, WIDE, False)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    R = rows_of(R, zero_row, h, r_row, r_head, TMA)
    QU = rows_of(QU, bh, 0, tl.cast(L, tl.int64) * D, 0, TMA)
    QW = rows_of(QW, bh, 0, tl.cast(L, tl.int64) * D, 0, TMA)
    DOUT = rows_of(DOUT, b, h, do_batch, do_head, TMA)
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    column = tl.zeros((BLOCK,), tl.float32)
    for m0 in range(from_query // BLOCK * BLOCK, to_query, BLOCK):
        i = m0 + tl.arange(0, BLOCK)
        d0 = M + m0 - key0
        qw = load_rows(QW, b, h, m0, D, 0, L, None, BLOCK, D, BLOCK_D, WIDE, TMA)
        r_above = load_rows(R, None, h, d0, r_row, -zero_row, T - zero_row, None, BLOCK, D, BLOCK_D, WIDE, TMA)
        r_below = load_rows(R, None, h, d0 - BLOCK, r_row, -zero_row, T - zero_row, None, BLOCK, D, BLOCK_D, WIDE, TMA)
        above = dot(r_above, tl.trans(qw), None, PRECISION)
        below = dot(r_below, tl.trans(qw), None, PRECISION)
        qu = load_rows(QU, b, h, m0, D, 0, L, None, BLOCK, D, BLOCK_D, WIDE, TMA)
        s = dot(k, tl.trans(qu), None, PRECISION)
        s += skew_transposed(above, below, BLOCK)
        lse2 = tl.load(LSE2 + bh * L + i, mask=i < L, other=float("inf"))
        delta = tl.load(DELTA + bh * L + i, mask=i < L, other=0.0)
        p = tl.math.exp2(s * scale_log2 - lse2[None, :])
        # Without bounds the tile is whole if its last query sees the first key and its first query the last one.
        whole = (key0 >= tl.maximum(M + m0 + BLOCK - 1 - back, 0)) & (key0 + BLOCK <= tl.minimum(M + m0 + ahead, M + L))
        whole = whole & (m0 + BLOCK <= L)
        if (KEY_FIRST is not None) or (not whole):
            low, high, _ = interval(
                START, END, b, start_batch, start_query, end_batch, end_query, i, L, M, T, zero_row, back, ahead
            )
            p = tl.where((key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]), p, 0.0)
        dout = load_rows(DOUT, b, h, m0, do_row, 0, L, None, BLOCK, D, BLOCK_D, WIDE, TMA)
        dp = dot(v, tl.trans(dout), None, PRECISION)
        if DROPOUT:
            stays = kept_transposed(seed, bh, m0, key0, drop_below, BLOCK, BLOCK)
            dv = dot(tl.where(stays, p, 0.0).to(dout.dtype), dout, dv, PRECISION)
            dp = tl.where(stays, dp * keep_scale, 0.0)
        else:
            dv = dot(p.to(dout.dtype), dout, dv, PRECISION)
        ds = p * (dp - delta[None, :])
        column += tl.sum(ds, 1)
        dk = dot(ds.to(qu.dtype), qu, dk, PRECISION)

    dk *= tl.abs(scale)
    dv *= keep_scale
    if key0 < M:
        store_rows(DK_MEM + b * dkm_batch + h * dkm_head, key0, dkm_row, 0, M, dk, BLOCK, D, BLOCK_D, WIDE)
        store_rows(DV_MEM + b * dvm_batch + h * dvm_head, key0, dvm_row, 0, M, dv, BLOCK, D, BLOCK_D, WIDE)
    else:
        store_rows(DK + b * dk_batch + h * dk_head, key0 - M, dk_row, 0, L, dk, BLOCK, D, BLOCK_D, WIDE)
        store_rows(DV + b * dv_batch + h * dv_head, key0 - M, dv_row, 0, L, dv, BLOCK, D, BLOCK_D, WIDE)
    du = tl.sum(column[:, None] * k.to(tl.float32), 0) * scale
    tl.store(DU + (bh * blocks + block) * D + d, du, mask=d < D)
