"""Attention over a window of the keys."""

import torch
from torch import Tensor

from harness.case import Shape
from harness.checks import require
from harness.machine import Machine
from implementations.attention import Compute
from implementations.attention_entry import split_gradients
from implementations.inputs import NAMES, Inputs, make_inputs
from txl_kernels import rel_attention

WINDOW = 128


def windowed(x: Inputs, backend: str | None = None, window: int = WINDOW) -> Tensor:
    return rel_attention(*(x[n] for n in NAMES), (x["k_mem"], x["v_mem"]), window=window, backend=backend)


def check_window(call: Compute, machine: Machine, backward: bool) -> None:
    """Refuses what differs from the float64 reference with a window."""
    inputs = make_inputs(Shape(1, 2, 70, 200, 64), machine.dtype, machine.device)
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    got, want = call(inputs), windowed(exact, "reference")
    require(got, want, "out")
    if backward:
        weight = torch.randn(want.shape, dtype=torch.float64, device=machine.device)
        found = split_gradients(inputs, got, weight.to(machine.dtype))
        for name, gradient in split_gradients(exact, want, weight).items():
            require(found[name], gradient, f"gradient of {name}")
