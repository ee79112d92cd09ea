"""Tensors of an attention call, in the forms that its implementations take."""

import torch
from torch import Tensor

from harness.case import Shape

Inputs = dict[str, Tensor]
NAMES = ("q", "k", "v", "r", "content_bias", "position_bias")


def make_inputs(shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Inputs:
    """q, k, v [B, H, L, D], r [H, M + L, D], biases [H, D], k_mem, v_mem [B, H, M, D]; k_all,
    v_all, r_all: see below."""
    B, H, L, M, D = shape
    g = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device).to(dtype).requires_grad_()

    tensors = {name: randn(B, H, L, D) for name in "qkv"} | {"r": randn(H, M + L, D)}
    tensors |= {name: randn(H, D) for name in ("content_bias", "position_bias")}
    tensors |= {name: randn(B, H, M, D) for name in ("k_mem", "v_mem")}
    # Memory and segment in one tensor, r in the original's order: the others get it for nothing.
    for name in "kv":
        whole = torch.cat([tensors[f"{name}_mem"], tensors[name]], 2).detach()
        tensors[f"{name}_all"] = whole.requires_grad_()
    return tensors | {"r_all": tensors["r"].detach().flip(1).requires_grad_()}
