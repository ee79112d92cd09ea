"""The weights themselves, for who wants to look at some of them."""

import math
from typing import Any

import torch
from torch import Tensor

from txl_kernels import checks
from txl_kernels.backends import reference
from txl_kernels.backends.devices import autocast_dtype
from txl_kernels.call import Call
from txl_kernels.call.span import Window, span
from txl_kernels.checks.bounds import broadcast_bound
from txl_kernels.functional import cast_for_autocast


def rel_attention_weights(
    q: Tensor,
    k: Tensor,
    r: Tensor,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    k_mem: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    zero_row: int = 0,
    scale: float | None = None,
) -> Tensor:
    """softmax(score) of `rel_attention`, before any dropout, in memory for all pairs that are asked
    for; differentiable.

    In plain PyTorch on any device: to look at, or for what else needs them. `rel_attention` neither
    needs nor stores them.

    Args:
        q, k, content_bias, position_bias, causal, window, start, end, zero_row, scale: as in
            `rel_attention`.
        r: [H, T, D], or [1, T, D] for all heads.
        k_mem: None, or the memory's keys, [B, H, M, D].
        rows: None for all queries, or int64 [R], the queries whose weights are wanted, each from
            -L to L - 1.

    Returns:
        [B, H, L or R, M + L], float32 (float64 for float64); rows of zeros for queries that see no
        key.

    Raises:
        TypeError, ValueError: an argument, by name.
    """
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ValueError(
            f"q must be a tensor [B, H, L, D], got {list(q.shape) if isinstance(q, Tensor) else type(q).__name__}"
        )
    ahead, back = span(causal, window)
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, r, content_bias, position_bias, k_mem = (
            cast_for_autocast(x, dtype) for x in (q, k, r, content_bias, position_bias, k_mem)
        )
    if isinstance(r, Tensor) and r.dim() == 3 and r.size(0) == 1:
        r = r.expand(q.size(1), -1, -1)
    zeros = q.new_zeros(q.shape[1::2])
    u, w = (zeros if x is None else x for x in (content_bias, position_bias))
    start, end = broadcast_bound("start", start, q), broadcast_bound("end", end, q)
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.size(-1), 1))
    call = Call(q, k, k, r, u, w, k_mem, k_mem, start, end, None, ahead, back, zero_row, scale, 0.0)
    checks.check(call)
    if not torch.compiler.is_compiling():
        checks.check_bound_values(call)
        _check_rows(rows, q)
    p, _, _ = reference.weights(call, rows)
    return p


def _check_rows(rows: Any, q: Tensor) -> None:
    if rows is None:
        return
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1 or rows.device != q.device:
        got = f"{rows.dtype} {list(rows.shape)} on {rows.device}" if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows must be None or an int64 tensor [R] on {q.device}, got {got}")
    length = q.size(2)
    if rows.numel() and not -length <= int(rows.min()) <= int(rows.max()) < length:
        raise ValueError(
            f"rows must be queries from {-length} to {length - 1}, got values from {int(rows.min())} to {int(rows.max())}"
        )
