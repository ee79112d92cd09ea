"""Inkling's attention: 24 heads of width 128 on 8 heads of keys and values, position queries of
width 16, and a table of 1,024 distances, beyond which there is no positional term."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harness.case import Case, Shape
from harness.comparison import Comparison, comparisons
from harness.machine import Machine
from implementations.ways import Arguments, Random, Way, compared

GROUP, WIDTH, EXTENT = 3, 16, 1024  # heads for a head of keys; of position queries; distances with a row


def _arguments(shape: Shape, randn: Random) -> Arguments:
    B, H, L, _, D = shape
    sizes = {"q": (H, D), "k": (H // GROUP, D), "v": (H // GROUP, D), "q_pos": (H, WIDTH)}
    x = {name: randn(B, L, *size).transpose(1, 2) for name, size in sizes.items()}  # as a model's projections lie
    return x | {"r": randn(1, min(EXTENT, L // 2), WIDTH), "position_scale": 1.0, "outside": "zero"}


def _plain(x: Arguments, repeated: bool) -> Tensor:
    """Causal SDPA without positions."""
    q, k, v = x["q"], x["k"], x["v"]
    if repeated:
        k, v = (y.repeat_interleave(GROUP, 1) for y in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)


def _dense(x: Arguments) -> Tensor:
    """SDPA with the positional terms as a bias [B, H, L, L], as transformers computes it."""
    length, rows = x["q"].size(2), x["r"].size(1)
    d = torch.arange(length, device=x["q"].device)[:, None] - torch.arange(length, device=x["q"].device)
    profile = x["q_pos"] @ x["r"].mT
    bias = profile.gather(3, d.clamp(0, rows - 1).expand(*profile.shape[:2], -1, -1))
    bias = bias.masked_fill(d >= rows, 0.0).masked_fill(d < 0, -torch.inf)
    k, v = (x[name].repeat_interleave(GROUP, 1) for name in ("k", "v"))
    return scaled_dot_product_attention(x["q"], k, v, bias)


WAYS = (
    Way("ours", _arguments, "ours"),
    Way("SDPA with dense bias", _arguments, "other", _dense),
    Way("plain SDPA, enable_gqa", _arguments, "baseline", functools.partial(_plain, repeated=False)),
    Way("plain SDPA, keys repeated", _arguments, "baseline", functools.partial(_plain, repeated=True)),
)


@comparisons("cpu", "cuda")
def test_inkling(machine: Machine, full: bool) -> list[Comparison]:
    shape = Shape(1, 24, 4096 if full or machine.kind == "cuda" else 2048, 0, 128)
    dtypes = dict.fromkeys((machine.dtype, torch.bfloat16))
    case = Case(shape=shape, note="8 heads of keys, position queries of width 16")
    return compared("Inkling", machine, case, shape, Shape(1, 6, 40, 0, 128), WAYS, 6, dtypes=dtypes)
