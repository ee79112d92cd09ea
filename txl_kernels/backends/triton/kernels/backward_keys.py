"""Backward kernels that walk queries: for dk and dv by blocks of keys, and for dr without atomics
by blocks of distances."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Bounds, Dropout, Layout, Place, Rows, Sizes
from txl_kernels.backends.triton.kernels.tiles import (
    add_unfused,
    bias_of_pairs_transposed,
    bias_table_of,
    capped,
    dot,
    in_table,
    keep_mask_transposed,
    key_place_of,
    load_distances,
    load_rows,
    load_table_bias,
    packed_rows,
    place_of,
    rows_of,
    sign_of,
    skew_transposed,
    store_rows,
    table_of,
    times,
    weights,
)
from txl_kernels.backends.triton.kernels.visible import interval, span

# dk and dv: a block of keys walks the queries that see it. A tile takes 6 products.
#
# Tiles are transposed, [keys, queries], as the products with p and dS need them. The gradient of u
# needs no product: it is the sum over keys of k times the sum of dS over queries. With `q_pos` it
# is the sum of dq. Where several heads of queries read one head of keys, a program sums over them.


@triton.jit
def query_place_of(key_place, member, group, H):
    """Return the `Place` of a query head that reads the keys at a place.

    group, member: the number of query heads that read them, and which of them is meant; group is
    None for 1.
    """
    bh, h = key_place.bh, key_place.h
    if group is not None:
        h = h * group + member
        bh = key_place.b * H + h
    return Place(bh, key_place.b, h)


@triton.jit
def _store_du(to, column, k, scale, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the share of du of a block of keys, [D]. column: float32 [BLOCK], sums of dS over
    queries."""
    du = tl.sum(column[:, None] * k.to(tl.float32), 0) * scale
    d = tl.arange(0, BLOCK_D)
    tl.store(to + d, du, mask=d < D)


@triton.jit
def _two_blocks(
    qw_rows, table, table_bias, position_factor, m0, d0, BLOCK: tl.constexpr, PRECISION: tl.constexpr, layout
):  # fmt: skip
    """Return the transposed positional scores of the queries from m0 on at the distances below d0
    and from d0 on, both float32 [BLOCK, BLOCK]. layout: of QW and r."""
    qw = load_rows(qw_rows, m0, None, BLOCK, layout)  # [BLOCK, BLOCK_DP]
    r = load_distances(table, d0 - BLOCK, None, 2 * BLOCK, layout)  # [2 * BLOCK, BLOCK_DP]
    # [distances, queries], the first at d0 - BLOCK
    both = times(dot(r, tl.trans(qw), None, PRECISION), position_factor)
    if table_bias is not None:
        both = add_unfused(both, load_table_bias(table_bias, d0 - BLOCK, 2 * BLOCK)[:, None])
    below, above = tl.split(tl.permute(tl.reshape(both, (2, BLOCK, BLOCK)), (1, 2, 0)))
    return below, above


@triton.jit(do_not_specialize=["H", "L", "M", "T", "zero_row", "left", "right", "group", "drop_below"])
def backward_keys_kernel(
    QU, QW, K, V, K_MEM, V_MEM, R, R_BIAS, START, END, KEY_FIRST, KEY_LAST, SEED, DOUT, DELTA, TOP, LSE2,
    DK, DV, DK_MEM, DV_MEM, DU,
    k_batch, k_head, k_row, v_batch, v_head, v_row, km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row,
    rb_head, rb_row, start_batch, start_query, end_batch, end_query, do_batch, do_head, do_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    dkm_batch, dkm_head, dkm_row, dvm_batch, dvm_head, dvm_row,
    H, L, M, T, zero_row, left, right, group, scale, scale_log2, position_factor, to_cap, drop_below, keep_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    D_P: tl.constexpr, BLOCK_DP: tl.constexpr, ZERO_OUTSIDE: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys. A program has a block of keys of one batch row and head
    of keys. group: see `key_place_of`.

    DU: float32 [B * H, blocks, D], the block's share of the gradient of u; None with `q_pos`. With
    TMA, QU, QW, DOUT and R are descriptors.
    """
    sizes = Sizes(H, L, M, T, zero_row, left, right)
    bounds = Bounds(START, start_batch, start_query, END, end_batch, end_query)
    layout: tl.constexpr = Layout(D, BLOCK_D, WIDE, TMA, UNIT)
    positions: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, TMA, UNIT)
    plain: tl.constexpr = Layout(D, BLOCK_D, WIDE, False, UNIT)
    values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, TMA, UNIT)
    plain_values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, False, UNIT)
    mem_blocks = tl.cdiv(M, BLOCK)
    blocks = mem_blocks + tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    block = pid % blocks
    key_heads = H
    if group is not None:
        key_heads = H // group
    key_place = place_of(pid // blocks, key_heads)
    key0 = M + (block - mem_blocks) * BLOCK  # negative if the memory's first block is not full
    key = key0 + tl.arange(0, BLOCK)

    # The range of queries that see a key of the block.
    seen = None
    if KEY_FIRST is not None:
        row = key_place.b * (M + L)
        from_query, to_query, seen = span(KEY_FIRST + row, KEY_LAST + row, key, M + L)
    else:
        from_query = tl.maximum(key0 - M - right, 0)
        to_query = tl.minimum(key0 + BLOCK - M + left, L)

    unseen = tl.maximum(M - left, 0)  # keys of the memory before every window; not read
    # The branches use different names for rows, because strides may have 64 bits in one and 32 in
    # the other.
    if key0 < M:
        km_rows = rows_of(K_MEM, (km_batch, km_head, km_row), key_place, unseen, M, plain)
        k = load_rows(km_rows, key0, seen, BLOCK, plain)  # [BLOCK, BLOCK_D]
        vm_rows = rows_of(V_MEM, (vm_batch, vm_head, vm_row), key_place, unseen, M, plain_values)
        v = load_rows(vm_rows, key0, seen, BLOCK, plain_values)  # [BLOCK, BLOCK_DV]
    else:
        k_rows = rows_of(K, (k_batch, k_head, k_row), key_place, 0, L, plain)
        k = load_rows(k_rows, key0 - M, seen, BLOCK, plain)
        v_rows = rows_of(V, (v_batch, v_head, v_row), key_place, 0, L, plain_values)
        v = load_rows(v_rows, key0 - M, seen, BLOCK, plain_values)
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_DV), tl.float32)
    column = tl.zeros((BLOCK,), tl.float32)  # sums of dS over queries
    heads = 1
    if group is not None:
        heads = group
    for member in range(heads):
        place = query_place_of(key_place, member, group, H)
        dropout = None
        if DROPOUT:
            dropout = Dropout(tl.load(SEED), place.bh, drop_below, keep_scale)
        table = None
        if R is not None:
            table = table_of(R, r_head, r_row, place.h, sizes, positions)
        table_bias = None
        if R_BIAS is not None:
            table_bias = bias_table_of(R_BIAS, rb_head, rb_row, place.h, sizes, sign_of(scale), position_factor)
        qu_rows = packed_rows(QU, place, L, layout)
        if R is not None:
            qw_rows = packed_rows(QW, place, L, positions)
        do_rows = rows_of(DOUT, (do_batch, do_head, do_row), place, 0, L, values)
        if group is not None:
            column = tl.zeros((BLOCK,), tl.float32)
        for m0 in range(from_query // BLOCK * BLOCK, to_query, BLOCK):
            i = m0 + tl.arange(0, BLOCK)
            d0 = M + m0 - key0
            if ZERO_OUTSIDE:
                qu = load_rows(qu_rows, m0, None, BLOCK, layout)  # [BLOCK, BLOCK_D]
                s = dot(k, tl.trans(qu), None, PRECISION)  # [keys, queries], as all that follow
                if in_table(table, table_bias, d0 - BLOCK, 2 * BLOCK):
                    if R is not None:
                        below, above = _two_blocks(
                            qw_rows, table, table_bias, position_factor, m0, d0, BLOCK, PRECISION, positions
                        )
                        s += skew_transposed(above, below, m0, BLOCK)
                    else:
                        s = add_unfused(s, bias_of_pairs_transposed(table_bias, d0, BLOCK))
            elif R is not None:
                below, above = _two_blocks(
                    qw_rows, table, table_bias, position_factor, m0, d0, BLOCK, PRECISION, positions
                )
                qu = load_rows(qu_rows, m0, None, BLOCK, layout)
                s = dot(k, tl.trans(qu), None, PRECISION)  # [keys, queries], as all that follow
                s += skew_transposed(above, below, m0, BLOCK)
            else:
                qu = load_rows(qu_rows, m0, None, BLOCK, layout)
                s = dot(k, tl.trans(qu), None, PRECISION)
                s = add_unfused(s, bias_of_pairs_transposed(table_bias, d0, BLOCK))
            if to_cap is not None:
                s = capped(s, to_cap)
            top = tl.load(TOP + place.bh * L + i, mask=i < L, other=0.0)
            lse2 = tl.load(LSE2 + place.bh * L + i, mask=i < L, other=float("inf"))
            delta = tl.load(DELTA + place.bh * L + i, mask=i < L, other=0.0)
            p = weights(s, scale_log2, top[None, :], lse2[None, :])
            # Whole: without bounds, every query sees every key, because the last query sees the
            # first key, and the first query sees the last key.
            whole = (key0 >= tl.maximum(M + m0 + BLOCK - 1 - left, 0)) & (
                key0 + BLOCK <= tl.minimum(M + m0 + right + 1, M + L)
            )
            whole = whole & (m0 + BLOCK <= L)
            if (KEY_FIRST is not None) or (not whole):
                low, high, _ = interval(bounds, place.b, i, sizes, True)
                sees = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
                p = tl.where(sees, p, 0.0)
                if to_cap is not None:  # the cap's slope may be NaN at hidden pairs
                    s = tl.where(sees, s, 0.0)
            dout = load_rows(do_rows, m0, None, BLOCK, values)  # [BLOCK, BLOCK_DV]
            dp = dot(v, tl.trans(dout), None, PRECISION)
            if DROPOUT:
                stays = keep_mask_transposed(dropout, m0, key0, BLOCK, BLOCK)
                dv = dot(tl.where(stays, p, 0.0).to(dout.dtype), dout, dv, PRECISION)
                dp = tl.where(stays, dp * keep_scale, 0.0)
            else:
                dv = dot(p.to(dout.dtype), dout, dv, PRECISION)
            ds = p * (dp - delta[None, :])
            if to_cap is not None:
                ds *= 1.0 - s * s
            column += tl.sum(ds, 1)
            dk = dot(ds.to(qu.dtype), qu, dk, PRECISION)
        if (DU is not None) and (group is not None):
            _store_du(DU + (place.bh * blocks + block) * D, column, k, scale, D, BLOCK_D)

    dk *= tl.abs(scale)
    dv *= keep_scale
    if key0 < M:
        dkm_rows = rows_of(DK_MEM, (dkm_batch, dkm_head, dkm_row), key_place, 0, M, plain)
        store_rows(dkm_rows, key0, dk, BLOCK, plain)
        dvm_rows = rows_of(DV_MEM, (dvm_batch, dvm_head, dvm_row), key_place, 0, M, plain_values)
        store_rows(dvm_rows, key0, dv, BLOCK, plain_values)
    else:
        dk_rows = rows_of(DK, (dk_batch, dk_head, dk_row), key_place, 0, L, plain)
        store_rows(dk_rows, key0 - M, dk, BLOCK, plain)
        dv_rows = rows_of(DV, (dv_batch, dv_head, dv_row), key_place, 0, L, plain_values)
        store_rows(dv_rows, key0 - M, dv, BLOCK, plain_values)
    if (DU is not None) and (group is None):
        _store_du(DU + (key_place.bh * blocks + block) * D, column, k, scale, D, BLOCK_D)


# dr and the gradient of `r_bias` without atomics: a block of distances walks the diagonals of every
# batch row.
#
# A tile takes 6 products. Tiles are [distances c, queries m]. The key of a pair is M + i - d, so
# content scores and dP are skewed from two blocks of keys, and the positional product needs no
# skew. Batch rows are distributed over `shares` programs, whose sums are added in a fixed order
# afterwards.


@triton.jit
def _load_keys(memory, segment, key0, M, BLOCK: tl.constexpr, layout):
    """Return keys or values [BLOCK, BLOCK_D] from key0 on. A block does not cross the memory's
    end."""
    inside = key0 < M
    at = tl.where(inside, memory.at, segment.at)
    row0 = tl.where(inside, key0, key0 - M)
    stride = tl.where(inside, memory.stride, segment.stride)
    first = tl.where(inside, memory.first, segment.first)
    last = tl.where(inside, memory.last, segment.last)
    rows = Rows(at, stride, first, last, segment.b, segment.h)
    return load_rows(rows, row0, None, BLOCK, layout)


@triton.jit(do_not_specialize=["B", "H", "L", "M", "T", "zero_row", "left", "right", "group", "drop_below"])
def backward_table_kernel(
    QU, QW, K, V, K_MEM, V_MEM, R, R_BIAS, START, END, ROW_FIRST, ROW_LAST, SEED, DOUT, DELTA, TOP, LSE2, DR, DB,
    k_batch, k_head, k_row, v_batch, v_head, v_row, km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row,
    rb_head, rb_row, start_batch, start_query, end_batch, end_query, do_batch, do_head, do_row,
    B, H, L, M, T, zero_row, left, right, group,
    scale, position_scale, scale_log2, position_factor, to_cap, drop_below, keep_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    D_P: tl.constexpr, BLOCK_DP: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute a share of dr and of the gradient of `r_bias`. A program has a block of distances of
    one head, and a share of the batch.

    DR: float32 [shares, H, T, D_P]; DB: float32 [shares, H, T]; None where R or R_BIAS is.
    position_scale: None where it is `scale`; group: see `key_place_of`. With TMA, QU, QW, DOUT and
    R are descriptors.
    """
    sizes = Sizes(H, L, M, T, zero_row, left, right)
    bounds = Bounds(START, start_batch, start_query, END, end_batch, end_query)
    layout: tl.constexpr = Layout(D, BLOCK_D, WIDE, TMA, UNIT)
    positions: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, TMA, UNIT)
    plain_positions: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, False, UNIT)
    plain: tl.constexpr = Layout(D, BLOCK_D, WIDE, False, UNIT)
    values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, TMA, UNIT)
    plain_values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, False, UNIT)
    low_blocks = tl.cdiv(zero_row, BLOCK)  # blocks of negative distances
    blocks = low_blocks + tl.cdiv(tl.maximum(T - zero_row, 0), BLOCK)
    pid = tl.program_id(0)
    d0 = (pid % blocks - low_blocks) * BLOCK
    h = (pid // blocks).to(tl.int64)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    row = zero_row + d0 + tl.arange(0, BLOCK)
    if R is not None:
        table = table_of(R, r_head, r_row, h, sizes, positions)
        r = load_distances(table, d0, None, BLOCK, positions)  # [BLOCK, BLOCK_DP]
    if R_BIAS is not None:
        table_bias = bias_table_of(R_BIAS, rb_head, rb_row, h, sizes, sign_of(scale), position_factor)
        row_bias = load_table_bias(table_bias, d0, BLOCK)
    db = tl.zeros((BLOCK,), tl.float32)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    unseen = tl.maximum(M - left, 0)  # keys of the memory before every window; not read
    dr = tl.zeros((BLOCK, BLOCK_DP), tl.float32)
    for b_index in range(share, B, shares):
        b = tl.cast(b_index, tl.int64)
        place = Place(b * H + h, b, h)
        key_place = key_place_of(place, group)
        dropout = Dropout(seed, place.bh, drop_below, keep_scale)
        # The range of queries that see a key at one of these distances.
        if ROW_FIRST is not None:
            from_query, to_query, _ = span(ROW_FIRST + b * T, ROW_LAST + b * T, row, T)
        else:
            from_query = tl.maximum(d0 - M, 0)
            to_query = tl.minimum(d0 + BLOCK - 1 + L, L)
            to_query = tl.where((d0 > left) | (d0 + BLOCK - 1 < -right), 0, to_query)
        keys = rows_of(K, (k_batch, k_head, k_row), key_place, 0, L, plain)
        value_rows = rows_of(V, (v_batch, v_head, v_row), key_place, 0, L, plain_values)
        mem_keys = rows_of(K_MEM, (km_batch, km_head, km_row), key_place, unseen, M, plain)
        mem_values = rows_of(V_MEM, (vm_batch, vm_head, vm_row), key_place, unseen, M, plain_values)
        qu_rows = packed_rows(QU, place, L, layout)
        if R is not None:
            qw_rows = packed_rows(QW, place, L, positions)
        do_rows = rows_of(DOUT, (do_batch, do_head, do_row), place, 0, L, values)
        for m0 in range(from_query // BLOCK * BLOCK, to_query, BLOCK):
            i = m0 + tl.arange(0, BLOCK)
            key0 = M + m0 - d0  # key of query m0 at distance d0; the others are up to BLOCK - 1 away
            qu = load_rows(qu_rows, m0, None, BLOCK, layout)  # [BLOCK, BLOCK_D], as is k
            k = _load_keys(mem_keys, keys, key0, M, BLOCK, plain)
            above = dot(k, tl.trans(qu), None, PRECISION)  # [keys, queries]
            k = _load_keys(mem_keys, keys, key0 - BLOCK, M, BLOCK, plain)
            below = dot(k, tl.trans(qu), None, PRECISION)
            if R is not None:
                qw = load_rows(qw_rows, m0, None, BLOCK, positions)  # [BLOCK, BLOCK_DP]
                s = times(dot(r, tl.trans(qw), None, PRECISION), position_factor)  # [distances, queries]
                s += skew_transposed(above, below, m0, BLOCK)
            else:
                s = skew_transposed(above, below, m0, BLOCK)
            if R_BIAS is not None:
                s = add_unfused(s, row_bias[:, None])
            if to_cap is not None:
                s = capped(s, to_cap)
            dout = load_rows(do_rows, m0, None, BLOCK, values)  # [BLOCK, BLOCK_DV], as is v
            v = _load_keys(mem_values, value_rows, key0, M, BLOCK, plain_values)
            above = dot(v, tl.trans(dout), None, PRECISION)  # [keys, queries]
            v = _load_keys(mem_values, value_rows, key0 - BLOCK, M, BLOCK, plain_values)
            below = dot(v, tl.trans(dout), None, PRECISION)
            if DROPOUT:  # before the skew, because eight queries of a key share random bits
                stays = keep_mask_transposed(dropout, m0, key0, BLOCK, BLOCK)
                above = tl.where(stays, above * keep_scale, 0.0)
                stays = keep_mask_transposed(dropout, m0, key0 - BLOCK, BLOCK, BLOCK)
                below = tl.where(stays, below * keep_scale, 0.0)
            dp = skew_transposed(above, below, m0, BLOCK)  # [distances, queries], as all that follow
            top = tl.load(TOP + place.bh * L + i, mask=i < L, other=0.0)
            lse2 = tl.load(LSE2 + place.bh * L + i, mask=i < L, other=float("inf"))
            delta = tl.load(DELTA + place.bh * L + i, mask=i < L, other=0.0)
            ds = weights(s, scale_log2, top[None, :], lse2[None, :]) * (dp - delta[None, :])
            if to_cap is not None:
                ds *= 1.0 - s * s
            low, high, _ = interval(bounds, b, i, sizes, True)
            key = key0 + tl.arange(0, BLOCK)[None, :] - tl.arange(0, BLOCK)[:, None]
            ds = tl.where((key >= low[None, :]) & (key < high[None, :]), ds, 0.0)
            if R is not None:
                dr = dot(ds.to(qw.dtype), qw, dr, PRECISION)
            if R_BIAS is not None:
                db += tl.sum(ds, 1)
    first = (share * tl.cast(tl.num_programs(0) // blocks, tl.int64) + h) * T  # row of DR
    table_scale = scale
    if position_scale is not None:
        table_scale = position_scale
    if R is not None:
        dr *= tl.abs(scale) if position_scale is None else position_scale
        store_rows(Rows(DR + first * D_P, D_P, 0, T, 0, h), zero_row + d0, dr, BLOCK, plain_positions)
    if R_BIAS is not None:
        tl.store(DB + first + row, db * table_scale, mask=(row >= 0) & (row < T))
