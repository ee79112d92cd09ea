"""h_t = a_t * h_{t-1} + b_t along time, which is all that is sequential in a QRNN."""

from typing import Any

import torch
from torch import Tensor


def by_steps(a: Tensor, b: Tensor, before: Tensor) -> Tensor:
    """One fused multiply-add a step: what a CPU does fastest."""
    states = torch.empty_like(b)
    last = before
    for t in range(b.size(0)):
        last = torch.addcmul(b[t], a[t], last, out=states[t])
    return states


def by_doubling(a: Tensor, b: Tensor, before: Tensor) -> Tensor:
    """A scan in log2(L) steps over all positions at once (Hillis and Steele 1986), for GPUs."""
    states = b.clone()
    states[0] = torch.addcmul(b[0], a[0], before)
    factors, distance = a, 1
    while distance < b.size(0):
        later = torch.addcmul(states[distance:], factors[distance:], states[:-distance])
        states = torch.cat([states[:distance], later])
        factors = torch.cat([factors[:distance], factors[distance:] * factors[:-distance]])
        distance *= 2
    return states


def _scan(a: Tensor, b: Tensor, before: Tensor) -> Tensor:
    return (by_doubling if b.device.type == "cuda" else by_steps)(a, b, before)


class _LinearRecurrence(torch.autograd.Function):
    """Its own backward is a scan, too, from the last position to the first."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, before: Tensor) -> Tensor:
        states = _scan(a, b, before)
        ctx.save_for_backward(a, before, states)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, before, states = ctx.saved_tensors
        grad = grads[0].flip(0)
        # g_t = grad_t + a_{t+1} * g_{t+1}; flipped, a is one place later.
        factors = torch.cat([torch.zeros_like(a[:1]), a[1:].flip(0)])
        g = _scan(factors, grad, torch.zeros_like(before)).flip(0)
        previous = torch.cat([before.unsqueeze(0), states[:-1]])
        return g * previous, g, g[0] * a[0]


def linear_recurrence(a: Tensor, b: Tensor, before: Tensor) -> Tensor:
    """States h_t = a_t * h_{t-1} + b_t.

    Args:
        a, b: [L, ..], L >= 1, of one dtype.
        before: [..], h_0's predecessor.

    Returns:
        [L, ..]; gradients reach all three.
    """
    states: Tensor = _LinearRecurrence.apply(a, b, before)  # type: ignore[no-untyped-call]
    return states
