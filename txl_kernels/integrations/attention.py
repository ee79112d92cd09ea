"""What adapters call: masks to intervals, encodings to a table, and the attention itself."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.functional import rel_attention
from txl_kernels.masks import scan

Bounds = tuple[Tensor | None, Tensor | None]
ALL: Bounds = (None, None)
_last = threading.local()


def mask_bounds(mask: Tensor | None, seen: Callable[[Tensor], Tensor] | None = None, prefix: int = 0) -> Bounds | None:
    """(start, end) of a mask, or None if it has holes.

    Remembered for the mask that the layers of one forward share.

    Args:
        seen: makes of the mask a bool one [B, L, S] or [B, S], True where a key is seen; None where
            it is one.
        prefix: keys that every query sees; the interval is that of the others. None if some query
            does not.
    """
    if mask is None:
        return ALL
    if torch.compiler.is_compiling():
        start, end, hole = scan(mask if seen is None else seen(mask), True)
        torch._assert_async(
            hole < 0, "the mask hides a key between visible ones; txl_kernels takes one interval a query"
        )
        return start, end
    last = _remembered("masks").get(prefix)
    if last is not None and last[0]() is mask and last[1] == mask._version and last[2] is seen:
        found: Bounds | None = last[3]
        return found
    allowed = mask if seen is None else seen(mask)
    start, end, hole = scan(allowed[..., prefix:], True)
    bounds = None
    if int(hole) < 0 and (not prefix or bool(allowed[..., :prefix].all())):
        bounds = (start + prefix, end + prefix)
    _remembered("masks")[prefix] = (weakref.ref(mask), mask._version, seen, bounds)
    return bounds


def _remembered(kind: str) -> dict[int, tuple[Any, ...]]:
    """Of this thread."""
    found: dict[int, tuple[Any, ...]] = _last.__dict__.setdefault(kind, {})
    return found


def visible(mask: Tensor) -> Tensor:
    """[B, 1, L, S], bool (True: seen) or additive (0: seen) -> bool [B, L or 1, S].

    Raises:
        ValueError: an additive mask holds something else than 0 and -inf (or its dtype's lowest).
    """
    mask = mask[:, 0]
    if mask.dim() == 3 and mask.size(1) > 1 and mask.stride(1) == 0:
        mask = mask[:, :1]
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not torch.compiler.is_compiling():
        lowest = torch.finfo(mask.dtype).min
        if not bool((seen | (mask <= 0.9 * lowest)).all()):
            raise AdditiveMask
    return seen


class AdditiveMask(ValueError):
    """A mask that adds numbers to scores."""


def four_axes(mask: Any) -> str | None:
    """Why a mask of transformers' attention interface is none of ours, or None."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return "a mask of another kind"
    return None if mask.size(1) == 1 else "a mask for each head"


def project_table(project: nn.Module, encodings: Tensor, heads: int) -> Tensor:
    """Encodings [1 or B, T, d], farthest past first, -> r [H, T, D] or [B, H, T, D], farthest
    future first."""
    r: Tensor = project(encodings.flip(-2)).unflatten(-1, (heads, -1)).transpose(-3, -2)
    return r[0] if r.dim() == 4 and r.size(0) == 1 else r


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, L, H * D] -> [B, H, L, D], a view."""
    heads_apart: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return heads_apart


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, L, D] -> [B, L, H * D]."""
    return x.transpose(1, 2).flatten(-2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor | None, w: Tensor | None, bounds: Bounds, **settings: Any
) -> Tensor:
    """`rel_attention` of keys that include those before the queries: k, v [B, H, M + L, D].

    Bidirectional unless settings say otherwise.
    """
    memory_len = k.size(2) - q.size(2)
    memory = None
    if memory_len:
        memory = (k[:, :, :memory_len], v[:, :, :memory_len])
        k, v = k[:, :, memory_len:], v[:, :, memory_len:]
    start, end = (_fits(x, q) for x in bounds)
    out: Tensor = rel_attention(q, k, v, r, u, w, memory, **{"causal": False, **settings}, start=start, end=end)
    return out


def _fits(bound: Tensor | None, q: Tensor) -> Tensor | None:
    """[1 or B, 1 or L] -> [B, L], of which all but the batch may be one."""
    return bound if bound is None else bound.expand(q.size(0), q.size(2))


def dropout_of(module: nn.Module, p: float) -> float:
    """p in training."""
    return float(p) if module.training else 0.0


def pad(x: Tensor, more: int) -> Tensor:
    """The last axis filled up with zeros."""
    return F.pad(x, (0, more))


def nonzero(mask: Tensor) -> Tensor:
    """Non-zero: seen."""
    return mask if mask.dtype == torch.bool else mask != 0


def unhidden(mask: Tensor) -> Tensor:
    """Non-zero: hidden."""
    return ~mask if mask.dtype == torch.bool else mask == 0


def same_for_all(x: Tensor, axis: int = 0) -> bool:
    """Whether all of a batch have the same values along the axis; remembered for the tensor that
    layers share. Waits for a device; True while compiling."""
    if x.size(axis) == 1 or x.stride(axis) == 0 or torch.compiler.is_compiling():
        return True
    last = _remembered("encodings").get(axis)
    if last is not None and last[0]() is x and last[1] == x._version:
        return bool(last[2])
    same = bool((x == x.narrow(axis, 0, 1)).all())
    _remembered("encodings")[axis] = (weakref.ref(x), x._version, same)
    return same
