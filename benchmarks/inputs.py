"""The problems: sizes of an attention call, what it must compute and read, and its tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
NAMES = ("q", "k", "v", "r", "content_bias", "position_bias")


class Shape(NamedTuple):
    """Sizes of a causal call with all of its memory visible."""

    B: int
    H: int
    L: int
    M: int
    D: int

    def __str__(self) -> str:
        return f"B{self.B} H{self.H} L{self.L} M{self.M} D{self.D}"

    def product(self) -> float:
        """Operations of one product over the visible pairs; attention with positions takes 3 forward, 8 backward."""
        pairs = self.L * self.M + self.L * (self.L + 1) // 2
        return 2.0 * self.B * self.H * pairs * self.D

    def dense_product(self) -> float:
        """Operations of one product over all pairs."""
        return 2.0 * self.B * self.H * self.L * (self.L + self.M) * self.D

    def read_bytes(self, element: int) -> float:
        """Size of the keys, the values and r."""
        return float(element * self.D * self.H * (self.M + self.L) * (2 * self.B + 1))


def make_inputs(shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Inputs:
    B, H, L, M, D = shape
    g = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device).to(dtype).requires_grad_()

    tensors = {name: randn(B, H, L, D) for name in "qkv"} | {"r": randn(H, M + L, D)}
    tensors |= {name: randn(H, D) for name in ("content_bias", "position_bias")}
    tensors |= {name: randn(B, H, M, D) for name in ("k_mem", "v_mem")}
    # Memory and segment in one tensor, and r in the original's order: what ours does not need, the others get for nothing.
    for name in "kv":
        whole = torch.cat([tensors[f"{name}_mem"], tensors[name]], 2).detach()
        tensors[f"{name}_all"] = whole.requires_grad_()
    return tensors | {"r_all": tensors["r"].detach().flip(1).requires_grad_()}
