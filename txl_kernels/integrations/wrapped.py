"""Wrappers around a module's calls: hooks, and the offload of Hugging Face's accelerate, which
stores the module's bound `forward`."""

import functools
import types

from torch import nn

_HELD = ("_old_forward", "forward")  # set on an instance by accelerate's hooks; the second remains


def swap(module: nn.Module, kind: type) -> None:
    """Change a module's class. Bound forwards of its own class that the instance holds are replaced
    by the new class'."""
    own = [name for name in _HELD if _is_own(module, module.__dict__.get(name))]
    module.__class__ = kind
    for name in own:
        if name == "forward":
            del module.__dict__[name]
        else:
            module.__dict__[name] = types.MethodType(kind.forward, module)  # type: ignore[attr-defined]


def is_replaced(module: nn.Module) -> bool:
    """Whether a module's forward was replaced on the instance by something other than accelerate's
    hooks around its own."""
    return "forward" in module.__dict__ and not _is_offloaded(module)


def swaps_back(module: nn.Module) -> bool:
    """Whether `swap` replaces all bound forwards that a module holds."""
    return not is_replaced(module) or _is_own(module, module.__dict__["forward"])


def acts_on_calls(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class' forward on its tensors: hooks, a forward
    replaced on the instance, or tensors that accelerate loads for a call."""
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
    """Whether accelerate's hooks wrap the forward of the module's class."""
    around = module.__dict__.get("forward")
    return (
        isinstance(around, functools.partial)
        and around.args[:1] == (module,)
        and hasattr(module, "_hf_hook")
        and _is_own(module, module.__dict__.get("_old_forward"))
    )
