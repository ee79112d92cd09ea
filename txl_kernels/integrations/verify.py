"""The comparison of an adapter with a module that resembles a known layer but has other source:
both must compute the same."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.integrations.peer import STATE, Accelerated, Peer, RandomInputs, new_state
from txl_kernels.integrations.registry import accelerated_class
from txl_kernels.integrations.wrapped import set_class

TOLERANCE = 2e-4  # relative to the largest value of a tensor; another formula differs by much more


def difference(module: nn.Module, peer: Peer, ancestors: Sequence[nn.Module]) -> str | None:
    """Return how a module differs from the peer's adapter on small random inputs, or None if it
    does not.

    Both run as float32 copies on the CPU in evaluation mode, with perturbed parameters (many are
    initially zero): without a mask, with padding, and with limited context. Outputs, and gradients
    of the input and of parameters, are compared. Dropout, caches and everything else that these
    calls do not use are not compared.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # for tensors that the module creates; so is the device
    try:
        with torch.device("cpu"):
            return _difference(module, peer, ancestors)
    except Exception as error:  # a module that raises any error is refused
        return f"it raises {type(error).__name__}: {error}"
    finally:
        torch.set_default_dtype(default)


def _difference(module: nn.Module, peer: Peer, ancestors: Sequence[nn.Module]) -> str | None:
    slow = _perturbed(module)
    fast = copy.deepcopy(slow)
    fast.__dict__[STATE] = new_state(weights="none", **peer.adapter.settings_from(ancestors))
    set_class(fast, accelerated_class(peer, type(module)))
    frames = peer.adapter.sample_length(slow)
    for label, seen in _masks(frames):
        sample = peer.adapter.sample(slow, RandomInputs(frames), seen)
        if sample is None:
            return f"there is no input to try {peer.name} with"
        x, call = sample
        theirs, ours = _run(slow, x, call), _run(fast, x, call)
        for name, wanted in theirs.items():
            found = ours.get(name)
            if found is None or found.shape != wanted.shape:
                return f"{label}: no {name} like its own"
            error = float((found - wanted).abs().max())
            largest = float(wanted.abs().max())
            if not error <= TOLERANCE * largest + 1e-5:
                return f"{label}: {name} is off by {error:.2g}, of at most {largest:.2g}"
    if isinstance(fast, Accelerated) and fast.fallbacks:
        return "its own code had to answer: " + "; ".join(fast.fallbacks)
    return None


def _perturbed(module: nn.Module) -> nn.Module:
    inputs = RandomInputs(0)
    slow = copy.deepcopy(module).to("cpu", torch.float32).eval()
    with torch.no_grad():
        for p in slow.parameters():
            p.add_(0.3 * inputs.normal(*p.shape) if p.dim() == 1 or not p.any() else 0.02 * inputs.normal(*p.shape))
            p.requires_grad_()
    return slow


def _masks(T: int) -> Iterator[tuple[str, Tensor | None]]:
    at = torch.arange(T, device="cpu")
    padding = (at < torch.tensor([T, T - 4], device="cpu").view(-1, 1, 1)).expand(RandomInputs.B, T, T)
    distance = at.unsqueeze(1) - at
    yield "without a mask", None
    yield "with padding", padding
    yield "with limited context", ((distance <= 4) & (distance >= -2)).expand(RandomInputs.B, T, T)


def _run(module: nn.Module, x: Tensor, call: Any) -> dict[str, Tensor]:
    """Return the output and gradients, by name; only the output if the module has no gradients on a
    CPU (FlexAttention)."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        x = x.clone().requires_grad_()
        try:
            out = call(module, x)
        except NotImplementedError:
            with torch.no_grad():
                return {"the output": call(module, x)}
        named = {"the gradient of its input": x}
        named |= {f"the gradient of {name}": p for name, p in module.named_parameters()}
        weight = RandomInputs(0).normal(*out.shape)
        found = torch.autograd.grad((out * weight).sum(), list(named.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(named, found, strict=True) if g is not None}
    return {"the output": out.detach(), **gradients}
