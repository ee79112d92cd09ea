"""Two small kernels before the others: who sees each key and each row of r; and what backward needs of every query."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.tiles import LOG2E, NEVER, interval, load_rows, store_rows


@triton.jit(do_not_specialize=["L", "M", "T", "zero_row", "back", "ahead"])
def reach_kernel(
    START, END, KEY_FIRST, KEY_LAST, ROW_FIRST, ROW_LAST,
    start_batch, start_query, end_batch, end_query, L, M, T, zero_row, back, ahead,
    CELLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (batch row, CELLS keys and CELLS rows of r): first and last query that sees the key or uses the row.

    KEY_FIRST, KEY_LAST: int32 [B, S]; ROW_FIRST, ROW_LAST: int32 [B, T]. Nobody: NEVER and -1.
    """
    blocks = tl.cdiv(tl.maximum(M + L, T), CELLS)
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    cell = pid % blocks * CELLS + tl.arange(0, CELLS)
    distance = cell - zero_row
    key_first = tl.full((CELLS,), NEVER, tl.int32)
    key_last = tl.full((CELLS,), -1, tl.int32)
    row_first = tl.full((CELLS,), NEVER, tl.int32)
    row_last = tl.full((CELLS,), -1, tl.int32)
    for i0 in range(0, L, CHUNK):
        i = i0 + tl.arange(0, CHUNK)
        low, high, _ = interval(
            START, END, b, start_batch, start_query, end_batch, end_query, i, L, M, T, zero_row, back, ahead
        )
        at = M + i
        sees = (cell[None, :] >= low[:, None]) & (cell[None, :] < high[:, None])
        key_first = tl.minimum(key_first, tl.min(tl.where(sees, i[:, None], NEVER), 0))
        key_last = tl.maximum(key_last, tl.max(tl.where(sees, i[:, None], -1), 0))
        key = at[:, None] - distance[None, :]
        uses = (key >= low[:, None]) & (key < high[:, None])
        row_first = tl.minimum(row_first, tl.min(tl.where(uses, i[:, None], NEVER), 0))
        row_last = tl.maximum(row_last, tl.max(tl.where(uses, i[:, None], -1), 0))
    tl.store(KEY_FIRST + b * (M + L) + cell, key_first, mask=cell < M + L)
    tl.store(KEY_LAST + b * (M + L) + cell, key_last, mask=cell < M + L)
    tl.store(ROW_FIRST + b * T + cell, row_first, mask=cell < T)
    tl.store(ROW_LAST + b * T + cell, row_last, mask=cell < T)


@triton.jit(do_not_specialize=["H", "L"])
def prepare_kernel(
    Q, U, W, OUT, DOUT, LSE, DLSE, QU, QW, DELTA, LSE2,
    q_batch, q_head, q_row, u_head, w_head, out_batch, out_head, out_row, do_batch, do_head, do_row, H, L, sign,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (block of queries of one (b, h)): q + u and q + w rounded to q's dtype, delta, and lse in base 2.

    QU, QW: [B * H, L, D], with the scale's sign, zero for a query that sees nothing. DELTA, LSE2: [B * H, L], +inf in
    LSE2 for such a query, so that its probabilities come out as zero.
    """
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    m0 = pid % blocks * BLOCK
    bh = (pid // blocks).to(tl.int64)
    b = bh // H
    h = bh % H
    i = m0 + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(LSE + bh * L + i, mask=i < L, other=float("-inf"))
    sees = lse != float("-inf")
    u = tl.load(U + h * u_head + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(W + h * w_head + d, mask=d < D, other=0.0).to(tl.float32)
    q = load_rows(Q + b * q_batch + h * q_head, b, h, m0, q_row, 0, L, sees, BLOCK, D, BLOCK_D, WIDE, False).to(
        tl.float32
    )
    qu = tl.where(sees[:, None], (q + u[None, :]) * sign, 0.0)
    qw = tl.where(sees[:, None], (q + w[None, :]) * sign, 0.0)
    store_rows(QU + bh * L * D, m0, D, 0, L, qu, BLOCK, D, BLOCK_D, WIDE)
    store_rows(QW + bh * L * D, m0, D, 0, L, qw, BLOCK, D, BLOCK_D, WIDE)
    out = load_rows(OUT + b * out_batch + h * out_head, b, h, m0, out_row, 0, L, sees, BLOCK, D, BLOCK_D, WIDE, False)
    dout = load_rows(DOUT + b * do_batch + h * do_head, b, h, m0, do_row, 0, L, sees, BLOCK, D, BLOCK_D, WIDE, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + bh * L + i, mask=sees & (i < L), other=0.0)
    tl.store(DELTA + bh * L + i, delta, mask=i < L)
    tl.store(LSE2 + bh * L + i, tl.where(sees, lse * LOG2E, float("inf")), mask=i < L)
