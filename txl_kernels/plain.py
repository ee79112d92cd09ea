"""Calls on ordinary tensors that nothing watches: they need no dispatcher, and what was checked once holds again.

torch.library's Python path costs more than a small kernel. It is needed for tracing, transforms, modes, profiling and
tensor subclasses; a call without any of these gives the same results, and the same autograd graph, without it.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad

from txl_kernels import native, validate
from txl_kernels.call import Call

_ORDINARY = (Tensor, torch.nn.Parameter)
_MOST_SIGNATURES = 4096
Memo = dict[Any, Any]
_known: dict[bytes, Memo] = {}


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether all are dense tensors of no subclass, whose memory holds their values.

    Torch has views that negate, zeros without memory, and batches (of torch.autograd.grad) that look like one tensor.
    """
    for x in tensors:
        if x is not None and (
            type(x) not in _ORDINARY
            or x.layout is not torch.strided
            or x.is_neg()
            or x._is_zerotensor()
            or not torch._C._has_storage(x)
        ):
            return False
    return True


def signature(call: Call) -> bytes | None:
    """All that decides whether a call is valid, but for the values in its tensors; None for what is not ordinary.

    None, too, without the C++ module: then every call is checked anew.
    """
    if native.module is None:
        return None
    key: bytes | None = native.module.signature(call, _ORDINARY, torch.strided)
    return key


def check(call: Call) -> Memo | None:
    """`validate.check`, remembered: what else is remembered of such calls; None: not ordinary.

    Raises:
        TypeError, ValueError: as `validate.check`.
    """
    if torch.compiler.is_compiling():
        validate.check(call)
        return None
    key = signature(call)
    memo = None if key is None else _known.get(key)
    if memo is None:
        validate.check(call)
        if key is None:
            return None
        if len(_known) >= _MOST_SIGNATURES:
            _known.clear()
        memo = _known[key] = {}
    return memo


def unwatched() -> bool:
    """Whether no tracer, transform, dispatch mode or profiler wants to see operators.

    A TorchFunctionMode does not count: torch.set_default_device is one.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )
