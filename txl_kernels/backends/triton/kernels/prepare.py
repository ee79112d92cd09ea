"""Before backward: what it needs of every query, once instead of per tile."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Layout
from txl_kernels.backends.triton.kernels.rows import load_rows, packed_rows, place_of, rows_of, store_rows
from txl_kernels.backends.triton.kernels.table import load_bias

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["H", "L"])
def prepare_kernel(
    Q, U, W, OUT, DOUT, LSE, DLSE, QU, QW, DELTA, LSE2,
    q_batch, q_head, q_row, u_head, w_head, out_batch, out_head, out_row, do_batch, do_head, do_row, H, L, sign,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (block of queries of one (b, h)): q + u, q + w, delta, and lse in base 2.

    QU, QW: [B * H, L, D], rounded to q's dtype, with the scale's sign, zero for a query that sees
    nothing. DELTA, LSE2: [B * H, L], +inf in LSE2 for such a query, so that its probabilities come
    out as zero.
    """
    layout: tl.constexpr = Layout(D, BLOCK_D, WIDE, False)
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(0)
    m0 = pid % blocks * BLOCK
    place = place_of(pid // blocks, H)
    i = m0 + tl.arange(0, BLOCK)
    at = place.bh * L + i  # [BLOCK]
    lse = tl.load(LSE + at, mask=i < L, other=float("-inf"))
    sees = lse != float("-inf")
    u, w = load_bias(U, u_head, place.h, layout), load_bias(W, w_head, place.h, layout)  # [BLOCK_D]
    q_rows = rows_of(Q, (q_batch, q_head, q_row), place, 0, L, layout)
    q = load_rows(q_rows, m0, sees, BLOCK, layout).to(tl.float32)  # [BLOCK, BLOCK_D]
    qu = tl.where(sees[:, None], (q + u[None, :]) * sign, 0.0)
    qw = tl.where(sees[:, None], (q + w[None, :]) * sign, 0.0)
    store_rows(packed_rows(QU, place, L, layout), m0, qu, BLOCK, layout)
    store_rows(packed_rows(QW, place, L, layout), m0, qw, BLOCK, layout)
    out_rows = rows_of(OUT, (out_batch, out_head, out_row), place, 0, L, layout)
    out = load_rows(out_rows, m0, sees, BLOCK, layout)  # [BLOCK, BLOCK_D]
    do_rows = rows_of(DOUT, (do_batch, do_head, do_row), place, 0, L, layout)
    dout = load_rows(do_rows, m0, sees, BLOCK, layout)  # [BLOCK, BLOCK_D]
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [BLOCK]
    if DLSE is not None:
        delta -= tl.load(DLSE + at, mask=sees & (i < L), other=0.0)
    tl.store(DELTA + at, delta, mask=i < L)
    tl.store(LSE2 + at, tl.where(sees, lse * LOG2E, float("inf")), mask=i < L)
