"""After backward: sums of what its programs left, in one order: the same bits every time."""

import triton
import triton.language as tl


@triton.jit
def _sum_of_head(PARTS, h, B, H, blocks, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """float32 [BLOCK_D]: the sum over b and blocks of PARTS, float32 [B, H, blocks, D]."""
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
    DQ_SUM, DU_SUM, DR_SUM, DU, DW, DR, du_head, dw_head, dr_head, dr_row,
    B, H, T, rows, first_row, query_blocks, key_blocks, shares,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (head): du and dw [H, D]. After those, program (block of rows of a head): dr.

    DQ_SUM: float32 [B, H, query_blocks, D], of dq; DU_SUM: float32 [B, H, key_blocks, D]; dw is the
    first's sum less du. DR_SUM: float32 [shares, H, T, D], of dr's rows from first_row on; others
    are zero. DR: [H, rows, D].
    """
    pid = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    if pid < H:
        h = pid.to(tl.int64)
        du = _sum_of_head(DU_SUM, h, B, H, key_blocks, BLOCK, D, BLOCK_D)
        dw = _sum_of_head(DQ_SUM, h, B, H, query_blocks, BLOCK, D, BLOCK_D) - du
        tl.store(DU + h * du_head + d, du.to(DU.dtype.element_ty), mask=d < D)
        tl.store(DW + h * dw_head + d, dw.to(DW.dtype.element_ty), mask=d < D)
    else:
        h = ((pid - H) % H).to(tl.int64)
        row = (pid - H) // H * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        t = row - first_row
        used = ((t >= 0) & (t < T))[:, None] & (d < D)[None, :]
        dr = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        for share in range(shares):
            at = (share * H + h) * T + t  # [BLOCK]
            dr += tl.load(DR_SUM + at[:, None] * D + d[None, :], mask=used, other=0.0)
        pointers = DR + h * dr_head + row[:, None] * dr_row + d[None, :]
        tl.store(pointers, dr.to(DR.dtype.element_ty), mask=(row < rows)[:, None] & (d < D)[None, :])
