"""The features of torch that are active now: whether a tracer, a transform, a dispatch mode or the
profiler must see the package's operators, and whether tensors are ordinary ones."""

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

ORDINARY = (Tensor, torch.nn.Parameter)
_VERSION = operator.attrgetter("_version")
_F = TypeVar("_F", bound=Callable[..., Any])


def constant_when_traced(function: _F) -> _F:
    """Mark a function whose result torch.compile takes as a constant, instead of tracing into a
    driver, into package metadata, or into results that are stored, which would become guards.

    torch.compiler.assume_constant_result does the same, but imports the compiler, which takes a
    second at each start.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7


def _find(path: str) -> Any:
    """Return torch.<path>, or None if this torch has no such private name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# Private names of torch tell which features are active. If a version of torch lacks any of these
# names, every call goes through the dispatcher, which takes some microseconds more and is always
# correct.
_NAMES = (
    "_C._are_functorch_transforms_active", "_C._len_torch_dispatch_stack", "_C._dispatch_tls_is_dispatch_key_included",
    "_C.DispatchKey.PreDispatch", "_C._is_tracing", "_C._autograd._profiler_enabled", "_C._has_storage",
    "_C._get_deterministic_algorithms", "autograd.forward_ad", "autograd.forward_ad._current_level",
    "Tensor._is_zerotensor",
)  # fmt: skip
_found = [_find(name) for name in _NAMES]
(
    _in_functorch,
    _modes,
    _includes,
    _PRE_DISPATCH,
    _tracing,
    _profiling,
    _has_storage,
    is_deterministic,
    _forward_ad,
    *_,
) = _found
AVAILABLE = None not in _found


def is_plain(unprofiled: bool = False) -> bool:
    """Whether no tracer, transform or dispatch mode is active, so that kernels may run without the
    dispatcher; with `unprofiled`, whether no profiler is, either, which shows operators.

    A TorchFunctionMode does not count: torch.set_default_device is one.
    """
    return AVAILABLE and not (
        torch.compiler.is_compiling()
        or _in_functorch()
        or _modes()
        or _includes(_PRE_DISPATCH)
        or _tracing()
        or _forward_ad._current_level >= 0
        or (unprofiled and _profiling())
    )


def versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return the version of each tensor, which a change in place raises. Inference tensors have
    none: () if one is among them."""
    try:
        return tuple(map(_VERSION, tensors))
    except RuntimeError:
        return ()


def is_traced() -> bool:
    """Whether a compiler or tracer follows the call, so that checks must not be skipped by what
    earlier calls have stored."""
    return torch.compiler.is_compiling() or (AVAILABLE and bool(_tracing()))


def inside_functorch() -> bool:
    """Whether a transform of torch.func is active and not traced by a compiler. Without this
    private name, torch.func.grad raises torch's own error."""
    return _in_functorch is not None and not torch.compiler.is_compiling() and bool(_in_functorch())


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether all tensors are dense, of no subclass, and store their values in memory; None counts
    as ordinary.

    Others are views that negate, zeros without memory, and the batches of torch.autograd.grad,
    which look like one tensor.
    """
    return AVAILABLE and all(
        x is None
        or (
            type(x) in ORDINARY
            and x.layout is torch.strided
            and not x.is_neg()
            and not x._is_zerotensor()
            and _has_storage(x)
        )
        for x in tensors
    )


@constant_when_traced
def exporting_to_onnx() -> bool:
    """Whether torch.onnx.export is tracing. torch's own function returns False where that uses
    Dynamo."""
    return torch.onnx.is_in_onnx_export()


def exporting() -> bool:
    """Whether torch.export or torch.onnx.export is tracing. The former cannot tell before torch
    2.7."""
    return exporting_to_onnx() or _exporting()


@constant_when_traced
def is_recorded() -> bool:
    """Whether torch.export, torch.onnx.export, torch.jit.trace or make_fx records the operations of
    a call, and so keeps what Python computed.

    torch.compile, which guards it, does not count. Before torch 2.7, torch.export with
    `strict=True` cannot be told from torch.compile.
    """
    if not AVAILABLE or not (_modes() or _tracing() or _exporting()):
        return False
    proxies = _find("fx.experimental.proxy_tensor.get_proxy_mode")
    return bool(_tracing()) or _exporting() or (proxies is not None and proxies() is not None)
