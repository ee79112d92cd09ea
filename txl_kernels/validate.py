"""Checks the arguments of `rel_attention` that shapes, dtypes and devices decide. No tensor's values are read here."""

import math
from typing import Any

import torch
from torch import Tensor

from txl_kernels import visibility
from txl_kernels.call import Call

Memory = tuple[Tensor, Tensor]


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _number(name: str, value: Any, low: float, high: float, accepted: str) -> None:
    # Not isinstance(value, Number): a torch.SymFloat or SymInt must pass through a traced call.
    if isinstance(value, (bool, Tensor, str)) or value is None:
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if not low <= value < high:
        raise ValueError(f"{name} must be {accepted}, got {value}")


def _integer(name: str, value: Any, low: int, accepted: str) -> None:
    if isinstance(value, (bool, Tensor, str, float)) or value is None:
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be {accepted}, got {value}")


def check_tensors(named: dict[str, Tensor], q: Tensor) -> None:
    """Every tensor given, dense, of q's dtype and device."""
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"q must have a floating-point dtype, got {q.dtype}")
    for name, x in named.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}; convert it or use torch.autocast")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")


def _check_last_axis(named: dict[str, Tensor]) -> None:
    for name, x in named.items():
        if x.size(-1) > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous along its last axis (stride 1), got stride {x.stride(-1)}; pass "
                f"{name}.contiguous()"
            )


def check_memory(memory: Any) -> Memory:
    """The (k_mem, v_mem) pair, as such."""
    if not isinstance(memory, (tuple, list)) or len(memory) != 2:
        got = f"{type(memory).__name__}" + (f" of length {len(memory)}" if isinstance(memory, (tuple, list)) else "")
        raise TypeError(f"memory must be None or a pair (k_mem, v_mem) of [B, H, M, D] tensors, got {got}")
    for name, x in zip(("k_mem", "v_mem"), memory, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return memory[0], memory[1]


def check_shapes(call: Call) -> None:
    """Ranks and sizes of q, k, v, the memory, r and the biases."""
    q = call.q
    if q.dim() != 4:
        raise ValueError(f"q must be [B, H, L, D], got shape {_shape(q)}")
    batch, heads, _, width = q.shape
    if width == 0:
        raise ValueError(f"q must have a head width D >= 1, got shape {_shape(q)}")
    for name, x in (("k", call.k), ("v", call.v)):
        if x.shape != q.shape:
            raise ValueError(f"{name} must be [B, H, L, D] = {_shape(q)} like q, got shape {_shape(x)}")
    if call.k_mem is not None and call.v_mem is not None:
        for name, x in (("k_mem", call.k_mem), ("v_mem", call.v_mem)):
            if x.dim() != 4 or (x.size(0), x.size(1), x.size(3)) != (batch, heads, width):
                raise ValueError(f"{name} must be [B, H, M, D] = [{batch}, {heads}, M, {width}], got shape {_shape(x)}")
        if call.k_mem.size(2) != call.v_mem.size(2):
            raise ValueError(
                f"k_mem and v_mem must have the same length M, got {call.k_mem.size(2)} and {call.v_mem.size(2)}"
            )
    if call.r.dim() != 3 or (call.r.size(0), call.r.size(2)) != (heads, width):
        raise ValueError(f"r must be [H, T, D] = [{heads}, T, {width}], got shape {_shape(call.r)}")
    for name, x in (("content_bias", call.content_bias), ("position_bias", call.position_bias)):
        if x.shape != (heads, width):
            raise ValueError(f"{name} must be [H, D] = [{heads}, {width}], got shape {_shape(x)}")
    for name, bound in (("start", call.start), ("end", call.end)):
        if bound is not None and bound.shape != (batch, q.size(2)):
            raise ValueError(f"{name} must be [B, L] = [{batch}, {q.size(2)}], got shape {_shape(bound)}")


def interval_bound(name: str, bound: Any, q: Tensor) -> Tensor | None:
    """`start` or `end` as an int32 [B, L] view.

    Raises:
        TypeError, ValueError: not an integer tensor on q's device that broadcasts to [B, L].
    """
    if bound is None:
        return None
    if not isinstance(bound, Tensor):
        raise TypeError(f"{name} must be None or an int32 tensor broadcastable to [B, L], got {type(bound).__name__}")
    if bound.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (or int64), got {bound.dtype}")
    if bound.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {bound.device}")
    target = (q.size(0), q.size(2))
    if bound.dim() > 2 or any(a not in (1, b) for a, b in zip(bound.shape[::-1], target[::-1], strict=False)):
        raise ValueError(f"{name} must broadcast to [B, L] = {list(target)}, got shape {_shape(bound)}")
    if bound.dtype == torch.int64:  # what does not fit in 32 bits must stay out of range
        bound = bound.clamp(-1, 2**31 - 1).to(torch.int32)
    view: Tensor = bound.expand(target)
    return view


def check_settings(call: Call) -> None:
    """Numbers and switches, and a table r that reaches as far as `causal` and `window` alone let a query see."""
    if not isinstance(call.causal, bool):
        raise TypeError(f"causal must be True or False, got {type(call.causal).__name__}")
    if call.window is not None:
        _integer("window", call.window, 1, "None or an integer >= 1 (keys seen, the query's own included)")
    _integer("zero_row", call.zero_row, 0, "an integer >= 0 (the row of r that holds distance 0)")
    _number("scale", call.scale, -math.inf, math.inf, "None or a finite number")
    if call.scale == -math.inf:
        raise ValueError("scale must be None or a finite number, got -inf")
    _number("dropout_p", call.dropout_p, 0.0, 1.0, "a number in [0, 1)")
    if call.start is None and call.end is None:
        visibility.require_table(call, *visibility.distance_range(call))


def check_seed(seed: Any, q: Tensor) -> None:
    """A dropout seed: an int64 tensor of one element on q's device."""
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
        got = f"{seed.dtype} {_shape(seed)} on {seed.device}" if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"dropout_seed must be None or an int64 tensor of one element on {q.device}, got {got}")


def check(call: Call) -> None:
    """All of the above for a call whose optional arguments are in place."""
    tensors = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "r": call.r,
        "content_bias": call.content_bias,
        "position_bias": call.position_bias,
    }
    if (call.k_mem is None) != (call.v_mem is None):
        raise TypeError("k_mem and v_mem must both be given or both be None, got one of them")
    if call.k_mem is not None and call.v_mem is not None:
        tensors["k_mem"], tensors["v_mem"] = call.k_mem, call.v_mem
    check_tensors(tensors, call.q)
    for name, bound in (("start", call.start), ("end", call.end)):
        if bound is not None and (bound.dtype != torch.int32 or bound.device != call.q.device):
            raise TypeError(f"{name} must be int32 on {call.q.device}, got {bound.dtype} on {bound.device}")
    check_shapes(call)
    _check_last_axis(tensors)
    check_settings(call)


def check_backward(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Checks what a kernel's backward gets beside the call; returns dout and dlse as kernels read them.

    That is dout in q's dtype with a contiguous last axis, dlse contiguous and float32.
    """
    for name, x, shape in (
        ("out", out, call.q.shape),
        ("dout", dout, call.q.shape),
        ("lse", lse, call.q.shape[:3]),
        ("dlse", dlse, call.q.shape[:3]),
    ):
        if x is not None and (x.shape != shape or x.device != call.q.device):
            raise ValueError(f"{name} must be {list(shape)} on {call.q.device}, got {list(x.shape)} on {x.device}")
    rows = out.size(-1) <= 1 or out.stride(-1) == 1
    if out.dtype != call.q.dtype or not rows or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError("out and lse must be as the forward operator returned them")
    dout = dout.to(call.q.dtype)
    if dout.size(-1) > 1 and dout.stride(-1) != 1:
        dout = dout.contiguous()
    return dout, None if dlse is None else dlse.float().contiguous()
