"""Ways to compute the same attention, side by side, and what each must agree with before it is timed."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from original import original_bhls, original_qkbh, shift_bhls
from torch import Tensor

from txl_kernels import rel_attention

Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Tensor]
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

    def read_bytes(self, element: int) -> int:
        """Size of the keys, the values and r."""
        return element * self.D * self.H * (self.M + self.L) * (2 * self.B + 1)


def make_inputs(shape: Shape, dtype: torch.dtype = torch.float32) -> Inputs:
    B, H, L, M, D = shape
    g = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(dtype).requires_grad_()

    tensors = {name: randn(B, H, L, D) for name in "qkv"} | {"r": randn(H, M + L, D)}
    tensors |= {name: randn(H, D) for name in ("content_bias", "position_bias")}
    tensors |= {name: randn(B, H, M, D) for name in ("k_mem", "v_mem")}
    # Memory and segment in one tensor: what ours does not need, the others get for nothing.
    for name in "kv":
        whole = torch.cat([tensors[f"{name}_mem"], tensors[name]], 2).detach()
        tensors[f"{name}_all"] = whole.requires_grad_()
    return tensors


def split_gradients(inputs: Inputs, out: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Gradients by the names of ours, whichever form of keys and values a contestant used."""
    grads = torch.autograd.grad(out, list(inputs.values()), dout, allow_unused=True)
    by_name = {name: x for name, x in zip(inputs, grads, strict=True) if x is not None}
    for name in "kv":
        whole = by_name.pop(f"{name}_all", None)
        if whole is not None:
            memory_len = inputs["k_mem"].size(2)
            by_name |= {f"{name}_mem": whole[:, :, :memory_len], name: whole[:, :, memory_len:]}
    return by_name


def fused(x: Inputs, backend: str = "native") -> Tensor:
    return rel_attention(*(x[n] for n in NAMES), (x["k_mem"], x["v_mem"]), backend=backend)


def eager_bhls(x: Inputs) -> Tensor:
    return original_bhls(x["q"], x["k_all"], x["v_all"], *(x[n] for n in NAMES[3:]))


@functools.cache
def _compiled() -> Run:
    return torch.compile(eager_bhls, dynamic=False)


def compiled_bhls(x: Inputs) -> Tensor:
    return _compiled()(x)


def eager_qkbh(x: Inputs) -> Tensor:
    """In the original's own layout; the inputs are permuted views of it."""
    q, k, v = (t.permute(2, 0, 1, 3) for t in (x["q"], x["k_all"], x["v_all"]))
    r = x["r"].flip(1).transpose(0, 1)
    return original_qkbh(q, k, v, r, x["content_bias"], x["position_bias"]).permute(1, 2, 0, 3)


def _bias(x: Inputs) -> Tensor:
    """The positional scores, dense, [B, H, L, S], with the causal mask."""
    position = shift_bhls((x["q"] + x["position_bias"][:, None]) @ x["r"].flip(1).mT)
    length, keys = position.shape[-2:]
    hidden = torch.ones(length, keys, dtype=torch.bool).triu(1 + keys - length)
    return (position * x["q"].size(-1) ** -0.5).masked_fill(hidden, -torch.inf)


def dense_bias_sdpa(x: Inputs) -> Tensor:
    q = x["q"] + x["content_bias"][:, None]
    return F.scaled_dot_product_attention(q, x["k_all"], x["v_all"], attn_mask=_bias(x))


@functools.cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(x: Inputs) -> Tensor:
    """FlexAttention with the positional scores captured. Forward only: it has no backward on the CPU."""
    x = {name: t.detach() for name, t in x.items()}
    bias = _bias(x)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, i, j]

    q = x["q"] + x["content_bias"][:, None]
    return _flex()(q, x["k_all"], x["v_all"], score_mod=score_mod)


def plain_sdpa(x: Inputs) -> Tensor:
    """No positions, no biases, no mask."""
    return F.scaled_dot_product_attention(x["q"], x["k_all"], x["v_all"])


def timed(run: Run, inputs: Inputs, backward: bool) -> Callable[[], object]:
    """What is timed: forward without gradients, or forward and backward."""
    dout = torch.randn_like(inputs["q"])

    def forward() -> None:
        with torch.no_grad():
            run(inputs)

    def both() -> None:
        torch.autograd.grad(run(inputs), list(inputs.values()), dout, allow_unused=True)

    return both if backward else forward


OURS, YARDSTICK = "rel_attention, native", "yardstick: plain SDPA"
CONTESTANTS: dict[str, Run] = {
    OURS: fused,
    "original, [q, k, b, h]": eager_qkbh,
    "original, [B, H, L, S]": eager_bhls,
    "original, [B, H, L, S], compiled": compiled_bhls,
    "SDPA with dense bias": dense_bias_sdpa,
    "FlexAttention, captured bias": flex,
    YARDSTICK: plain_sdpa,
}
FORWARD_ONLY = {"FlexAttention, captured bias"}


def check(run: Run, shape: Shape, dtype: torch.dtype, backward: bool) -> None:
    """Refuses a contestant that computes something else, on a problem of the same kind.

    Raises:
        AssertionError: it differs from the float64 reference by more than its dtype explains.
    """
    inputs = make_inputs(Shape(min(shape.B, 2), 2, min(shape.L, 70), min(shape.M, 90), shape.D), dtype)
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    unit = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]

    def close(got: Tensor, want: Tensor, name: str) -> None:
        scale = float(want.detach().abs().max())
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=10 * unit * scale, msg=lambda m: f"{name} is wrong: {m}"
        )

    if not backward:
        with torch.no_grad():
            return close(run(inputs), fused(exact, "reference"), "out")
    got, want = run(inputs), fused(exact, "reference")
    close(got, want, "out")
    weight = torch.randn(want.shape, dtype=torch.float64)
    got_grads = split_gradients(inputs, got, weight.to(dtype))
    for name, gradient in split_gradients(exact, want, weight).items():
        close(got_grads[name], gradient, f"gradient of {name}")
    return None
