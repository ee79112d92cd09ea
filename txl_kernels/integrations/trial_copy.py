"""Copies of a module for a trial (trial.py)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.integrations.peer import RandomInputs


def copied(module: nn.Module, omitted: tuple[str, ...]) -> nn.Module:
    """Return a float32 copy of a module on the CPU, without hooks.

    omitted: names of submodules that an empty list replaces.
    """
    left_out = [x for name in omitted for x in module.get_submodule(name).modules()]
    parts: list[Any] = [x for x in module.modules() if not any(x is y for y in left_out)]
    twins: dict[int, Any] = {id(x): x.__class__.__new__(x.__class__) for x in parts}
    memo: dict[int, Any] = dict(twins)  # of deepcopy: bound methods, for example, refer to the copies

    def tensor(x: Any) -> Any:
        if x is not None and id(x) not in memo:
            made = x.detach().to("cpu", torch.float32 if x.is_floating_point() else x.dtype, copy=True)
            memo[id(x)] = nn.Parameter(made) if isinstance(x, nn.Parameter) else made
        return memo.get(id(x))

    for part in parts:
        twin = twins[id(part)]
        nn.Module.__init__(twin)
        twin.training = part.training
        twin._parameters = {name: tensor(x) for name, x in part._parameters.items()}
        twin._buffers = {name: tensor(x) for name, x in part._buffers.items()}
        twin._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
        twin._modules = {name: twins.get(id(x), nn.ModuleList()) for name, x in part._modules.items() if x is not None}
        twin._modules |= {name: None for name, x in part._modules.items() if x is None}
    for part in parts:
        own = twins[id(part)].__dict__
        for name, value in part.__dict__.items():
            if name not in own:
                own[name] = tensor(value) if isinstance(value, Tensor) else copy.deepcopy(value, memo)
    return twins[id(module)]  # type: ignore[no-any-return]


def perturb(module: nn.Module) -> None:
    """Change what is loaded with parameters and often equal at first, and make dropout
    probabilities differ."""
    inputs = RandomInputs(0)
    with torch.no_grad():
        for p in {id(x): x for x in module.state_dict(keep_vars=True).values() if x.is_floating_point()}.values():
            if p.dim() <= 1 or bool((p == p.flatten()[0]).all()):
                p.add_(0.3 * inputs.normal(*p.shape))
            elif p.numel() < 2**14:  # tables and biases of heads
                p.add_(0.02 * inputs.normal(*p.shape))
    for number, (owner, name) in enumerate(_dropouts_of(module)):
        owner[name] = 0.1 + 0.3 / (number + 2)


def _dropouts_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the dictionaries and names of dropout probabilities, of modules and configurations."""
    found = []
    for part in module.modules():
        for owner in (vars(part), getattr(getattr(part, "config", None), "__dict__", {})):
            for name, value in owner.items():
                if type(value) is float and ("drop" in name or (name == "p" and isinstance(part, nn.Dropout))):
                    found.append((owner, name))
    return found


def copy_dropout(module: nn.Module, twin: nn.Module) -> None:
    """Give a copy of a module the module's dropout probabilities."""
    for (owner, name), (own, _) in zip(_dropouts_of(module), _dropouts_of(twin), strict=True):
        own[name] = owner[name]
