"""Plain flash attention in Triton, to hold ours against: scores, an online softmax, values;
backward as two kernels, one for q and one for k and v. Tiles by descriptors where there are."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels.backends.triton import plan
from txl_kernels.backends.triton.config import has_descriptors

BLOCK = 64
STAGES = 3


@triton.jit
def _rows(X, first, BLOCK: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    if TMA:  # noqa: SIM108
        x = X.load([first, 0])
    else:
        x = tl.load(X + (first + tl.arange(0, BLOCK))[:, None] * D + tl.arange(0, D)[None, :])
    return x


@triton.jit
def flash_kernel(
    Q, K, V, OUT, LSE2, keys, scale_log2, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(Q + m[:, None] * D + d[None, :])
    acc, total = tl.zeros((BM, D), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    for first in range(0, keys, BN):
        s = tl.dot(q, tl.trans(_rows(K, first, BN, D, TMA))) * scale_log2
        raised = tl.maximum(top, tl.max(s, 1))
        p = tl.math.exp2(s - raised[:, None])
        rescale = tl.math.exp2(top - raised)
        total = total * rescale + tl.sum(p, 1)
        top = raised
        v = _rows(V, first, BN, D, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    tl.store(OUT + m[:, None] * D + d[None, :], acc / total[:, None])
    tl.store(LSE2 + m, top + tl.math.log2(total))


@triton.jit
def flash_queries_kernel(
    Q, K, V, DOUT, LSE2, DELTA, DQ, keys, scale_log2, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    at = m[:, None] * D + tl.arange(0, D)[None, :]
    q, dout, lse2, delta = tl.load(Q + at), tl.load(DOUT + at), tl.load(LSE2 + m), tl.load(DELTA + m)
    dq = tl.zeros((BM, D), tl.float32)
    for first in range(0, keys, BN):
        k, v = _rows(K, first, BN, D, TMA), _rows(V, first, BN, D, TMA)
        p = tl.math.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse2[:, None])
        ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + at, dq)


@triton.jit
def flash_keys_kernel(
    Q, K, V, DOUT, LSE2, DELTA, DK, DV, queries, scale_log2, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    at = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None] * D + tl.arange(0, D)[None, :]
    k, v = tl.load(K + at), tl.load(V + at)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for first in range(0, queries, BM):
        m = first + tl.arange(0, BM)
        q, dout = _rows(Q, first, BM, D, TMA), _rows(DOUT, first, BM, D, TMA)
        p = tl.math.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - tl.load(LSE2 + m)[None, :])
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = p * (tl.dot(v, tl.trans(dout)) - tl.load(DELTA + m)[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + at, dk)
    tl.store(DV + at, dv)


def _given(x: torch.Tensor) -> Any:
    """As kernels that walk it take it: rows [rows, D]."""
    x = x.reshape(-1, x.size(-1))
    if not has_descriptors(plan.capability(x.device)):
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [BLOCK, x.size(1)])


def _constants(x: torch.Tensor) -> dict[str, Any]:
    tma = has_descriptors(plan.capability(x.device))
    return {"BM": BLOCK, "BN": BLOCK, "D": x.size(-1), "TMA": tma, "num_warps": 4, "num_stages": STAGES}


def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T / sqrt(D)) v as float32 [L, D] and lse in base 2 [L], without a mask.

    q, k, v: [1, 1, rows, D].
    """
    length, width = q.shape[2:]
    out, lse2 = torch.empty(length, width), torch.empty(length)
    flash_kernel[(length // BLOCK,)](
        q.reshape(-1, width), _given(k), _given(v), out, lse2, k.size(2), plan.LOG2E * width**-0.5, **_constants(q)
    )
    return out, lse2


def flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse2: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v, float32 [rows, D]; of q and k yet to be scaled by 1 / sqrt(D)."""
    width, scale_log2 = q.size(-1), plan.LOG2E * q.size(-1) ** -0.5
    delta, dout = (out * dout).sum(1), dout.to(q.dtype)
    rows = [x.reshape(-1, width) for x in (q, k, v)]
    dq, dk, dv = (torch.empty(x.shape) for x in rows)
    flash_queries_kernel[(len(rows[0]) // BLOCK,)](
        rows[0], _given(k), _given(v), dout, lse2, delta, dq, len(rows[1]), scale_log2, **_constants(q)
    )
    flash_keys_kernel[(len(rows[1]) // BLOCK,)](
        _given(q), rows[1], rows[2], _given(dout), lse2, delta, dk, dv, len(rows[0]), scale_log2, **_constants(q)
    )
    return dq, dk, dv
