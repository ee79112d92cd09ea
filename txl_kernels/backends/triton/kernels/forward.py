"""Forward: a block of queries walks the keys that it sees, with an online softmax.

The position scores of a tile need two blocks of distances. The block below one tile is the block
above the next, so it is kept, also from the memory to the segment (see `visible`).
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Bounds, Dropout, Layout, Queries, Sizes
from txl_kernels.backends.triton.kernels.tiles import (
    LN2,
    add_unfused,
    bias_of_pairs,
    bias_table_of,
    capped,
    dot,
    in_table,
    keep_mask,
    key_place_of,
    load_bias,
    load_rows,
    place_of,
    position_scores,
    rows_of,
    sink_exponent,
    skew,
    store_rows,
    table_of,
)
from txl_kernels.backends.triton.kernels.visible import (
    memory_source,
    partly,
    seen_by_some,
    sees,
    segment_source,
    tile_starts,
    visible_to,
)


@triton.jit
def _walk(
    state, source, from_tile, to_tile, table, table_bias, queries, visible, dropout,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, GAPS: tl.constexpr, ZERO_OUTSIDE: tl.constexpr,
    layout, value_layout, r_layout,
):  # fmt: skip
    """Process the tiles from_tile .. to_tile - 1 of one source, and return the new state.

    state: the sum of weights times values [BM, BLOCK_DV], the largest score and the sum of weights
    [BM], and the position scores of the block of distances above the next tile [BM, BN] (not used
    without a table); all float32. GAPS: whether there may be keys between visible ones that no
    query of the block sees.
    """
    acc, top, total, above = state
    for tile in range(from_tile, to_tile):
        row0 = source.start + tile * BN
        key0 = row0 + source.shift
        key = key0 + tl.arange(0, BN)
        k = load_rows(source.k, row0, None, BN, layout)  # [BN, BLOCK_D]
        if ZERO_OUTSIDE:
            d0 = queries.at - key0
            s = dot(queries.qu, tl.trans(k), None, PRECISION)  # [BM, BN]
            # Distances fall from tile to tile, so the tiles with rows are consecutive, and `above`
            # is 0 before the first of them.
            if in_table(table, table_bias, d0 - BN, 2 * BN):
                if table is not None:
                    below = position_scores(queries, table, table_bias, d0 - BN, BN, PRECISION, r_layout)
                    s += skew(above, below, key0, BM, BN)
                    above = below
                else:
                    s = add_unfused(s, bias_of_pairs(table_bias, d0, BM, BN))
        elif table is not None:
            below = position_scores(queries, table, table_bias, queries.at - key0 - BN, BN, PRECISION, r_layout)
            s = dot(queries.qu, tl.trans(k), None, PRECISION)  # [BM, BN]
            s += skew(above, below, key0, BM, BN)
            above = below
        else:
            s = dot(queries.qu, tl.trans(k), None, PRECISION)  # [BM, BN]
            s = add_unfused(s, bias_of_pairs(table_bias, queries.at - key0, BM, BN))
        if queries.to_cap is not None:
            s = capped(s, queries.to_cap)
        if partly(visible, key0, BN):
            s = tl.where(sees(visible, key), s, float("-inf"))
        # Differences are scaled, not scores: the rounding error of a large score times the scale
        # would be large.
        raised = tl.maximum(top, tl.max(s, 1))  # [BM]
        base = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.math.exp2((s - base[:, None]) * queries.scale_log2)  # [BM, BN]
        rescale = tl.math.exp2((top - base) * queries.scale_log2)
        total = total * rescale + tl.sum(p, 1)
        top = raised
        if dropout is not None:
            p = tl.where(keep_mask(dropout, queries.m0, key0, BM, BN), p, 0.0)
        keep = None
        if GAPS:  # values that no query sees may hold NaN
            keep = seen_by_some(visible, key0, BN)
        v = load_rows(source.v, row0, keep, BN, value_layout)  # [BN, BLOCK_DV]
        acc = dot(p.to(v.dtype), v, acc * rescale[:, None], PRECISION)
    return acc, top, total, above


# Sizes change from call to call; if they were specialized, each would compile a kernel.
@triton.jit(do_not_specialize=["H", "L", "M", "T", "zero_row", "left", "right", "group", "drop_below"])
def forward_kernel(
    Q, Q_POS, K, V, K_MEM, V_MEM, R, R_BIAS, U, W, SINK, START, END, SEED, OUT, LSE,
    q_batch, q_head, q_row, qp_batch, qp_head, qp_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row, rb_head, rb_row, u_head, w_head,
    sink_batch, sink_head, sink_query, start_batch, start_query, end_batch, end_query, out_batch, out_head, out_row,
    H, L, M, T, zero_row, left, right, group, sign, scale_log2, position_factor, to_cap, drop_below, keep_scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr, D_P: tl.constexpr, BLOCK_DP: tl.constexpr, ZERO_OUTSIDE: tl.constexpr,
    DROPOUT: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Compute out and lse. A program has a block of BM queries of one (b, h), and a part of its
    keys.

    R or R_BIAS may be None. Q_POS: [B, H, L, D_P], the queries of R; None for Q. SINK: float32 [B,
    H, L], or None. group: see `key_place_of`. ZERO_OUTSIDE: whether pairs at distances without a
    row have no positional score, instead of a result of NaN.

    With SPLIT, OUT is float32 [parts, B * H, L, D_V], and LSE has the largest scores and the sums
    of weights, [2, parts, B * H, L], for `merge_kernel`, which takes the sinks, too. Without SPLIT
    there is one part. With TMA, K, K_MEM and R are descriptors. V and V_MEM are, too, except with
    bounds, which hide rows that must not be read. The memory's descriptors start at the first key
    that a query can see.
    """
    sizes = Sizes(H, L, M, T, zero_row, left, right)
    bounds = Bounds(START, start_batch, start_query, END, end_batch, end_query)
    layout: tl.constexpr = Layout(D, BLOCK_D, WIDE, TMA, UNIT)
    plain: tl.constexpr = Layout(D, BLOCK_D, WIDE, False, UNIT)
    r_layout: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, TMA, UNIT)
    position_layout: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, False, UNIT)
    out_layout: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, False, UNIT)
    blocks = tl.cdiv(L, BM)
    pid = tl.program_id(0)
    m0 = (blocks - 1 - pid % blocks) * BM  # blocks with the most keys first
    place = place_of(pid // blocks, H)
    i = m0 + tl.arange(0, BM)
    key_place = key_place_of(place, group)
    visible, bad = visible_to(bounds, place.b, i, sizes, False, ZERO_OUTSIDE)

    mem_start, seg_start = tile_starts(visible, sizes, BN)
    mem_tiles = tl.cdiv(tl.maximum(tl.minimum(M, visible.last) - mem_start, 0), BN)
    tiles = mem_tiles + tl.cdiv(tl.maximum(visible.last - M - seg_start, 0), BN)
    from_tile = 0
    to_tile = tiles
    if SPLIT:
        each = tl.cdiv(tiles, tl.num_programs(1))
        from_tile = tl.minimum(tl.program_id(1) * each, tiles)
        to_tile = tl.minimum(from_tile + each, tiles)

    q_rows = rows_of(Q, (q_batch, q_head, q_row), place, 0, L, plain)
    q = load_rows(q_rows, m0, visible.low < visible.high, BM, plain)  # [BM, BLOCK_D]
    if R is not None:
        u, w = load_bias(U, u_head, place.h, layout), load_bias(W, w_head, place.h, r_layout)
        qu = ((q.to(tl.float32) + u[None, :]) * sign).to(q.dtype)
        if Q_POS is not None:  # `position_factor` has the sign
            qp_rows = rows_of(Q_POS, (qp_batch, qp_head, qp_row), place, 0, L, position_layout)
            q_pos = load_rows(qp_rows, m0, visible.low < visible.high, BM, position_layout)  # [BM, BLOCK_DP]
            qw = (q_pos.to(tl.float32) + w[None, :]).to(q.dtype)
        else:
            qw = ((q.to(tl.float32) + w[None, :]) * sign).to(q.dtype)
    else:
        u = load_bias(U, u_head, place.h, layout)
        qu = ((q.to(tl.float32) + u[None, :]) * sign).to(q.dtype)
        qw = qu
    queries = Queries(qu, qw, m0, M + m0, scale_log2, to_cap, position_factor)
    gaps: tl.constexpr = (START is not None) or (END is not None)
    values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, TMA and not gaps, UNIT)
    dropout = None
    if DROPOUT:
        dropout = Dropout(tl.load(SEED), place.bh, drop_below, keep_scale)

    table_bias = None
    if R_BIAS is not None:
        table_bias = bias_table_of(R_BIAS, rb_head, rb_row, place.h, sizes, sign, position_factor)
    table = None
    above = tl.zeros((1, 1), tl.float32)
    if R is not None:
        table = table_of(R, r_head, r_row, place.h, sizes, r_layout)
        seg_key = M + seg_start + (from_tile - mem_tiles) * BN
        key0 = tl.where(from_tile < mem_tiles, mem_start + from_tile * BN, seg_key)
        d0 = queries.at - key0
        if ZERO_OUTSIDE:
            above = tl.zeros((BM, BN), tl.float32)
            if in_table(table, table_bias, d0, BN):
                above = position_scores(queries, table, table_bias, d0, BN, PRECISION, r_layout)
        else:
            above = position_scores(queries, table, table_bias, d0, BN, PRECISION, r_layout)
    state = (
        tl.zeros((BM, BLOCK_DV), tl.float32),
        tl.full((BM,), float("-inf"), tl.float32),
        tl.where(bad, float("nan"), 0.0),
        above,
    )
    k_strides, v_strides = (km_batch, km_head, km_row), (vm_batch, vm_head, vm_row)
    memory = memory_source(K_MEM, k_strides, V_MEM, v_strides, mem_start, key_place, visible, sizes, layout, values)
    mem_end = tl.minimum(to_tile, mem_tiles)
    state = _walk(
        state, memory, from_tile, mem_end, table, table_bias, queries, visible, dropout,
        BM, BN, PRECISION, gaps, ZERO_OUTSIDE, layout, values, r_layout,
    )  # fmt: skip
    k_strides, v_strides = (k_batch, k_head, k_row), (v_batch, v_head, v_row)
    segment = segment_source(K, k_strides, V, v_strides, seg_start, key_place, visible, sizes, layout, values)
    from_tile = tl.maximum(from_tile - mem_tiles, 0)
    to_tile -= mem_tiles
    state = _walk(
        state, segment, from_tile, to_tile, table, table_bias, queries, visible, dropout,
        BM, BN, PRECISION, gaps, ZERO_OUTSIDE, layout, values, r_layout,
    )  # fmt: skip
    acc, top, total, _ = state

    nothing = total == 0.0  # no key is visible, in this part if there are several
    shared = tl.where(nothing, 1.0, total)
    if SINK is not None:
        sinks = SINK + place.b * sink_batch + place.h * sink_head + i.to(tl.int64) * sink_query
        sink = tl.load(sinks, mask=i < L, other=float("-inf"))
        shared += tl.math.exp2(sink_exponent(sink, tl.where(nothing, 0.0, top), scale_log2))
    out = tl.where(nothing[:, None], 0.0, acc * (keep_scale / shared)[:, None])
    at = place.bh
    if SPLIT:
        rows = (tl.num_programs(0) // blocks).to(tl.int64)  # B * H
        at += tl.program_id(1) * rows
        OUT += at * L * D_V
        out_batch, out_head = 0, 0
        tl.store(LSE + at * L + i, top, mask=i < L)
        tl.store(LSE + (tl.num_programs(1) * rows + at) * L + i, total, mask=i < L)
    else:
        log = tl.math.log2(tl.where(nothing, 1.0, total)) * LN2
        lse = tl.where(nothing, float("-inf"), top * (scale_log2 * LN2) + log)
        tl.store(LSE + at * L + i, tl.where(bad, float("nan"), lse), mask=i < L)
    store_rows(rows_of(OUT, (out_batch, out_head, out_row), place, 0, L, out_layout), m0, out, BM, out_layout)


@triton.jit(do_not_specialize=["H", "L", "parts"])
def merge_kernel(
    PARTS, PART_SUMS, SINK, OUT, LSE, sink_batch, sink_head, sink_query, out_batch, out_head, out_row,
    H, L, parts, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a query's keys by their sums, in a fixed order. A program has a query of
    one (b, h).

    PARTS: float32 [parts, B * H, L, D]; PART_SUMS: float32 [2, parts, B * H, L]; SINK: float32 [B,
    H, L], or None; see `forward_kernel`.
    """
    at = tl.program_id(0).to(tl.int64)  # bh * L + i
    rows = tl.num_programs(0).to(tl.int64)  # B * H * L
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, CHUNK)
    top = float("-inf")
    for part in range(0, parts, CHUNK):
        tops = tl.load(PART_SUMS + (part + n) * rows + at, mask=part + n < parts, other=float("-inf"))  # [CHUNK]
        top = tl.maximum(top, tl.max(tops, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for part in range(0, parts, CHUNK):
        mask = part + n < parts
        tops = tl.load(PART_SUMS + (part + n) * rows + at, mask=mask, other=float("-inf"))  # [CHUNK]
        sums = tl.load(PART_SUMS + (parts + part + n) * rows + at, mask=mask, other=0.0)
        weight = sums * tl.math.exp2((tops - base) * scale_log2)  # [CHUNK]
        pointers = PARTS + ((part + n) * rows + at)[:, None] * D + d[None, :]
        out = tl.load(pointers, mask=mask[:, None] & (d < D)[None, :], other=0.0)  # [CHUNK, BLOCK_D]
        total += tl.sum(weight, 0)
        acc += tl.sum(out * weight[:, None], 0)
    nothing = total == 0.0
    bh = at // L
    OUT += (bh // H) * out_batch + (bh % H) * out_head + (at % L) * out_row
    shared = tl.where(nothing, 1.0, total)
    if SINK is not None:
        sink = tl.load(SINK + (bh // H) * sink_batch + (bh % H) * sink_head + (at % L) * sink_query)
        shared += tl.math.exp2(sink_exponent(sink, base, scale_log2))
    tl.store(OUT + d, (acc / shared).to(OUT.dtype.element_ty), mask=d < D)
    log = tl.math.log2(tl.where(nothing, 1.0, total)) * LN2
    tl.store(LSE + at, tl.where(nothing, float("-inf"), base * (scale_log2 * LN2) + log))
