"""Reuse of projections between streaming steps: of encodings that do not change, and of cached
frames.

A step of a cache-aware encoder has few new frames and many old ones. With `streaming=True` of
`accelerate`, projections are kept and used again for the same values and parameters. They are not
saved or copied with the module. This is done only without gradients and on a CPU: on other devices
the comparison of values would synchronize. Parameters are compared by their version, which does not
change when they are modified through `.data`; therefore the user must ask for it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.linear import plain_weight
from txl_kernels.torch_state import is_plain

FEW = 4  # least ratio of rows to project to new frames for which results are kept
_kept: "weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, ...]]]" = weakref.WeakKeyDictionary()


def again(
    module: nn.Module,
    name: str,
    projections: tuple[nn.Module, ...],
    x: Tensor,
    frames: int,
    project: Callable[[], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Return project(), or the result that `keep` or an earlier call kept for an equal x and the
    same parameters.

    x: the tensor that project() depends on besides parameters. frames: the number of new frames in
    this call.
    """
    if not worth_keeping(module, projections, x, frames):
        return project()
    found = _kept.get(module, {}).get(name)
    if found is not None:
        _, key, before, version, result = found
        if key == _key(projections) and version == _version(before) and _same(before, x):
            kept: tuple[Tensor, ...] = result
            return kept
    result = project()
    keep(module, name, projections, x, result)
    return result


def keep(
    module: nn.Module, name: str, projections: tuple[nn.Module, ...], x: Tensor, result: tuple[Tensor, ...]
) -> None:
    """Keep a result for a later `again` with an equal x."""
    parameters = _parameters(projections)  # keeps them alive, so that no other tensor gets their address
    x = x.clone() if x.is_inference() else x  # an inference tensor may change without a new version
    _kept.setdefault(module, {})[name] = (parameters, _key(projections), x, _version(x), result)


def forget(module: Any) -> None:
    """Drop the results that were kept for a module."""
    _kept.pop(module, None)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _same(before: Tensor, x: Tensor) -> bool:
    return before is x or (before.shape == x.shape and torch.equal(before, x))


def worth_keeping(module: Any, projections: tuple[nn.Module, ...], x: Tensor, frames: int) -> bool:
    """Whether results may be kept, and are worth it."""
    return (
        bool(module.setting("streaming"))
        and not torch.is_grad_enabled()
        and is_plain()  # tangents, for example, change neither address nor version
        and x.device.type == "cpu"
        and x.size(-2) >= FEW * frames
        and not torch.is_autocast_enabled("cpu")
        and all(_plain(p) for p in projections)
    )


def _plain(projection: nn.Module) -> bool:
    """Whether a projection is a linear layer without wrappers, whose parameters have versions."""
    return plain_weight(projection) is not None and not any(p.is_inference() for p in _own(projection))


def _parameters(projections: tuple[nn.Module, ...]) -> tuple[Tensor, ...]:
    return tuple(p.detach() for projection in projections for p in _own(projection))


def _own(projection: nn.Module) -> tuple[Tensor, ...]:
    """Return weight and bias of a linear layer. `parameters()` would take longer than the
    comparison."""
    found = projection._parameters
    return tuple(p for p in (found["weight"], found["bias"]) if p is not None)


def _key(projections: tuple[nn.Module, ...]) -> tuple[Any, ...]:
    now = [p for projection in projections for p in _own(projection)]
    return tuple((p.data_ptr(), p._version, p.dtype, p.shape) for p in now)
