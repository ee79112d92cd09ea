"""The kernel that computes, once for each query, inputs of the other backward kernels."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Bounds, Layout, Queries, Sizes
from txl_kernels.backends.triton.kernels.tiles import (
    LOG2E,
    add_unfused,
    bias_of_pairs,
    bias_table_of,
    capped,
    dot,
    key_place_of,
    load_bias,
    load_rows,
    packed_rows,
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
    sees,
    segment_source,
    tile_starts,
    visible_to,
)

LARGE = tl.constexpr(64 * 1.4426950408889634)  # above it, the rounding error of lse2 exceeds that of a weight
MAX_SINK_LOG2 = tl.constexpr(80.0)  # log2; of a sink beyond it, weights beside it are 2**-80 of those without it


@triton.jit
def _largest_and_sum(
    state, source, table, table_bias, queries, visible, BLOCK: tl.constexpr, PRECISION: tl.constexpr, layout, r_layout
):  # fmt: skip
    """Return the largest scores, and the sums of weights relative to them, over all tiles of one
    source.

    state: both so far, float32 [BLOCK], and the position scores of the block of distances above the
    next tile.
    """
    top, total, above = state
    for row0 in range(source.start, source.k.last, BLOCK):
        key0 = row0 + source.shift
        d0 = queries.at - key0
        k = load_rows(source.k, row0, None, BLOCK, layout)
        s = dot(queries.qu, tl.trans(k), None, PRECISION)  # [BLOCK, BLOCK]
        if table is not None:
            below = position_scores(queries, table, table_bias, d0 - BLOCK, BLOCK, PRECISION, r_layout)
            s += skew(above, below, key0, BLOCK, BLOCK)
            above = below
        else:
            s = add_unfused(s, bias_of_pairs(table_bias, d0, BLOCK, BLOCK))
        if queries.to_cap is not None:
            s = capped(s, queries.to_cap)
        s = tl.where(sees(visible, key0 + tl.arange(0, BLOCK)), s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        total *= tl.math.exp2((top - base) * queries.scale_log2)
        total += tl.sum(tl.math.exp2((s - base[:, None]) * queries.scale_log2), 1)
        top = raised
    return top, total, above


@triton.jit(do_not_specialize=["H", "L", "M", "T", "zero_row", "left", "right", "group"])
def prepare_kernel(
    Q, Q_POS, U, W, SINK, OUT, DOUT, LSE, DLSE, QU, QW, DELTA, TOP, LSE2, DSINK, K, K_MEM, R, R_BIAS, START, END,
    q_batch, q_head, q_row, qp_batch, qp_head, qp_row, u_head, w_head, sink_batch, sink_head, sink_query,
    ds_batch, ds_head, ds_query, out_batch, out_head, out_row, do_batch, do_head, do_row,
    k_batch, k_head, k_row, km_batch, km_head, km_row, r_head, r_row, rb_head, rb_row, start_batch, start_query,
    end_batch, end_query, H, L, M, T, zero_row, left, right, group, sign, scale_log2, position_factor, to_cap,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    D_P: tl.constexpr, BLOCK_DP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute q + u, q + w, delta, lse in base 2, and the gradient of the sinks. A program has a
    block of queries of one (b, h).

    QU: [B * H, L, D], q + u, rounded to q's dtype and multiplied by the scale's sign; 0 for a query
    that sees no key. QW: [B * H, L, D_P], likewise q + w, or Q_POS + w, which is not multiplied.
    Without a table, QW and W are None. DELTA, TOP, LSE2: float32 [B * H, L]; the
    weights are exp2((score - TOP) * scale_log2 - LSE2). TOP is 0 and LSE2 is lse in base 2. Where
    that is large, TOP is the largest score and LSE2 the log2 of the sum of weights relative to it,
    both computed again from all keys. LSE2 is +inf for a query that sees no key, so that its
    weights are 0.

    SINK, DSINK: float32 [B, H, L], or None. A sink makes every weight of its query smaller by one
    factor, so it is in LSE2. DELTA is what the gradient of a weight loses: dout . out; and DLSE,
    whose own weights lack the sink, less, after a division by that factor.
    """
    sizes = Sizes(H, L, M, T, zero_row, left, right)
    layout: tl.constexpr = Layout(D, BLOCK_D, WIDE, False, UNIT)
    positions: tl.constexpr = Layout(D_P, BLOCK_DP, WIDE, False, UNIT)
    values: tl.constexpr = Layout(D_V, BLOCK_DV, WIDE, False, UNIT)
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    m0 = pid % blocks * BLOCK
    place = place_of(pid // blocks, H)
    i = m0 + tl.arange(0, BLOCK)
    at = place.bh * L + i  # [BLOCK]
    lse = tl.load(LSE + at, mask=i < L, other=float("-inf"))
    active = lse != float("-inf")
    u = load_bias(U, u_head, place.h, layout)  # [BLOCK_D]
    q_rows = rows_of(Q, (q_batch, q_head, q_row), place, 0, L, layout)
    q = load_rows(q_rows, m0, active, BLOCK, layout).to(tl.float32)  # [BLOCK, BLOCK_D]
    qu = tl.where(active[:, None], (q + u[None, :]) * sign, 0.0).to(QU.dtype.element_ty)
    store_rows(packed_rows(QU, place, L, layout), m0, qu, BLOCK, layout)
    qw = qu
    if QW is not None:
        w = load_bias(W, w_head, place.h, positions)
        if Q_POS is not None:
            qp_rows = rows_of(Q_POS, (qp_batch, qp_head, qp_row), place, 0, L, positions)
            q_pos = load_rows(qp_rows, m0, active, BLOCK, positions).to(tl.float32)  # [BLOCK, BLOCK_DP]
            qw = tl.where(active[:, None], q_pos + w[None, :], 0.0).to(QU.dtype.element_ty)
        else:
            qw = tl.where(active[:, None], (q + w[None, :]) * sign, 0.0).to(QU.dtype.element_ty)
        store_rows(packed_rows(QW, place, L, positions), m0, qw, BLOCK, positions)
    out_rows = rows_of(OUT, (out_batch, out_head, out_row), place, 0, L, values)
    out = load_rows(out_rows, m0, active, BLOCK, values)  # [BLOCK, BLOCK_DV]
    do_rows = rows_of(DOUT, (do_batch, do_head, do_row), place, 0, L, values)
    dout = load_rows(do_rows, m0, active, BLOCK, values)  # [BLOCK, BLOCK_DV]
    product = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [BLOCK]
    if SINK is None:
        delta = product
        if DLSE is not None:
            delta -= tl.load(DLSE + at, mask=active & (i < L), other=0.0)
        tl.store(DELTA + at, delta, mask=i < L)
    top = tl.zeros((BLOCK,), tl.float32)
    lse2 = tl.where(active, lse * LOG2E, float("inf"))
    large = active & (tl.abs(lse2) > LARGE)
    if tl.max(large.to(tl.int32), 0) != 0:
        bounds = Bounds(START, start_batch, start_query, END, end_batch, end_query)
        visible, _ = visible_to(bounds, place.b, i, sizes, True, True)
        key_place = key_place_of(place, group)
        queries = Queries(qu, qw, m0, M + m0, scale_log2, to_cap, position_factor)
        mem_start, seg_start = tile_starts(visible, sizes, BLOCK)
        table = None
        if R is not None:
            table = table_of(R, r_head, r_row, place.h, sizes, positions)
        table_bias = None
        if R_BIAS is not None:
            table_bias = bias_table_of(R_BIAS, rb_head, rb_row, place.h, sizes, sign, position_factor)
        above = tl.zeros((1, 1), tl.float32)  # not used without a table
        if R is not None:
            d0 = queries.at - tl.where(visible.first < M, mem_start, M + seg_start)
            above = position_scores(queries, table, table_bias, d0, BLOCK, PRECISION, positions)
        steps = (km_batch, km_head, km_row)
        memory = memory_source(K_MEM, steps, K_MEM, steps, mem_start, key_place, visible, sizes, layout, layout)
        steps = (k_batch, k_head, k_row)
        segment = segment_source(K, steps, K, steps, seg_start, key_place, visible, sizes, layout, layout)
        state = (tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32), above)
        state = _largest_and_sum(
            state, memory, table, table_bias, queries, visible, BLOCK, PRECISION, layout, positions
        )
        state = _largest_and_sum(
            state, segment, table, table_bias, queries, visible, BLOCK, PRECISION, layout, positions
        )
        top = tl.where(large, state[0], top)
        lse2 = tl.where(large, tl.math.log2(tl.where(large, state[1], 1.0)), lse2)
    if SINK is not None:
        sinks = SINK + place.b * sink_batch + place.h * sink_head + i.to(tl.int64) * sink_query
        sink = tl.load(sinks, mask=active & (i < L), other=float("-inf"))
        exponent = sink_exponent(sink, top, scale_log2) - tl.where(active, lse2, 0.0)  # of its weight over the keys'
        dsink = -product / (1.0 + tl.math.exp2(-exponent))
        dsinks = DSINK + place.b * ds_batch + place.h * ds_head + i.to(tl.int64) * ds_query
        tl.store(dsinks, tl.where(active, dsink, 0.0), mask=i < L)
        both = tl.maximum(exponent, 0.0) + tl.math.log2(1.0 + tl.math.exp2(-tl.abs(exponent)))
        both = tl.minimum(both, MAX_SINK_LOG2)
        lse2 += both
        delta = product
        if DLSE is not None:
            delta -= tl.load(DLSE + at, mask=active & (i < L), other=0.0) * tl.math.exp2(both)
        tl.store(DELTA + at, delta, mask=i < L)
    tl.store(TOP + at, top, mask=i < L)
    tl.store(LSE2 + at, lse2, mask=i < L)
