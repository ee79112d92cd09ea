"""Calls on ordinary tensors that nothing watches: they need no dispatcher, and what was checked once holds again.

torch.library's Python path costs more than a small kernel. It is needed for tracing, transforms, modes, profiling and
tensor subclasses; a call without any of these gives the same results, and the same autograd graph, without it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from txl_kernels import validate
from txl_kernels.call import Call

_ORDINARY = (Tensor, torch.nn.Parameter)
_MOST_SIGNATURES = 4096
_valid: set[tuple[Any, ...]] = set()


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether all are dense tensors of no subclass, whose memory holds their values (torch has views that negate)."""
    for x in tensors:
        if x is not None and (
            type(x) not in _ORDINARY or x.layout is not torch.strided or x.is_neg() or torch._is_zerotensor(x)
        ):
            return False
    return True


def signature(call: Call) -> tuple[Any, ...] | None:
    """All that decides whether a call is valid, but for the values in its tensors; None for what is not ordinary."""
    parts: list[Any] = []
    for x in call[:10]:
        if x is None:
            parts.append(None)
            continue
        if not isinstance(x, Tensor) or type(x) not in _ORDINARY or x.layout is not torch.strided or x.is_neg():
            return None
        parts += (x.shape, x.stride(), x.dtype, x.device)
    settings = call[11:]
    # True == 1 == 1.0 as keys, but they are not equally valid.
    return (*parts, *settings, *map(type, settings))


def check(call: Call) -> bool:
    """`validate.check`, remembered; whether all tensors are ordinary.

    Raises:
        TypeError, ValueError: as `validate.check`.
    """
    if torch.compiler.is_compiling():
        validate.check(call)
        return False
    known = signature(call)
    if known is None or known not in _valid:
        validate.check(call)
        if known is None:
            return False
        if len(_valid) >= _MOST_SIGNATURES:
            _valid.clear()
        _valid.add(known)
    return True


def unwatched() -> bool:
    """Whether no tracer, transform, mode or profiler wants to see operators."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )
