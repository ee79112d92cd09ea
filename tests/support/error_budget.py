"""Errors against float64, relative to those of the same algorithm in eager PyTorch (Dao et al.
2022)."""

import torch
from cases import Case, as_call, in_float64, make_inputs
from oracle import gradients

from implementations.original import original_bhls
from txl_kernels import rel_attention

SHAPES = [
    Case("segment and memory", B=2, H=2, L=128, M=128, D=64, seed=1),
    Case("short segment, long memory", B=1, H=2, L=16, M=900, D=64, seed=2),
    Case("one query", B=2, H=2, L=1, M=1000, D=64, seed=3),
    Case("unaligned width", B=1, H=2, L=100, M=60, D=41, seed=4),
]


def require_at_most_twice_eager(case: Case, dtype: torch.dtype, backend: str) -> None:
    """The root mean square error of out and of every gradient is at most twice eager's in the same
    dtype."""
    rounded = make_inputs(case, dtype)
    exact = in_float64(rounded)

    def run(inputs: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
        call = as_call(inputs)
        if how == "eager":
            k, v = (torch.cat([m, call[n]], 2) for n, m in zip("kv", call["memory"], strict=True))
            out = original_bhls(call["q"], k, v, call["r"].flip(1), call["content_bias"], call["position_bias"])
        else:
            out = rel_attention(**call, backend=how)
        return {"out": out} | gradients(out, torch.zeros(()), inputs, through_lse=False)

    largest_lse = rel_attention(**as_call(exact), return_lse=True, backend="reference")[1].detach().abs().max()
    want, eager, kernel = run(exact, "reference"), run(rounded, "eager"), run(rounded, backend)
    for name, exact_value in want.items():
        errors = [(got[name].double() - exact_value).square().mean().sqrt() for got in (kernel, eager)]
        # Storing lse in float32, which eager never does, changes each weight by this much.
        rounding = torch.finfo(torch.float32).eps / 2 * largest_lse * exact_value.square().mean().sqrt()
        assert errors[0] <= 2 * errors[1] + rounding, f"{name}: kernel {errors[0]:.3e}, eager {errors[1]:.3e}"
