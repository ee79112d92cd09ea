"""A plain flash attention forward kernel in Triton, to hold ours against: one product for scores,
an online softmax, one product with values, tiles by descriptors where there are."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels.backends.triton import plan
from txl_kernels.backends.triton.config import has_descriptors


@triton.jit
def _rows(X, first, BLOCK: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    if TMA:  # noqa: SIM108
        x = X.load([first, 0])
    else:
        x = tl.load(X + (first + tl.arange(0, BLOCK))[:, None] * D + tl.arange(0, D)[None, :])
    return x


@triton.jit
def flash_kernel(
    Q, K, V, OUT, keys, scale_log2, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr
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


def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v as float32 [L, D] of one head, [1, 1, rows, D]; no mask."""
    length, width = q.shape[2:]
    keys, block = k.size(2), 64
    tma = has_descriptors(plan.capability(q.device))

    def given(x: torch.Tensor) -> Any:
        x = x.reshape(-1, width)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [block, width]) if tma else x

    out = torch.empty(length, width)
    flash_kernel[(length // block,)](
        q.reshape(-1, width), given(k), given(v), out, keys, plan.LOG2E * width**-0.5,
        BM=block, BN=block, D=width, TMA=tma, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
