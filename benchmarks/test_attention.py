"""Attention forward, and forward with backward: rel_attention against the original algorithm, and a yardstick.

Each contestant is compared with the float64 reference before it is timed; one that is wrong fails and gets no time.
The yardstick, torch's scaled_dot_product_attention without positions or mask, does two products where ours needs three.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from original import original_bhls, original_qkbh
from torch import Tensor

from txl_kernels import available_backends, rel_attention

SHAPES = {
    "training B4 H8 L512 M512 D64": (4, 8, 512, 512, 64),
    "evaluation B1 H8 L128 M3800 D64": (1, 8, 128, 3800, 64),
}
Inputs = dict[str, Tensor]


def make_inputs(shape: tuple[int, ...]) -> Inputs:
    B, H, L, M, D = shape
    g = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).requires_grad_()

    tensors = {name: randn(B, H, L, D) for name in "qkv"} | {"r": randn(H, M + L, D)}
    tensors |= {name: randn(H, D) for name in ("content_bias", "position_bias")}
    return tensors | {name: randn(B, H, M, D) for name in ("k_mem", "v_mem")}


def fused(x: Inputs, backend: str = "native") -> Tensor:
    tensors = [x[n] for n in ("q", "k", "v", "r", "content_bias", "position_bias")]
    return rel_attention(*tensors, (x["k_mem"], x["v_mem"]), backend=backend)


def eager_bhls(x: Inputs) -> Tensor:
    tensors = [x[n] for n in ("q", "k", "v", "r", "content_bias", "position_bias")]
    return original_bhls(*tensors, (x["k_mem"], x["v_mem"]))


def eager_qkbh(x: Inputs) -> Tensor:
    """In the original's own layout; the inputs are permuted views of it."""
    k, v = torch.cat([x["k_mem"], x["k"]], 2), torch.cat([x["v_mem"], x["v"]], 2)
    q, k, v = (t.permute(2, 0, 1, 3) for t in (x["q"], k, v))
    r = x["r"].flip(1).transpose(0, 1)
    return original_qkbh(q, k, v, r, x["content_bias"], x["position_bias"]).permute(1, 2, 0, 3)


def plain_sdpa(x: Inputs) -> Tensor:
    k, v = torch.cat([x["k_mem"], x["k"]], 2), torch.cat([x["v_mem"], x["v"]], 2)
    return F.scaled_dot_product_attention(x["q"], k, v)


CONTESTANTS: dict[str, Callable[[Inputs], Tensor]] = {
    "rel_attention native": fused,
    "original algorithm, [B, H, L, S]": eager_bhls,
    "original algorithm, [q, k, b, h]": eager_qkbh,
    "yardstick: plain SDPA": plain_sdpa,
}


def check(contestant: str, inputs: Inputs, backward: bool) -> None:
    """Refuses a contestant that computes something else, on a small problem of the same kind."""
    if contestant.startswith("yardstick"):
        return
    small = make_inputs((2, 2, 40, 70, inputs["q"].size(-1)))
    exact = {n: t.detach().double().requires_grad_() for n, t in small.items()}
    got, want = CONTESTANTS[contestant](small), fused(exact, "reference")
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
    if backward:
        weight = torch.randn(want.shape, dtype=torch.float64)
        for out in (got, want):
            (out * weight.to(out.dtype)).sum().backward()
        for name, x in small.items():
            torch.testing.assert_close(
                x.grad.double(), exact[name].grad, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_attention(benchmark: Any, direction: str, shape: str, contestant: str) -> None:
    if contestant.startswith("rel_attention") and "native" not in available_backends():
        pytest.skip("the native module is not built")
    benchmark.group = f"{direction}, {shape}"
    inputs = make_inputs(SHAPES[shape])
    backward = direction != "forward"
    check(contestant, inputs, backward)
    run, dout = CONTESTANTS[contestant], torch.randn_like(inputs["q"])

    def forward() -> None:
        with torch.no_grad():
            run(inputs)

    def both() -> None:
        torch.autograd.grad(run(inputs), list(inputs.values()), dout, allow_unused=True)

    benchmark.pedantic(both if backward else forward, rounds=5, warmup_rounds=1)
