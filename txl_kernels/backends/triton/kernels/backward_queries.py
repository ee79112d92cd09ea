"""Backward, dq: a block of queries walks its keys as forward does.

5 products a tile, 6 with dr by atomics. Scores come from lse. The tile's dS, joined with the one
before, is skewed into distance coordinates: G[m, c] is the gradient of the score at distance d0 +
c, complete for these queries, so dq through positions is G @ r, one product.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import (
    Bounds,
    Dropout,
    Layout,
    Queries,
    Rows,
    Sizes,
    TableGradient,
    Upstream,
)
from txl_kernels.backends.triton.kernels.dropout import kept
from txl_kernels.backends.triton.kernels.products import dot
from txl_kernels.backends.triton.kernels.rows import add_rows, load_rows, packed_rows, place_of, rows_of, store_rows
from txl_kernels.backends.triton.kernels.skew import laid_out_as, skew
from txl_kernels.backends.triton.kernels.sources import memory_source, segment_source, tile_starts
from txl_kernels.backends.triton.kernels.table import load_distances, table_of
from txl_kernels.backends.triton.kernels.visible import partly, sees, visible_to
from txl_kernels.backends.triton.kernels.weights import weights


@triton.jit
def _in_use(last, rows, row0, BLOCK: tl.constexpr):
    """[BLOCK] bool: which rows from row0 on some query sees; None without bounds.

    last: pointer to KEY_LAST or ROW_LAST of `reach_kernel` at row 0.
    """
    used = None
    if last is not None:
        row = row0 + tl.arange(0, BLOCK)
        used = tl.load(last + row, mask=(row >= rows.first) & (row < rows.last), other=-1) >= 0
    return used


@triton.jit
def _skewed(ds, ds_before, s, BLOCK: tl.constexpr):
    """G of this tile: [BLOCK, BLOCK], as all; s: scores, for their layout."""
    if ds.dtype.primitive_bitwidth == 16:
        # In 4 bytes, which have no bank conflicts, and in the layout that the next product takes.
        G = skew(ds.to(tl.float32), ds_before.to(tl.float32), BLOCK, BLOCK)
        G = laid_out_as(G, s).to(ds.dtype)
    else:
        G = skew(ds, ds_before, BLOCK, BLOCK)
    return G


@triton.jit
def _through_positions(
    dq, G, qw, table, row_last, gradient, d0, BLOCK: tl.constexpr, PRECISION: tl.constexpr, layout
):  # fmt: skip
    """dq + G @ r for the block of distances at d0; with `gradient`, adds G^T @ qw to that.

    G: [BLOCK, BLOCK], in q's dtype.
    """
    r = load_distances(table, d0, _in_use(row_last, table, d0, BLOCK), BLOCK, layout)  # [BLOCK, BLOCK_D]
    dq = dot(G, r, dq, PRECISION)
    if gradient is not None:
        dr = dot(tl.trans(G), qw, None, PRECISION) * gradient.scale  # [BLOCK, BLOCK_D]
        add_rows(gradient.rows, d0 - table.first, dr, BLOCK, layout)
    return dq


@triton.jit
def _walk(
    state, source, key_last, table, row_last, gradient, queries, upstream, visible, dropout,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, layout, key_layout,
):  # fmt: skip
    """All tiles of one source.

    state: dq [BLOCK, BLOCK_D]; position scores of the block of distances above the next tile
    [BLOCK, BLOCK], float32; dS of the tile before [BLOCK, BLOCK], in q's dtype; and its distance
    d0.
    """
    dq, above, ds_before, d0 = state
    for row0 in range(source.start, source.k.last, BLOCK):
        key0 = row0 + source.shift
        key = key0 + tl.arange(0, BLOCK)
        d0 = queries.at - key0
        seen = _in_use(key_last, source.k, row0, BLOCK)
        k = load_rows(source.k, row0, seen, BLOCK, key_layout)  # [BLOCK, BLOCK_D]
        r = load_distances(table, d0 - BLOCK, None, BLOCK, layout)  # [BLOCK, BLOCK_D]
        v = load_rows(source.v, row0, None, BLOCK, layout)  # [BLOCK, BLOCK_D]
        below = dot(queries.qw, tl.trans(r), None, PRECISION)  # [BLOCK, BLOCK], as all that follow
        s = dot(queries.qu, tl.trans(k), None, PRECISION)
        s += skew(above, below, BLOCK, BLOCK)
        above = below
        p = weights(s, queries.scale_log2, upstream.lse2[:, None])
        dp = dot(upstream.dout, tl.trans(v), None, PRECISION)
        if dropout is not None:
            dp = tl.where(kept(dropout, queries.m0, key0, BLOCK, BLOCK), dp * dropout.keep_scale, 0.0)
        ds = p * (dp - upstream.delta[:, None])
        if partly(visible, key0, BLOCK):
            ds = tl.where(sees(visible, key), ds, 0.0)
        ds = ds.to(k.dtype)
        dq = dot(ds, k, dq, PRECISION)
        G = _skewed(ds, ds_before, s, BLOCK)
        dq = _through_positions(dq, G, queries.qw, table, row_last, gradient, d0, BLOCK, PRECISION, layout)
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
    """Program (block of queries of one (b, h)).

    DQ_SUM: float32 [B * H, blocks, D], the block's sum of dq. DR: None, or float32 [H, T, D] of
    zeros, to which dr is added by atomics. With TMA, V, V_MEM and R are descriptors, as K and K_MEM
    are without bounds; see forward.
    """
    sizes = Sizes(H, L, M, T, zero_row, back, ahead)
    bounds = Bounds(START, start_batch, start_query, END, end_batch, end_query)
    layout: tl.constexpr = Layout(D, BLOCK_D, WIDE, TMA)
    plain: tl.constexpr = Layout(D, BLOCK_D, WIDE, False)
    keys: tl.constexpr = Layout(D, BLOCK_D, WIDE, TMA and KEY_LAST is None)
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks  # longest first
    m0 = block * BLOCK
    place = place_of(pid // blocks, H)
    i = m0 + tl.arange(0, BLOCK)
    # Queries past the segment's end may meet anything: their dS must not reach dr or DQ_SUM.
    visible, _ = visible_to(bounds, place.b, i, sizes, True)
    key_last = None  # of the memory; the segment's begins at key M
    segment_last = None
    row_last = None
    if KEY_LAST is not None:
        key_last = KEY_LAST + place.b * (M + L)
        segment_last = key_last + M
        row_last = ROW_LAST + place.b * T + zero_row

    qu = load_rows(packed_rows(QU, place, L, plain), m0, None, BLOCK, plain)  # [BLOCK, BLOCK_D]
    qw = load_rows(packed_rows(QW, place, L, plain), m0, None, BLOCK, plain)
    queries = Queries(qu, qw, m0, M + m0, scale_log2)
    do_rows = rows_of(DOUT, (do_batch, do_head, do_row), place, 0, L, plain)
    upstream = Upstream(
        load_rows(do_rows, m0, None, BLOCK, plain),
        tl.load(LSE2 + place.bh * L + i, mask=i < L, other=float("inf")),
        tl.load(DELTA + place.bh * L + i, mask=i < L, other=0.0),
    )
    dropout = None
    if DROPOUT:
        dropout = Dropout(tl.load(SEED), place.bh, drop_below, keep_scale)

    mem_start, seg_start = tile_starts(visible, sizes, BLOCK)
    table = table_of(R, r_head, r_row, place.h, sizes, layout)
    gradient = None
    if DR is not None:
        dr_rows = Rows(DR + place.h * T * D, D, 0, T, place.b, place.h)
        gradient = TableGradient(dr_rows, tl.abs(scale))
    d0 = queries.at - tl.where(visible.first < M, mem_start, M + seg_start)
    r = load_distances(table, d0, None, BLOCK, layout)  # [BLOCK, BLOCK_D]
    above = dot(qw, tl.trans(r), None, PRECISION)
    state = (tl.zeros((BLOCK, BLOCK_D), tl.float32), above, tl.zeros((BLOCK, BLOCK), qu.dtype), d0)
    k_strides, v_strides = (km_batch, km_head, km_row), (vm_batch, vm_head, vm_row)
    memory = memory_source(K_MEM, k_strides, V_MEM, v_strides, mem_start, place, visible, sizes, keys, layout)
    state = _walk(
        state, memory, key_last, table, row_last, gradient, queries, upstream, visible, dropout,
        BLOCK, PRECISION, layout, keys,
    )  # fmt: skip
    k_strides, v_strides = (k_batch, k_head, k_row), (v_batch, v_head, v_row)
    segment = segment_source(K, k_strides, V, v_strides, seg_start, place, visible, sizes, keys, layout)
    state = _walk(
        state, segment, segment_last, table, row_last, gradient, queries, upstream, visible, dropout,
        BLOCK, PRECISION, layout, keys,
    )  # fmt: skip
    dq, _, ds, d0 = state
    # What the last tile leaves below d0: nothing when causal, else the distances of later keys.
    G = skew(tl.zeros((BLOCK, BLOCK), tl.float32), ds.to(tl.float32), BLOCK, BLOCK).to(ds.dtype)
    dq = _through_positions(dq, G, qw, table, row_last, gradient, d0 - BLOCK, BLOCK, PRECISION, layout)
    dq *= scale
    store_rows(rows_of(DQ, (dq_batch, dq_head, dq_row), place, 0, L, plain), m0, dq, BLOCK, plain)
    d = tl.arange(0, BLOCK_D)
    tl.store(DQ_SUM + (place.bh * blocks + block) * D + d, tl.sum(dq, 0), mask=d < D)
