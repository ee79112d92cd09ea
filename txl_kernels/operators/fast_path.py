"""Calls on ordinary tensors that nothing watches: they need no dispatcher, and what was checked
once holds again.

torch.library's Python path costs more than a small kernel. It is needed for tracing, transforms,
modes, profiling and tensor subclasses; a call without any of these gives the same results, and the
same autograd graph, without it.
"""

from typing import Any

import torch
from torch import Tensor

from txl_kernels import checks
from txl_kernels.backends import cpu
from txl_kernels.backends.protocol import Plans
from txl_kernels.call import Call

_ORDINARY = (Tensor, torch.nn.Parameter)
_MOST_SIGNATURES = 4096
_known: dict[bytes, Plans] = {}


def _find(path: str) -> Any:
    """torch.<path>; None where this torch has no such private name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# Who may watch a call: private names of torch, any of which another version may lack. Then no call
# is ordinary and every one takes the dispatcher, which is slower by some microseconds and always
# right.
_NAMES = (
    "_C._are_functorch_transforms_active", "_C._len_torch_dispatch_stack",
    "_ops._len_torch_dispatch_stack_pre_dispatch", "_C._is_tracing", "_C._autograd._profiler_enabled", "_C._has_storage",
    "autograd.forward_ad", "autograd.forward_ad._current_level", "Tensor._is_zerotensor",
)  # fmt: skip
_found = [_find(name) for name in _NAMES]
in_functorch, _modes, _pre_dispatch_modes, _tracing, _profiling, _has_storage, _forward_ad, *_ = _found
AVAILABLE = None not in _found


def is_open() -> bool:
    """Whether no tracer, transform, dispatch mode or profiler wants to see operators.

    A TorchFunctionMode does not count: torch.set_default_device is one.
    """
    return AVAILABLE and not (
        torch.compiler.is_compiling()
        or in_functorch()
        or _modes()
        or _pre_dispatch_modes()
        or _tracing()
        or _profiling()
        or _forward_ad._current_level >= 0
    )


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether all are dense tensors of no subclass, whose memory holds their values.

    Torch has views that negate, zeros without memory, and batches (of torch.autograd.grad) that
    look like one tensor.
    """
    return AVAILABLE and all(
        x is None
        or (
            type(x) in _ORDINARY
            and x.layout is torch.strided
            and not x.is_neg()
            and not x._is_zerotensor()
            and _has_storage(x)
        )
        for x in tensors
    )


def signature(call: Call) -> bytes | None:
    """All that decides whether a call is valid, but for the values in its tensors; None for what is
    not ordinary.

    None, too, without the C++ module: then every call is checked anew.
    """
    module = cpu.native.module
    if module is None or not AVAILABLE:
        return None
    key: bytes | None = module.signature(call, _ORDINARY, torch.strided)
    return key


def known(call: Call) -> Plans | None:
    """What `check` returned for a call of this signature; None if there was none, or it is not
    ordinary."""
    key = None if torch.compiler.is_compiling() else signature(call)
    return None if key is None else _known.get(key)


def check(call: Call) -> Plans | None:
    """`checks.check`, remembered: what else is remembered of such calls; None if the call is not
    ordinary.

    Raises:
        TypeError, ValueError: as `checks.check`.
    """
    if torch.compiler.is_compiling():
        checks.check(call)
        return None
    key = signature(call)
    plans = None if key is None else _known.get(key)
    if plans is None:
        checks.check(call)
        if key is None:
            return None
        if len(_known) >= _MOST_SIGNATURES:
            _known.clear()
        plans = _known[key] = {}
    return plans
