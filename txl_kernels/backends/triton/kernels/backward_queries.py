"""Backward, dq: a block of queries walks its keys as forward does.

A tile takes 5 products, and 6 with dr by atomics. Weights are computed from scores and lse. dS of a
tile, joined with dS of the tile before, is unskewed into distance coordinates: G[m, c] is the
gradient of the score at distance d0 + c, complete for these queries. So dq through positions is one
product, G @ r.

After all other kernels of backward, `finish_kernel` adds their partial sums in a fixed order, which
gives the same bits at every run.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import (
    BiasTableGradient,
    Bounds,
    Dropout,
    Layout,
    Queries,
    Rows,
    Sizes,
    TableGradient,
    Upstream,
)
from txl_kernels.backends.triton.kernels.tiles import (
    add_rows,
    add_unfused,
    bias_of_pairs,
    bias_table_of,
    capped,
    dot,
    in_table,
    keep_mask,
    key_place_of,
    laid_out_as,
    load_distances,
    load_rows,
    load_table_bias,
    packed_rows,
    place_of,
    position_scores,
    rows_of,
    sign_of,
    skew,
    store_rows,
    table_of,
    times,
    weights,
)
from txl_kernels.backends.triton.kernels.visible import (
    memory_source,
    partly,
    sees,
    segment_source,
    tile_starts,
    visible_to,
)


@triton.jit
def _in_use(last, rows, row0, BLOCK: tl.constexpr):
    """Return whether any query uses each row from row0 on, bool [BLOCK]; None without bounds.

    last: pointer to KEY_LAST or ROW_LAST of `reach_kernel` at row 0.
    """
    used = None
    if last is not None:
        row = row0 + tl.arange(0, BLOCK)
        used = tl.load(last + row, mask=(row >= rows.first) & (row < rows.last), other=-1) >= 0
    return used


@triton.jit
def _unskew(ds, ds_before, s, varying, BLOCK: tl.constexpr):
    """Return G of this tile. All tensors are [BLOCK, BLOCK]; s: scores, for their register
    layout."""
    if ds.dtype.primitive_bitwidth == 16:
        # In 4 bytes, which have no bank conflicts, and in the register layout that the next product
        # needs.
        G = skew(ds.to(tl.float32), ds_before.to(tl.float32), varying, BLOCK, BLOCK)
        G = laid_out_as(G, s).to(ds.dtype)
    else:
        G = skew(ds, ds_before, varying, BLOCK, BLOCK)
    return G


@triton.jit
def _through_positions(
    dq, G, qw, table, row_last, gradient, table_bias_gradient, d0, BLOCK: tl.constexpr, PRECISION: tl.constexpr, layout
):  # fmt: skip
    """Return dq + G @ r for the block of distances at d0. Add G^T @ qw and the sums of G over
    queries to the tables' gradients, if given.

    dq: float32 [BLOCK, BLOCK_DP]. G: [BLOCK, BLOCK], in q's dtype. layout: of r.
    """
    if table is not None:
        r = load_distances(table, d0, _in_use(row_last, table, d0, BLOCK), BLOCK, layout)  # [BLOCK, BLOCK_DP]
        dq = dot(G, r, dq, PRECISION)
        if gradient is not None:
            dr = dot(tl.trans(G), qw, None, PRECISION) * gradient.scale  # [BLOCK, BLOCK_DP]
            add_rows(gradient.rows, d0 - table.first, dr, BLOCK, layout)
    if table_bias_gradient is not None:
        d = d0 + tl.arange(0, BLOCK)
        sums = tl.sum(G.to(tl.float32), 0) * table_bias_gradient.scale  # [BLOCK]
        inside = (d >= table_bias_gradient.first) & (d < table_bias_gradient.last)
        tl.atomic_add(table_bias_gradient.at + d, sums, mask=inside, sem="relaxed")
    return dq


@triton.jit
def _walk(
    state, source, key_last, table, row_last, gradient, table_bias, table_bias_gradient, queries, upstream, visible, dropout,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr, ZERO_OUTSIDE: tl.constexpr,
    key_layout, value_layout, r_layout,
):  # fmt: skip
    """Process all tiles of one source, and return the new state.

    state: dq [BLOCK, BLOCK_D]; with APART its part through positions, [BLOCK, BLOCK_DP]; the
    position scores of the block of distances above the next tile [BLOCK, BLOCK], float32; dS of the
    tile before [BLOCK, BLOCK], in q's dtype; and the distance d0 of that tile.
    """
    dq, dq_positions, above, ds_before, d0 = state
    for row0 in range(source.start, source.k.last, BLOCK):
        key0 = row0 + source.shift
        key = key0 + tl.arange(0, BLOCK)
        d0 = queries.at - key0
        seen = _in_use(key_last, source.k, row0, BLOCK)
        k = load_rows(source.k, row0, seen, BLOCK, key_layout)  # [BLOCK, BLOCK_D]
        if ZERO_OUTSIDE:
            v = load_rows(source.v, row0, None, BLOCK, value_layout)  # [BLOCK, BLOCK_DV]
            s = dot(queries.qu, tl.trans(k), None, PRECISION)  # [BLOCK, BLOCK], as all that follow
            if in_table(table, table_bias, d0 - BLOCK, 2 * BLOCK):  # see `forward`
                if table is not None:
                    below = position_scores(queries, table, table_bias, d0 - BLOCK, BLOCK, PRECISION, r_layout)
                    s += skew(above, below, key0, BLOCK, BLOCK)
                    above = below
                else:
                    s = add_unfused(s, bias_of_pairs(table_bias, d0, BLOCK, BLOCK))
        elif table is not None:
            r = load_distances(table, d0 - BLOCK, None, BLOCK, r_layout)  # [BLOCK, BLOCK_DP]
            v = load_rows(source.v, row0, None, BLOCK, value_layout)
            below = times(dot(queries.qw, tl.trans(r), None, PRECISION), queries.position_factor)
            if table_bias is not None:
                below = add_unfused(below, load_table_bias(table_bias, d0 - BLOCK, BLOCK)[None, :])
            s = dot(queries.qu, tl.trans(k), None, PRECISION)
            s += skew(above, below, key0, BLOCK, BLOCK)
            above = below
        else:
            v = load_rows(source.v, row0, None, BLOCK, value_layout)
            s = dot(queries.qu, tl.trans(k), None, PRECISION)
            s = add_unfused(s, bias_of_pairs(table_bias, d0, BLOCK, BLOCK))
        if queries.to_cap is not None:
            s = capped(s, queries.to_cap)
        p = weights(s, queries.scale_log2, upstream.top[:, None], upstream.lse2[:, None])
        dp = dot(upstream.dout, tl.trans(v), None, PRECISION)
        if dropout is not None:
            dp = tl.where(keep_mask(dropout, queries.m0, key0, BLOCK, BLOCK), dp * dropout.keep_scale, 0.0)
        ds = p * (dp - upstream.delta[:, None])
        if queries.to_cap is not None:
            ds *= 1.0 - s * s
        if partly(visible, key0, BLOCK):
            ds = tl.where(sees(visible, key), ds, 0.0)
        ds = ds.to(k.dtype)
        dq = dot(ds, k, dq, PRECISION)
        if (table is not None) or (table_bias_gradient is not None):  # noqa: SIM102  # the first is a constant
            if (not ZERO_OUTSIDE) or in_table(table, table_bias, d0, BLOCK):
                G = _unskew(ds, ds_before, s, key0, BLOCK)
                total = _through_positions(
                    dq_positions if APART else dq, G, queries.qw, table, row_last, gradient, table_bias_gradient, d0,
                    BLOCK, PRECISION, r_layout,
                )  # fmt: skip
                if APART:
                    dq_positions = total
                else:
                    dq = total
        ds_before = ds
    return dq, dq_positions, above, ds_before, d0


@triton.jit(do_not_specialize=["H", "L", "M", "T", "zero_row", "left", "right", "group", "drop_below"])
def backward_queries_kernel(
    QU, QW, K, V, K_MEM, V_MEM, R, R_BIAS, START, END, KEY_LAST, ROW_LAST, SEED, DOUT, DELTA, TOP, LSE2,
    DQ, DQ_SUM, DQ_POS, DQ_POS_SUM, DR, DB,
    k_batch, k_head, k_row, v_batch, v_head, v_row, km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row,
    rb_head, rb_row, start_batch, start_query, end_batch, end_query, do_batch, do_head, do_row, dq_batch, dq_head, dq_row,
    dqp_batch, dqp_head, dqp_row, H, L, M, T, zero_row, left, right, group,
    scale, position_scale, scale_log2, position_factor, to_cap, drop_below, keep_scale,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    D_P: tl.constexpr, BLOCK_DP: tl.constexpr, ZERO_OUTSIDE: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, UNIT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Compute dq, and with DQ_POS the gradient of `q_pos`, of a block of queries. A program has a
    block of queries of one (b, h).

    APART: whether the parts of dq through content and through positions have separate accumulators.
    They have on Blackwell, where Triton gave wrong values for two products chained through one
    accumulator (triton-lang/triton#10821).

    DQ_SUM, DQ_POS_SUM: float32 [B * H, blocks, D] and [B * H, blocks, D_P], the sums over the
    block. DR and DB: None, or float32 [H, T, D_P] and [H, T] of zeros, to which dr and the gradient
    of `r_bias` are added by atomics. position_scale: None where it is `scale`.
    With TMA, V, V_MEM and R are descriptors, and so are K and K_MEM without bounds; see
    `forward_kernel`.
    """
    sizes = Sizes(H, L, M, T, zero_row, left, right)
    bounds = Bounds(START, start_batch, start_query, END, end_batch, end_query)
    r_layout: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, TMA, UNIT)
    positions: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, False, UNIT)
    plain: tl.constexpr = Layout(D, BLOCK_D, WIDE, False, UNIT)
    keys: tl.constexpr = Layout(D, BLOCK_D, WIDE, TMA and KEY_LAST is None, UNIT)
    values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, TMA, UNIT)
    plain_values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, False, UNIT)
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks  # blocks with the most keys first
    m0 = block * BLOCK
    place = place_of(pid // blocks, H)
    i = m0 + tl.arange(0, BLOCK)
    # Queries past the segment's end hold any values: their dS must not reach dr or DQ_SUM.
    key_place = key_place_of(place, group)
    visible, _ = visible_to(bounds, place.b, i, sizes, True, True)
    key_last = None  # KEY_LAST of the memory; the segment's begins at key M
    segment_last = None
    row_last = None
    if KEY_LAST is not None:
        key_last = KEY_LAST + place.b * (M + L)
        segment_last = key_last + M
        row_last = ROW_LAST + place.b * T + zero_row

    qu = load_rows(packed_rows(QU, place, L, plain), m0, None, BLOCK, plain)  # [BLOCK, BLOCK_D]
    qw = qu
    if R is not None:
        qw = load_rows(packed_rows(QW, place, L, positions), m0, None, BLOCK, positions)  # [BLOCK, BLOCK_DP]
    queries = Queries(qu, qw, m0, M + m0, scale_log2, to_cap, position_factor)
    do_rows = rows_of(DOUT, (do_batch, do_head, do_row), place, 0, L, plain_values)
    dout = load_rows(do_rows, m0, None, BLOCK, plain_values)
    at = place.bh * L + i
    top = tl.load(TOP + at, mask=i < L, other=0.0)
    lse2 = tl.load(LSE2 + at, mask=i < L, other=float("inf"))
    delta = tl.load(DELTA + at, mask=i < L, other=0.0)
    dropout = None
    if DROPOUT:
        dropout = Dropout(tl.load(SEED), place.bh, drop_below, keep_scale)

    mem_start, seg_start = tile_starts(visible, sizes, BLOCK)
    table = None
    if R is not None:
        table = table_of(R, r_head, r_row, place.h, sizes, r_layout)
    table_bias = None
    if R_BIAS is not None:
        table_bias = bias_table_of(R_BIAS, rb_head, rb_row, place.h, sizes, sign_of(scale), position_factor)
    table_scale = scale  # of the tables' gradients
    if position_scale is not None:
        table_scale = position_scale
    table_bias_gradient = None
    if DB is not None:
        table_bias_gradient = BiasTableGradient(DB + place.h * T + zero_row, -zero_row, T - zero_row, table_scale)
    gradient = None
    if DR is not None:
        dr_rows = Rows(DR + place.h * T * D_P, D_P, 0, T, place.b, place.h)
        gradient = TableGradient(dr_rows, tl.abs(scale) if DQ_POS is None else table_scale)
    d0 = queries.at - tl.where(visible.first < M, mem_start, M + seg_start)
    above = tl.zeros((1, 1), tl.float32)  # not used without a table
    if R is not None:
        if ZERO_OUTSIDE:
            above = tl.zeros((BLOCK, BLOCK), tl.float32)
            if in_table(table, table_bias, d0, BLOCK):
                above = position_scores(queries, table, table_bias, d0, BLOCK, PRECISION, r_layout)
        else:
            above = position_scores(queries, table, table_bias, d0, BLOCK, PRECISION, r_layout)
    k_strides, v_strides = (km_batch, km_head, km_row), (vm_batch, vm_head, vm_row)
    memory = memory_source(K_MEM, k_strides, V_MEM, v_strides, mem_start, key_place, visible, sizes, keys, values)
    k_strides, v_strides = (k_batch, k_head, k_row), (v_batch, v_head, v_row)
    segment = segment_source(K, k_strides, V, v_strides, seg_start, key_place, visible, sizes, keys, values)
    upstream = Upstream(dout, top, lse2, delta)
    zeros = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dq_positions = tl.zeros((1, 1), tl.float32)  # not used
    apart: tl.constexpr = APART or DQ_POS is not None
    if DQ_POS is not None:
        dq_positions = tl.zeros((BLOCK, BLOCK_DP), tl.float32)
    elif APART:
        dq_positions = zeros
    state = (zeros, dq_positions, above, tl.zeros((BLOCK, BLOCK), qu.dtype), d0)
    state = _walk(
        state, memory, key_last, table, row_last, gradient, table_bias, table_bias_gradient, queries, upstream, visible,
        dropout, BLOCK, PRECISION, apart, ZERO_OUTSIDE, keys, values, r_layout,
    )  # fmt: skip
    state = _walk(
        state, segment, segment_last, table, row_last, gradient, table_bias, table_bias_gradient, queries, upstream, visible,
        dropout, BLOCK, PRECISION, apart, ZERO_OUTSIDE, keys, values, r_layout,
    )  # fmt: skip
    dq, dq_positions, _, ds, d0 = state
    if DQ_POS is None:
        if APART:
            dq += dq_positions
        total = dq
    else:
        total = dq_positions
    if (R is not None) or (DB is not None):  # noqa: SIM102
        # dS of the last tile at distances below d0: none if causal, else the distances of later
        # keys.
        if (not ZERO_OUTSIDE) or in_table(table, table_bias, d0 - BLOCK, BLOCK):
            G = skew(tl.zeros((BLOCK, BLOCK), tl.float32), ds.to(tl.float32), d0, BLOCK, BLOCK).to(ds.dtype)
            total = _through_positions(
                total, G, qw, table, row_last, gradient, table_bias_gradient, d0 - BLOCK, BLOCK, PRECISION, r_layout
            )
    if DQ_POS is None:
        dq = total
    else:
        total *= table_scale
        store_rows(rows_of(DQ_POS, (dqp_batch, dqp_head, dqp_row), place, 0, L, positions), m0, total, BLOCK, positions)
        e = tl.arange(0, BLOCK_DP)
        tl.store(DQ_POS_SUM + (place.bh * blocks + block) * D_P + e, tl.sum(total, 0), mask=e < D_P)
    dq *= scale
    store_rows(rows_of(DQ, (dq_batch, dq_head, dq_row), place, 0, L, plain), m0, dq, BLOCK, plain)
    d = tl.arange(0, BLOCK_D)
    tl.store(DQ_SUM + (place.bh * blocks + block) * D + d, tl.sum(dq, 0), mask=d < D)


@triton.jit
def _sum_of_head(PARTS, h, B, H, blocks, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the sum over b and blocks of PARTS, float32 [B, H, blocks, D], for a head: float32
    [BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for part in range(0, B * blocks, BLOCK):
        n = (part + tl.arange(0, BLOCK)).to(tl.int64)  # b * blocks + block
        at = (n // blocks * H + h) * blocks + n % blocks
        acc += tl.load(
            PARTS + at[:, None] * D + d[None, :], mask=(n < B * blocks)[:, None] & (d < D)[None, :], other=0.0
        )
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["B", "H", "T", "rows", "first_row", "query_blocks", "key_blocks", "shares"])
def finish_kernel(
    DQ_SUM, DQ_POS_SUM, DU_SUM, DR_SUM, DB_SUM, DU, DW, DR, DB, du_head, dw_head, dr_head, dr_row, db_head,
    B, H, T, rows, first_row, query_blocks, key_blocks, shares,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, D_P: tl.constexpr, BLOCK_DP: tl.constexpr,
):  # fmt: skip
    """Compute du [H, D] and dw [H, D_P] (program: a head), then dr and db (program: a block of rows
    of a head).

    DQ_SUM: float32 [B, H, query_blocks, D], sums of dq; DU_SUM: float32 [B, H, key_blocks, D],
    shares of du; dw is the sum of the first less du. With `q_pos`, DU_SUM is None, du is the sum of
    DQ_SUM, and dw that of DQ_POS_SUM, float32 [B, H, query_blocks, D_P]. DR_SUM: float32 [shares,
    H, T, D_P], the rows of dr from first_row on; other rows are 0. DR: [H, rows, D_P]. Without a
    table DR is None and dw is 0. DB_SUM, float32 [shares, H, T], and DB [H, rows]: the same for
    `r_bias`, or None.
    """
    pid = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    if pid < H:
        h = pid.to(tl.int64)
        if DQ_POS_SUM is not None:
            du = _sum_of_head(DQ_SUM, h, B, H, query_blocks, BLOCK, D, BLOCK_D)
            dw = _sum_of_head(DQ_POS_SUM, h, B, H, query_blocks, BLOCK, D_P, BLOCK_DP)
        else:
            du = _sum_of_head(DU_SUM, h, B, H, key_blocks, BLOCK, D, BLOCK_D)
            dw = tl.zeros_like(du)
            if DR is not None:
                dw = _sum_of_head(DQ_SUM, h, B, H, query_blocks, BLOCK, D, BLOCK_D) - du
        tl.store(DU + h * du_head + d, du.to(DU.dtype.element_ty), mask=d < D)
        e = tl.arange(0, BLOCK_DP)
        tl.store(DW + h * dw_head + e, dw.to(DW.dtype.element_ty), mask=e < D_P)
    else:
        h = ((pid - H) % H).to(tl.int64)
        row = (pid - H) // H * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        t = row - first_row
        if DR is not None:
            e = tl.arange(0, BLOCK_DP)
            used = ((t >= 0) & (t < T))[:, None] & (e < D_P)[None, :]
            dr = tl.zeros((BLOCK, BLOCK_DP), tl.float32)
            for share in range(shares):
                at = (share * H + h) * T + t  # [BLOCK]
                dr += tl.load(DR_SUM + at[:, None] * D_P + e[None, :], mask=used, other=0.0)
            pointers = DR + h * dr_head + row[:, None] * dr_row + e[None, :]
            tl.store(pointers, dr.to(DR.dtype.element_ty), mask=(row < rows)[:, None] & (e < D_P)[None, :])
        if DB is not None:
            db = tl.zeros((BLOCK,), tl.float32)
            for share in range(shares):
                db += tl.load(DB_SUM + (share * H + h) * T + t, mask=(t >= 0) & (t < T), other=0.0)
            tl.store(DB + h * db_head + row, db.to(DB.dtype.element_ty), mask=row < rows)
