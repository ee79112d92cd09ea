"""The eight tensors: type, dtype, device, layout, shape, strides."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.call import Call
from txl_kernels.call.fields import INPUTS, inputs_of

KeyValuePair = tuple[Tensor, Tensor]


def check_tensors(call: Call) -> None:
    """Dense tensors of q's dtype and device whose shapes fit each other and whose last axis is
    contiguous."""
    if (call.k_mem is None) != (call.v_mem is None):
        raise TypeError("k_mem and v_mem must both be given or both be None, got one of them")
    inputs: dict[str, Any] = dict(zip(INPUTS, inputs_of(call), strict=True))
    given = {name: x for name, x in inputs.items() if x is not None or name not in ("k_mem", "v_mem")}
    _check_kind(given, call.q)
    _check_shapes(call)
    _check_last_axis(given)


def memory_pair(memory: Any) -> KeyValuePair:
    """The (k_mem, v_mem) pair, as such.

    Raises:
        TypeError: it is no pair of tensors.
    """
    if not isinstance(memory, (tuple, list)) or len(memory) != 2:
        got = f"{type(memory).__name__}" + (f" of length {len(memory)}" if isinstance(memory, (tuple, list)) else "")
        raise TypeError(f"memory must be None or a pair (k_mem, v_mem) of [B, H, M, D] tensors, got {got}")
    for name, x in zip(("k_mem", "v_mem"), memory, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return memory[0], memory[1]


def _check_kind(given: dict[str, Any], q: Tensor) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"q must have a floating-point dtype, got {q.dtype}")
    for name, x in given.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}; convert it or use torch.autocast")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")


def _check_shapes(call: Call) -> None:
    q = call.q
    if q.dim() != 4:
        raise ValueError(f"q must be [B, H, L, D], got shape {list(q.shape)}")
    batch, heads, _, width = q.shape
    if width == 0:
        raise ValueError(f"q must have a head width D >= 1, got shape {list(q.shape)}")
    for name, x in (("k", call.k), ("v", call.v)):
        if x.shape != q.shape:
            raise ValueError(f"{name} must be [B, H, L, D] = {list(q.shape)} like q, got shape {list(x.shape)}")
    if call.k_mem is not None and call.v_mem is not None:
        for name, x in (("k_mem", call.k_mem), ("v_mem", call.v_mem)):
            if x.dim() != 4 or (x.size(0), x.size(1), x.size(3)) != (batch, heads, width):
                wanted = f"[B, H, M, D] = [{batch}, {heads}, M, {width}]"
                raise ValueError(f"{name} must be {wanted}, got shape {list(x.shape)}")
        if call.k_mem.size(2) != call.v_mem.size(2):
            lengths = f"{call.k_mem.size(2)} and {call.v_mem.size(2)}"
            raise ValueError(f"k_mem and v_mem must have the same length M, got {lengths}")
    if call.r.dim() != 3 or (call.r.size(0), call.r.size(2)) != (heads, width):
        raise ValueError(f"r must be [H, T, D] = [{heads}, T, {width}], got shape {list(call.r.shape)}")
    for name, x in (("content_bias", call.content_bias), ("position_bias", call.position_bias)):
        if x.shape != (heads, width):
            raise ValueError(f"{name} must be [H, D] = [{heads}, {width}], got shape {list(x.shape)}")


def _check_last_axis(given: dict[str, Tensor]) -> None:
    for name, x in given.items():
        if x.size(-1) > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous along its last axis (stride 1), got stride {x.stride(-1)}; pass "
                f"{name}.contiguous()"
            )
