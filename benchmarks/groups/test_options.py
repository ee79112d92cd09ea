"""Time saved by telling which keys are padding: the work depends on the visible pairs, not on the
tensor sizes."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import Case, Shape
from harness.comparison import Comparison, comparisons
from harness.limits import arithmetic
from harness.machine import Machine
from implementations.attention import DENSE
from implementations.original import shift_both
from implementations.ways import Arguments, Way, compared, lengths, padded


def _scores(x: Arguments) -> Tensor:
    """Compute a Conformer layer's positional scores [B, H, L, L], -inf at padding."""
    position = shift_both((x["q"] + x["position_bias"][:, None]) @ x["r"].flip(1).mT) * x["q"].size(-1) ** -0.5
    keys = torch.arange(position.size(-1), device=position.device)
    return position.masked_fill(keys >= x["end"][..., None, None], -torch.inf)


def _eager(x: Arguments) -> Tensor:
    content = (x["q"] + x["content_bias"][:, None]) @ x["k"].mT * x["q"].size(-1) ** -0.5
    return (content + _scores(x)).softmax(-1) @ x["v"]


def _dense(x: Arguments) -> Tensor:
    return F.scaled_dot_product_attention(x["q"] + x["content_bias"][:, None], x["k"], x["v"], attn_mask=_scores(x))


def _plain(x: Arguments) -> Tensor:
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"])


@comparisons("cpu", "cuda")
def test_padding(machine: Machine, full: bool) -> list[Comparison]:
    """A padded batch with lengths from a quarter of the longest to all of it."""
    shape = Shape(32, 8, 1024, 0, 64) if machine.kind == "cuda" else Shape(8, 4, 512, 0, 64)
    product = 2.0 * shape.H * shape.D * shape.L * sum(lengths(shape))  # only keys that are not padding
    ways = []
    for backend in machine.backends:
        name, told = f"rel_attention, {backend}", functools.partial(padded, backend=backend)
        ways += [
            Way(name, told, "ours", operations=3 * product),
            Way(f"{name}, not told of padding", functools.partial(told, told=False), operations=3 * product),
        ]
    ways += [
        Way("Conformer as commonly written", padded, "other", _eager, 3 * product),
        Way(DENSE.name, padded, "other", _dense, 3 * product),
        Way("baseline: plain SDPA over the padding too", padded, "baseline", _plain, 2 * product),
    ]
    case = Case(shape=shape, note="bidirectional, 1/4 to all of it filled")
    small, limits = Shape(3, 2, 50, 0, 64), (arithmetic(machine),)
    return compared("padding", machine, case, shape, small, ways, directions=("forward",), limits=limits)
