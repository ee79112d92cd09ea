"""After forward in parts: their sum."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "L", "parts"])
def merge_kernel(
    PARTS, PART_LSE, OUT, LSE, out_batch, out_head, out_row, H, L, parts,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (query of one (b, h)): adds up the parts of its keys by their lse, in order.

    PARTS: float32 [parts, B * H, L, D]; PART_LSE: float32 [parts, B * H, L].
    """
    at = tl.program_id(0).to(tl.int64)  # bh * L + i
    rows = tl.num_programs(0).to(tl.int64)  # B * H * L
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, CHUNK)
    top = float("-inf")
    for part in range(0, parts, CHUNK):
        lse = tl.load(PART_LSE + (part + n) * rows + at, mask=part + n < parts, other=float("-inf"))  # [CHUNK]
        top = tl.maximum(top, tl.max(lse, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for part in range(0, parts, CHUNK):
        mask = part + n < parts
        lse = tl.load(PART_LSE + (part + n) * rows + at, mask=mask, other=float("-inf"))  # [CHUNK]
        weight = tl.exp(lse - base)  # [CHUNK]
        pointers = PARTS + ((part + n) * rows + at)[:, None] * D + d[None, :]
        out = tl.load(pointers, mask=mask[:, None] & (d < D)[None, :], other=0.0)  # [CHUNK, BLOCK_D]
        total += tl.sum(weight, 0)
        acc += tl.sum(out * weight[:, None], 0)
    nothing = total == 0.0
    bh = at // L
    OUT += (bh // H) * out_batch + (bh % H) * out_head + (at % L) * out_row
    tl.store(OUT + d, (acc / tl.where(nothing, 1.0, total)).to(OUT.dtype.element_ty), mask=d < D)
    tl.store(LSE + at, tl.where(nothing, float("-inf"), base + tl.log(tl.where(nothing, 1.0, total))))
