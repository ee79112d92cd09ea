"""A batch of utterances of different lengths in a bidirectional (Conformer) encoder."""

import torch
import torch.nn.functional as F
from original import shift_both
from torch import Tensor

from harness.checks import require
from harness.machine import Machine
from implementations.attention import Compute
from implementations.inputs import NAMES, Inputs
from txl_kernels import rel_attention


def padded_inputs(batch: int, heads: int, length: int, width: int, machine: Machine) -> Inputs:
    """q, k, v [B, H, L, D], r [H, 2 L - 1, D], biases [H, D], int32 lengths [B] from L / 4 to L."""
    g = torch.Generator().manual_seed(0)
    sizes = dict.fromkeys("qkv", (batch, heads, length, width)) | {"r": (heads, 2 * length - 1, width)}
    sizes |= {"content_bias": (heads, width), "position_bias": (heads, width)}
    x = {name: torch.randn(*size, generator=g).to(machine.device, machine.dtype) for name, size in sizes.items()}
    lengths = torch.linspace(length / 4, length, batch).round().int()
    return x | {"lengths": lengths.to(machine.device)}


def padded(x: Inputs, backend: str | None = None, told: bool = True) -> Tensor:
    end = x["lengths"][:, None] if told else None
    zero_row = x["q"].size(2) - 1
    return rel_attention(*(x[n] for n in NAMES), causal=False, zero_row=zero_row, end=end, backend=backend)


def _scores(x: Inputs) -> Tensor:
    """Positional scores of a Conformer layer, hidden at padding: [B, H, L, L]."""
    position = shift_both((x["q"] + x["position_bias"][:, None]) @ x["r"].flip(1).mT) * x["q"].size(-1) ** -0.5
    keys = torch.arange(position.size(-1), device=position.device)
    return position.masked_fill(keys >= x["lengths"][:, None, None, None], -torch.inf)


def padded_eager(x: Inputs) -> Tensor:
    content = (x["q"] + x["content_bias"][:, None]) @ x["k"].mT * x["q"].size(-1) ** -0.5
    return (content + _scores(x)).softmax(-1) @ x["v"]


def padded_dense(x: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(x["q"] + x["content_bias"][:, None], x["k"], x["v"], attn_mask=_scores(x))


def padded_plain(x: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"])


def check_padded(call: Compute, machine: Machine) -> None:
    """Refuses what differs from the float64 reference that is told of the padding."""
    small = padded_inputs(3, 2, 50, 64, machine)
    exact = {n: t if n == "lengths" else t.double() for n, t in small.items()}
    with torch.no_grad():
        require(call(small), padded(exact, "reference"), "out")
