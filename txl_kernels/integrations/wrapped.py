"""Wrappers around a module's calls: hooks, and the offload of Hugging Face's accelerate, which
stores the module's bound `forward`."""

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from txl_kernels.linear import has_global_hook, has_hooks

_FORWARDS = ("_old_forward", "forward")  # set on an instance by accelerate's hooks; the second remains


def set_class(module: nn.Module, kind: type) -> None:
    """Change a module's class. Bound forwards of its own class that the instance holds are replaced
    by the new class'."""
    own = [name for name in _FORWARDS if _is_class_forward(module, module.__dict__.get(name))]
    module.__class__ = kind
    for name in own:
        if name == "forward":
            del module.__dict__[name]
        else:
            module.__dict__[name] = types.MethodType(kind.forward, module)  # type: ignore[attr-defined]


def has_replaced_forward(module: nn.Module) -> bool:
    """Whether a module's forward was replaced on the instance by something other than accelerate's
    hooks around its own, or the bound forward that they leave."""
    own = module.__dict__.get("forward")
    return own is not None and not _is_class_forward(module, own) and not _is_offloaded(module)


def replaced_method(module: nn.Module) -> str | None:
    """Return the name of a method of a module's class, forward or one of the class' own, that was
    replaced on the instance; None if there is none."""
    if has_replaced_forward(module):
        return "forward"
    kind = type(module)
    for name in module.__dict__:
        if isinstance(getattr(kind, name, None), types.FunctionType) and not hasattr(nn.Module, name):
            return name
    return None


def why_not_skipped(part: nn.Module, forwards: Mapping[type, Any]) -> str | None:
    """Return the reason why a module must be called, and its parameters may not be read instead, or
    None: it is not exactly of a known class with the class' own forward, hooks act on its calls, or
    accelerate loads its tensors for a call.

    forwards: the known classes, with their forwards.
    """
    kind = type(part)
    if forwards.get(kind) is not kind.forward:
        return "another class or forward"
    if has_hooks(part) or (not torch.compiler.is_compiling() and has_global_hook()):
        return "hooks"
    if "forward" not in part.__dict__:
        return None
    if has_replaced_forward(part):
        return "another class or forward"
    tensors = [*part._parameters.values(), *part._buffers.values()]
    return "hooks" if any(x is not None and x.device.type == "meta" for x in tensors) else None


def _is_class_forward(module: nn.Module, forward: object) -> bool:
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate's hooks wrap the forward of the module's class."""
    around = module.__dict__.get("forward")
    return (
        isinstance(around, functools.partial)
        and around.args[:1] == (module,)
        and hasattr(module, "_hf_hook")
        and _is_class_forward(module, module.__dict__.get("_old_forward"))
    )
