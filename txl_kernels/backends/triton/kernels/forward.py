"""Forward: a block of queries walks the keys it can see with an online softmax, and carries half of each window.

Tiles of keys end where the memory ends, so the walk crosses from memory to segment for any M without a seam: the block
of distances below one tile is the block above the next.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.skew import skew
from txl_kernels.backends.triton.kernels.tiles import LN2, dot, hull, interval, kept, load_rows, rows_of, store_rows

# Sizes that change from call to call must not compile a kernel each.
SIZES = ["H", "L", "M", "T", "zero_row", "back", "ahead", "drop_below"]


@triton.jit
def _walk(
    state, qu, qw, K, V, key_last, k_row, v_row, first_row, shift, origin, tile_from, tile_to,
    R, r_row, T, zero_row, b, h, m0, M, low, high, first, last, all_from, all_to, scale_log2, seed, bh, drop_below,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tiles tile_from .. tile_to - 1 of one source, memory or segment.

    shift: key index less row of the source. origin: row at which its descriptor starts.
    """
    acc, top, total, above = state
    from_row = first - shift
    if TMA:
        from_row = origin
    for tile in range(tile_from, tile_to):
        row0 = first_row + tile * BN
        key0 = row0 + shift
        key = key0 + tl.arange(0, BN)
        k = load_rows(K, b, h, row0, k_row, from_row, last - shift, None, BN, D, BLOCK_D, WIDE, TMA)
        d0 = M + m0 - key0
        r = load_rows(R, None, h, d0 - BN, r_row, -zero_row, T - zero_row, None, BN, D, BLOCK_D, WIDE, TMA)
        below = dot(qw, tl.trans(r), None, PRECISION)
        s = dot(qu, tl.trans(k), None, PRECISION)
        s += skew(above, below, BM, BN)
        above = below
        if (key0 < all_from) | (key0 + BN > all_to):
            s = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), s, float("-inf"))
        # The maximum is kept scaled: were it scaled anew, rounding would make the factor of a tile that raises nothing
        # differ from 1, tile after tile.
        raised = tl.maximum(top, tl.max(s, 1) * scale_log2)
        base = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.math.exp2(s * scale_log2 - base[:, None])
        rescale = tl.math.exp2(top - base)
        total = total * rescale + tl.sum(p, 1)
        top = raised
        if DROPOUT:
            p = tl.where(kept(seed, bh, m0, key0, drop_below, BM, BN), p, 0.0)
        keep = None
        if key_last is not None:
            keep = tl.load(key_last + key, mask=(key >= first) & (key < last), other=-1) >= 0
        v = load_rows(V, b, h, row0, v_row, from_row, last - shift, keep, BN, D, BLOCK_D, WIDE, TMA)
        acc = dot(p.to(v.dtype), v, acc * rescale[:, None], PRECISION)
    return acc, top, total, above


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, K_MEM, V_MEM, R, U, W, START, END, KEY_LAST, SEED, OUT, LSE,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    km_batch, km_head, km_row, vm_batch, vm_head, vm_row, r_head, r_row, u_head, w_head,
    start_batch, start_query, end_batch, end_query, out_batch, out_head, out_row,
    H, L, M, T, zero_row, back, ahead, sign, scale_log2, drop_below, keep_scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DROPOUT: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Program (block of BM queries of one (b, h), part of its keys).

    With SPLIT, OUT is float32 [parts, B * H, L, D] and LSE [parts, B * H, L], for `merge_kernel`; without, there is one
    part. KEY_LAST: [B, S] of `reach_kernel`, or None; it keeps values that no query sees out of the products. With TMA,
    K, V, K_MEM, V_MEM and R are descriptors, and those of the memory start at the first key that some query sees.
    """
    blocks = tl.cdiv(L, BM)
    pid = tl.program_id(0)
    m0 = (blocks - 1 - pid % blocks) * BM  # longest first
    bh = (pid // blocks).to(tl.int64)
    b = bh // H
    h = bh % H
    i = m0 + tl.arange(0, BM)
    low, high, bad = interval(
        START, END, b, start_batch, start_query, end_batch, end_query, i, L, M, T, zero_row, back, ahead
    )
    first, last, all_from, all_to = hull(low, high, i, L, M)
    key_last = None
    if KEY_LAST is not None:
        key_last = KEY_LAST + b * (M + L)

    # Tiles of the memory end at key M, tiles of the segment start there.
    mem_row = M - tl.cdiv(tl.maximum(M - first, 0), BN) * BN
    seg_row = tl.maximum(first - M, 0) // BN * BN
    mem_tiles = tl.cdiv(tl.maximum(tl.minimum(M, last) - mem_row, 0), BN)
    tiles = mem_tiles + tl.cdiv(tl.maximum(last - M - seg_row, 0), BN)
    from_tile = 0
    to_tile = tiles
    if SPLIT:
        each = tl.cdiv(tiles, tl.num_programs(1))
        from_tile = tl.minimum(tl.program_id(1) * each, tiles)
        to_tile = tl.minimum(from_tile + each, tiles)

    d = tl.arange(0, BLOCK_D)
    q = load_rows(Q + b * q_batch + h * q_head, b, h, m0, q_row, 0, L, low < high, BM, D, BLOCK_D, WIDE, False)
    u = tl.load(U + h * u_head + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(W + h * w_head + d, mask=d < D, other=0.0).to(tl.float32)
    qu = ((q.to(tl.float32) + u[None, :]) * sign).to(q.dtype)
    qw = ((q.to(tl.float32) + w[None, :]) * sign).to(q.dtype)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)

    R = rows_of(R, zero_row, h, r_row, r_head, TMA)
    start_key = tl.where(from_tile < mem_tiles, mem_row + from_tile * BN, M + seg_row + (from_tile - mem_tiles) * BN)
    d0 = M + m0 - start_key
    r = load_rows(R, None, h, d0, r_row, -zero_row, T - zero_row, None, BN, D, BLOCK_D, WIDE, TMA)
    above = dot(qw, tl.trans(r), None, PRECISION)
    state = (
        tl.zeros((BM, BLOCK_D), tl.float32),
        tl.full((BM,), float("-inf"), tl.float32),
        tl.where(bad, float("nan"), 0.0),
        above,
    )
    state = _walk(
        state, qu, qw, rows_of(K_MEM, b, h, km_batch, km_head, TMA), rows_of(V_MEM, b, h, vm_batch, vm_head, TMA),
        key_last, km_row, vm_row, mem_row, 0, tl.maximum(M - back, 0), from_tile, tl.minimum(to_tile, mem_tiles),
        R, r_row, T, zero_row, b, h, m0, M, low, high, first, tl.minimum(last, M), all_from, all_to, scale_log2, seed, bh,
        drop_below, BM, BN, D, BLOCK_D, DROPOUT, WIDE, PRECISION, TMA,
    )  # fmt: skip
    state = _walk(
        state, qu, qw, rows_of(K, b, h, k_batch, k_head, TMA), rows_of(V, b, h, v_batch, v_head, TMA),
        key_last, k_row, v_row, seg_row, M, 0, tl.maximum(from_tile - mem_tiles, 0), to_tile - mem_tiles,
        R, r_row, T, zero_row, b, h, m0, M, low, high, tl.maximum(first, M), last, all_from, all_to, scale_log2, seed, bh,
        drop_below, BM, BN, D, BLOCK_D, DROPOUT, WIDE, PRECISION, TMA,
    )  # fmt: skip
    acc, top, total, above = state

    nothing = total == 0.0  # of these keys, which may be one part's
    out = tl.where(nothing[:, None], 0.0, acc * (keep_scale / tl.where(nothing, 1.0, total))[:, None])
    lse = tl.where(nothing, float("-inf"), (top + tl.math.log2(tl.where(nothing, 1.0, total))) * LN2)
    lse = tl.where(bad, float("nan"), lse)
    at = bh
    if SPLIT:
        at += tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // blocks)
        OUT += at * L * D
    else:
        OUT += b * out_batch + h * out_head
    store_rows(OUT, m0, out_row, 0, L, out, BM, D, BLOCK_D, WIDE)
    tl.store(LSE + at * L + i, lse, mask=i < L)


@triton.jit(do_not_specialize=["H", "L", "parts"])
def merge_kernel(
    PARTS, PART_LSE, OUT, LSE, out_batch, out_head, out_row, H, L, parts,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (query of one (b, h)): adds up the parts of its keys by their lse, in order of the keys."""
    at = tl.program_id(0).to(tl.int64)  # bh * L + i
    rows = tl.num_programs(0).to(tl.int64)  # B * H * L
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, CHUNK)
    top = float("-inf")
    for part in range(0, parts, CHUNK):
        lse = tl.load(PART_LSE + (part + n) * rows + at, mask=part + n < parts, other=float("-inf"))
        top = tl.maximum(top, tl.max(lse, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for part in range(0, parts, CHUNK):
        mask = part + n < parts
        lse = tl.load(PART_LSE + (part + n) * rows + at, mask=mask, other=float("-inf"))
        weight = tl.exp(lse - base)
        out = tl.load(
            PARTS + ((part + n) * rows + at)[:, None] * D + d[None, :], mask=mask[:, None] & (d < D)[None, :], other=0.0
        )
        total += tl.sum(weight, 0)
        acc += tl.sum(out * weight[:, None], 0)
    nothing = total == 0.0
    bh = at // L
    OUT += (bh // H) * out_batch + (bh % H) * out_head + (at % L) * out_row
    tl.store(OUT + d, (acc / tl.where(nothing, 1.0, total)).to(OUT.dtype.element_ty), mask=d < D)
    tl.store(LSE + at, tl.where(nothing, float("-inf"), base + tl.log(tl.where(nothing, 1.0, total))))
