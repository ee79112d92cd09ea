"""Outputs and gradients of a case of `peer_cases`, and their comparison."""

import torch
from torch import Tensor, nn

from implementations.peer_cases import PeerCase


def both(
    case: PeerCase,
    module: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    gradients: bool = True,
    random: bool = True,
) -> dict[str, Tensor]:
    """Return the output where it counts, and the gradients of the input and of all parameters of a
    fixed functional of it.

    module: taken instead of the case's own.
    random: whether the functional's weights are; else they are the same for all frames.
    """
    module = case.module if module is None else module
    torch.manual_seed(5)  # dropout
    x = case.x.to(dtype, copy=True).requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        out = case.call(module, x)
    found = {"out": out.detach()[case.valid]}
    if gradients:
        weight = torch.linspace(-1, 1, out.size(-1))
        if random:
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        module.zero_grad()
        (out * weight * case.valid.unsqueeze(-1)).sum().backward()
        named = {"x": x, **dict(module.named_parameters())}
        found |= {n: p.grad for n, p in named.items() if p.grad is not None}
    return {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in found.items()}


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    """Compare with the greatest value of each tensor, or of all if it is zero but for rounding, as
    the gradient of a bias of keys."""
    assert ours.keys() == theirs.keys()
    largest = max(float(x.abs().max()) for x in theirs.values())
    for name, want in theirs.items():
        scale = max(float(want.abs().max()), 1e-3 * largest)
        assert float((ours[name] - want).abs().max()) <= tolerance * scale, name
