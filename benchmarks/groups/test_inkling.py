"""Inkling's attention: 24 heads of width 128 on 8 heads of keys and values, position queries of
width 16, and a table of 1,024 distances, beyond which there is no positional term."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, Entry, Implementation, Role, comparisons, require
from harness.machine import Machine
from txl_kernels import rel_attention

SMALL = Shape(1, 6, 40, 0, 16)
GROUP, WIDTH, EXTENT = 3, 16, 1024  # heads for a head of keys; of position queries; distances with a row


def _arguments(shape: Shape, machine: Machine, dtype: torch.dtype) -> dict[str, Tensor]:
    B, H, L, _, D = shape
    g = torch.Generator(machine.device).manual_seed(0)

    def randn(heads: int, rows: int, width: int) -> Tensor:
        x = torch.randn(B, rows, heads, width, generator=g, device=machine.device).to(dtype)
        return x.transpose(1, 2).requires_grad_()  # as a model's projections lie

    x = {"q": randn(H, L, D), "k": randn(H // GROUP, L, D), "v": randn(H // GROUP, L, D), "q_pos": randn(H, L, WIDTH)}
    table = torch.randn(1, min(EXTENT, L), WIDTH, generator=g, device=machine.device)
    return x | {"r": table.to(dtype).requires_grad_()}


def _ours(x: dict[str, Tensor], backend: str | None = None, **settings: Any) -> Tensor:
    out: Tensor = rel_attention(**x, position_scale=1.0, outside="zero", backend=backend, **settings)
    return out


def _plain(x: dict[str, Tensor], repeated: bool) -> Tensor:
    """Causal SDPA without positions."""
    q, k, v = x["q"], x["k"], x["v"]
    if repeated:
        k, v = (y.repeat_interleave(GROUP, 1) for y in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)


def _dense(x: dict[str, Tensor]) -> Tensor:
    """SDPA with the positional terms as a bias [B, H, L, L], as transformers computes it."""
    length, rows = x["q"].size(2), x["r"].size(1)
    d = torch.arange(length, device=x["q"].device)[:, None] - torch.arange(length, device=x["q"].device)
    profile = x["q_pos"] @ x["r"].mT
    bias = profile.gather(3, d.clamp(0, rows - 1).expand(*profile.shape[:2], -1, -1))
    bias = bias.masked_fill(d >= rows, 0.0).masked_fill(d < 0, -torch.inf)
    k, v = (x[name].repeat_interleave(GROUP, 1) for name in ("k", "v"))
    return scaled_dot_product_attention(x["q"], k, v, bias)


ROLES: dict[str, Role] = {"ours": "ours", "SDPA with dense bias": "other"}
CALLS: dict[str, Callable[..., Tensor]] = {
    "ours": _ours,
    "SDPA with dense bias": _dense,
    "plain SDPA, enable_gqa": functools.partial(_plain, repeated=False),
    "plain SDPA, keys repeated": functools.partial(_plain, repeated=True),
}


def _check(name: str, machine: Machine, dtype: torch.dtype) -> None:
    """Compare ours and the dense form with the reference in float64; plain SDPA computes less."""
    if name.startswith("plain"):
        return
    x = _arguments(SMALL, machine, dtype)
    exact = {key: y.detach().double() for key, y in x.items()}
    require(CALLS[name](x), _ours(exact, "reference"), name)


def _entry(name: str, shape: Shape, machine: Machine, backward: bool, dtype: torch.dtype) -> Entry:
    x = _arguments(shape, machine, dtype)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = CALLS[name](x)
            if backward:
                for y in x.values():
                    y.grad = None
                out.backward(torch.ones_like(out))

    return Entry(run, functools.partial(_check, name, machine, dtype))


def _implementation(name: str, shape: Shape, machine: Machine, backward: bool, dtype: torch.dtype) -> Implementation:
    own = dtype == machine.dtype
    short = str(dtype).removeprefix("torch.")
    return Implementation(
        name if own else f"{name}, {short}",
        functools.partial(_entry, name, shape, machine, backward, dtype), ROLES.get(name, "baseline"),
        dtype=None if own else short,
    )  # fmt: skip


@comparisons("cpu", "cuda")
def test_inkling(machine: Machine, full: bool) -> list[Comparison]:
    length = 4096 if full or machine.kind == "cuda" else 2048
    shape = machine.pick(cpu=Shape(1, 24, length, 0, 128), cuda=Shape(1, 24, length, 0, 128), interpreter=SMALL)
    found = []
    for direction in DIRECTIONS:
        backward = direction == "forward+backward"
        dtypes = (machine.dtype, torch.bfloat16) if machine.kind == "cpu" else (machine.dtype,)
        runs = [_implementation(name, shape, machine, backward, dtype) for dtype in dtypes for name in CALLS]
        case = Case(direction=direction, shape=shape, note="8 heads of keys, position queries of width 16")
        found.append(Comparison("Inkling", case, runs, seconds=6))
    return found
