"""`start` and `end`, and whether r has a row for every distance that stays visible."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.call import Call
from txl_kernels.call.fields import BOUNDS, is_bounded, memory_len_of
from txl_kernels.call.intervals import distance_range, intervals


def broadcast_bound(name: str, bound: Any, q: Tensor) -> Tensor | None:
    """What a user gave as `start` or `end`, as an int32 [B, L] view.

    Raises:
        TypeError, ValueError: not an integer tensor on q's device that broadcasts to [B, L], or of
            one axis where that could be the batch as well as the queries.
    """
    if bound is None:
        return None
    if not isinstance(bound, Tensor):
        raise TypeError(f"{name} must be None or an int32 tensor broadcastable to [B, L], got {type(bound).__name__}")
    if bound.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (or int64), got {bound.dtype}")
    if bound.layout != torch.strided or bound.is_nested:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {bound.layout}")
    if bound.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {bound.device}")
    target = (q.size(0), q.size(2))
    if bound.dim() > 2 or any(a not in (1, b) for a, b in zip(bound.shape[::-1], target[::-1], strict=False)):
        raise ValueError(
            f"{name} must broadcast to [B, L] = {list(target)}, got shape {list(bound.shape)}{_of_lengths(name, bound, q)}"
        )
    if bound.dim() == 1 and target[0] == target[1] > 1 and bound.size(0) > 1:
        raise ValueError(
            f"{name} must say whether it holds a value for each text or for each query where B = L = {target[0]}: pass "
            f"{name}[:, None] or {name}[None, :], got shape {list(bound.shape)}{_of_lengths(name, bound, q)}"
        )
    view: Tensor = to_int32(bound).expand(target)
    return view


def _of_lengths(name: str, bound: Tensor, q: Tensor) -> str:
    return f"; for lengths [B] take {name}_from_lengths(lengths)" if bound.shape == q.shape[:1] else ""


def to_int32(bound: Tensor) -> Tensor:
    """An int32 or int64 bound as int32; what does not fit in 32 bits stays out of range."""
    return bound if bound.dtype == torch.int32 else bound.clamp(-1, 2**31 - 1).to(torch.int32)


def check_bounds(call: Call) -> None:
    """int32 [B, L] on q's device."""
    shape = (call.q.size(0), call.q.size(2))
    for name, bound in zip(BOUNDS, (call.start, call.end), strict=True):
        if bound is None:
            continue
        if bound.dtype != torch.int32 or bound.device != call.q.device:
            raise TypeError(f"{name} must be int32 on {call.q.device}, got {bound.dtype} on {bound.device}")
        if bound.shape != shape:
            raise ValueError(f"{name} must be [B, L] = {list(shape)}, got shape {list(bound.shape)}")


def check_table(call: Call) -> None:
    """r reaches as far as `ahead` and `window` alone let a query see; with bounds their values
    decide."""
    if not is_bounded(call):
        _require_rows(call, *distance_range(call))


def check_bound_values(call: Call) -> None:
    """Reads `start` and `end`: values in [0, S], and no visible distance without a row in r.

    Raises:
        ValueError: with the argument, the value given, and what is accepted.
    """
    if not is_bounded(call):
        return
    keys = memory_len_of(call) + call.q.size(2)
    for name, bound in zip(BOUNDS, (call.start, call.end), strict=True):
        if bound is not None and bound.numel() and (int(bound.min()) < 0 or int(bound.max()) > keys):
            raise ValueError(
                f"{name} must hold key indices in [0, M + L] = [0, {keys}], got values from {int(bound.min())} to "
                f"{int(bound.max())}"
            )
    if _has_rows(call, *distance_range(call)):
        return
    low, high = intervals(call)
    at = torch.arange(memory_len_of(call), keys, device=call.q.device)
    seen = low < high
    if bool(seen.any()):
        nearest = int((at - high + 1).expand_as(seen)[seen].min())
        farthest = int((at - low).expand_as(seen)[seen].max())
        _require_rows(call, nearest, farthest)


def _has_rows(call: Call, nearest: int, farthest: int) -> bool:
    """Whether r has a row for every distance of [nearest, farthest]."""
    return nearest > farthest or (nearest + call.zero_row >= 0 and farthest + call.zero_row < call.r.size(1))


def _require_rows(call: Call, nearest: int, farthest: int) -> None:
    if not _has_rows(call, nearest, farthest):
        need_zero = max(call.zero_row, -nearest)
        raise ValueError(
            f"r has {call.r.size(1)} rows with distance 0 in row zero_row={call.zero_row}, so distances "
            f"{-call.zero_row} to {call.r.size(1) - 1 - call.zero_row}, but distances {nearest} to {farthest} are "
            f"visible: r needs {need_zero + farthest + 1} rows with zero_row={need_zero}"
        )
