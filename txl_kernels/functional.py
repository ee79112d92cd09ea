"""`rel_attention`: checks its arguments once, chooses a backend, calls it."""

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from txl_kernels import backends, checks
from txl_kernels.backends import cpu, reference
from txl_kernels.backends.devices import autocast_dtype
from txl_kernels.call import Call
from txl_kernels.checks.bounds import broadcast_bound
from txl_kernels.checks.tensors import KeyValuePair, memory_pair
from txl_kernels.operators import autograd, fast_path


@overload
def rel_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, content_bias: Tensor, position_bias: Tensor,
    memory: KeyValuePair | None = ..., *, causal: bool = ..., window: int | None = ...,
    start: Tensor | None = ..., end: Tensor | None = ..., zero_row: int = ..., scale: float | None = ...,
    dropout_p: float = ..., dropout_seed: Tensor | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def rel_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, content_bias: Tensor, position_bias: Tensor,
    memory: KeyValuePair | None = ..., *, causal: bool = ..., window: int | None = ...,
    start: Tensor | None = ..., end: Tensor | None = ..., zero_row: int = ..., scale: float | None = ...,
    dropout_p: float = ..., dropout_seed: Tensor | None = ..., return_lse: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def rel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    memory: KeyValuePair | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    zero_row: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with Transformer-XL's relative positions (Dai et al. 2019, section 3.3), memory
    included.

    Query i stands at key position M + i; key j of the S = M + L keys, memory first, is at distance
    d = M + i - j:

        score[i, j] = scale * ((q_i + content_bias) . k_j + (q_i + position_bias) . r[zero_row + d])
        out_i = sum_j dropout(softmax_j(score[i, j])) v_j

    Nothing of size L x S is stored by any backend but `reference`. Differentiable in all eight
    tensors.

    Args:
        q, k, v: [B, H, L, D], one floating dtype. Any strides with a contiguous last axis, as in
            all tensors here: [L, B, H, D] storage viewed by `permute(1, 2, 0, 3)` is taken without
            a copy.
        r: [H, T, D], the projected encodings W_kR R; row `zero_row + d` belongs to distance d. It
            needs a row for every distance some query sees, no more.
        content_bias, position_bias: [H, D], u and v of the paper.
        memory: None, or keys and values before the segment, ([B, H, M, D], [B, H, M, D]).
        causal: a query sees no key after its own position.
        window: None, or the number of most recent keys a query sees, its own included: distances
            0 to window - 1.
        start, end: None, or int32 tensors that broadcast to [B, L]: the query sees keys
            start <= j < end only, values in [0, M + L], intersected with `causal` and `window`.
            Where B = L, one axis could mean either and is refused: pass [B, 1] or [1, L]. A
            query that sees no key gives out 0, lse -inf and zero gradients. Values out of range
            raise (a compiled `reference` call raises only for distances r lacks); "triton" and
            "cuda" do not wait for the device to read them, and give NaN for a query whose own are
            out of range or reach a distance without a row in r.
        zero_row: row of r that holds distance 0; L - 1 if row 0 holds distance -(L - 1).
        scale: factor of the scores; None for 1 / sqrt(D).
        dropout_p: probability in [0, 1) of dropping an attention weight; apply it in training only.
        dropout_seed: None to draw a seed from torch's generator, or an int64 tensor of one element:
            the same seed drops the same entries in every backend.
        return_lse: also return the log of the softmax's denominator.
        backend: None for the fastest that can run, else "native" (C++, CPU, float32 and bfloat16)
            or "reference" (PyTorch, any device and dtype, L x S memory), or "triton" (NVIDIA GPUs,
            float32, bfloat16 and float16, head widths to 256; float32 products are formed as
            torch.set_float32_matmul_precision says), or, only by name, "cuda" (CUDA C++ for NVIDIA
            GPUs: up to 16 queries, no gradients, head widths that are multiples of 8 up to 256).

    Returns:
        out [B, H, L, D] in q's dtype; with `return_lse` also lse [B, H, L], float32 (float64 for
        float64). Under torch.autocast the tensors are cast to its dtype first.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device, shape or value, by name.
        RuntimeError: the backend asked for cannot run here, with the reason.
    """
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
    k_mem, v_mem = (None, None) if memory is None else memory_pair(memory)
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        tensors = (q, k, v, r, content_bias, position_bias, k_mem, v_mem)
        q, k, v, r, content_bias, position_bias, k_mem, v_mem = (_autocast(x, dtype) for x in tensors)
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if q.dim() else 1.0
    if (start is not None or end is not None) and q.dim() == 4:
        start, end = broadcast_bound("start", start, q), broadcast_bound("end", end, q)
    call = Call(
        q, k, v, r, content_bias, position_bias, k_mem, v_mem, start, end, None, causal, window, zero_row, scale, dropout_p
    )  # fmt: skip
    plans = fast_path.check(call)
    checks.check_seed(dropout_seed, q)
    wide = window is not None and window > 2**31  # wider than any distance, and perhaps than 64 bits
    if dropout_p > 0 or wide:
        if dropout_p > 0 and dropout_seed is None:
            dropout_seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
        seed = dropout_seed if dropout_p > 0 else None
        window = 2**31 if wide else window
        call = Call(
            q, k, v, r, content_bias, position_bias, k_mem, v_mem, start, end, seed,
            causal, window, zero_row, scale, dropout_p,
        )  # fmt: skip
    backends.check_name(backend)
    name = None if plans is None else plans.get(("backend", backend))
    if name is None:
        name = backends.choose(backend, call)
        if plans is not None and name == cpu.NAME:  # others depend on more than the call
            plans["backend", backend] = name
    if name == reference.NAME:
        if not torch.compiler.is_compiling():
            checks.check_bound_values(call)
        result: autograd.Results = reference.forward(call)
    else:
        result = autograd.rel_attention(call, name, plans, return_lse)
    out, lse = result
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _autocast(x: Any, dtype: torch.dtype) -> Any:
    """What autocast does to an argument of scaled_dot_product_attention: float64 and what is no
    float are left alone."""
    eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if eligible else x
