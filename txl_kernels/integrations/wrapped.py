"""Wrappers that others put around a module's calls: hooks, and accelerate's offload, which keeps
the bound `forward` that the module had."""

import functools
import types

from torch import nn

_HELD = ("_old_forward", "forward")  # of an instance, by accelerate's hooks; the second is left when they are removed


def swap(module: nn.Module, kind: type) -> None:
    """Gives a module another class; bound forwards of its own class that it holds become the
    other's."""
    own = [name for name in _HELD if _is_own(module, module.__dict__.get(name))]
    module.__class__ = kind
    for name in own:
        if name == "forward":
            del module.__dict__[name]
        else:
            module.__dict__[name] = types.MethodType(kind.forward, module)  # type: ignore[attr-defined]


def is_replaced(module: nn.Module) -> bool:
    """Whether a module's forward was replaced on the instance, but for accelerate's hooks around
    its own."""
    return "forward" in module.__dict__ and not _is_offloaded(module)


def swaps_back(module: nn.Module) -> bool:
    """Whether `swap` reaches all bound forwards that a module holds."""
    return not is_replaced(module) or _is_own(module, module.__dict__["forward"])


def acts_on_calls(module: nn.Module) -> bool:
    """Whether anything happens when a module is called that does not where its attributes are read:
    hooks, a forward of the instance's, tensors that accelerate loads for a call."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    if "forward" not in module.__dict__:
        return False
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return is_replaced(module) or any(x is not None and x.device.type == "meta" for x in tensors)


def _is_own(module: nn.Module, forward: object) -> bool:
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate's hooks are around the forward of the module's class."""
    around = module.__dict__.get("forward")
    return (
        isinstance(around, functools.partial)
        and around.args[:1] == (module,)
        and hasattr(module, "_hf_hook")
        and _is_own(module, module.__dict__.get("_old_forward"))
    )
