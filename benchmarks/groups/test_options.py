"""Settings that leave pairs out (padding, packed sequences, a window to both sides) or terms
(relative biases without a table r)."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import Case, Shape
from harness.comparison import Comparison, comparisons
from harness.limits import arithmetic
from harness.machine import Machine
from implementations.attention import DENSE
from implementations.methods import Arguments, Method, Random, bidirectional, compared, lengths, padded
from implementations.original import shift_both
from txl_kernels import bounds_from_cu_seqlens


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
    """A padded batch with lengths from a quarter of the longest to all of it; with `end` the work
    depends on the pairs that are visible, not on the sizes of tensors."""
    shape = Shape(32, 8, 1024, 0, 64) if machine.kind == "cuda" else Shape(8, 4, 512, 0, 64)
    product = 2.0 * shape.H * shape.D * shape.L * sum(lengths(shape))  # only keys that are not padding
    methods = []
    for backend in machine.backends:
        name, masked = f"rel_attention, {backend}", functools.partial(padded, backend=backend)
        methods += [
            Method(name, masked, "ours", operations=3 * product),
            Method(f"{name}, without end", functools.partial(masked, masked=False), operations=3 * product),
        ]
    methods += [
        Method("Conformer as commonly written", padded, "other", _eager, 3 * product),
        Method(DENSE.name, padded, "other", _dense, 3 * product),
        Method("baseline: plain SDPA over the padding too", padded, "baseline", _plain, 2 * product),
    ]
    case = Case(shape=shape, note="bidirectional, 1/4 to all of it filled")
    small, limits = Shape(3, 2, 50, 0, 64), (arithmetic(machine),)
    return compared("padding", machine, case, shape, small, methods, directions=("forward",), limits=limits)


def _packed(shape: Shape, randn: Random) -> Arguments:
    tokens = sum(lengths(shape))
    x = bidirectional(Shape(1, shape.H, tokens, 0, shape.D), randn, ("r",), 2 * shape.L - 1)
    ends = torch.tensor([0, *lengths(shape)], device=x["q"].device).cumsum(0)
    return x | dict(zip(("start", "end"), bounds_from_cu_seqlens(ends, tokens), strict=True))


@comparisons("cpu", "cuda")
def test_packed(machine: Machine, full: bool) -> list[Comparison]:
    """Sequences of a quarter of the longest's length to all of it, packed and padded."""
    shape = Shape(32, 8, 2048 if machine.kind == "cuda" else 512, 0, 64)
    found, pairs = lengths(shape), shape.B * shape.L**2
    methods = (
        Method("packed", _packed, "ours"),
        Method("padded, with end", functools.partial(padded, terms=("r",))),
        Method("padded, without end", functools.partial(bidirectional, terms=("r",))),
    )
    share = sum(n * n for n in found) / pairs
    note = f"{shape.B} sequences of {found[0]} to {shape.L}, {share:.0%} of the padded pairs"
    case = Case(shape=Shape(1, shape.H, sum(found), 0, shape.D), note=note)
    return compared("packed sequences", machine, case, shape, Shape(3, 2, 12, 0, 64), methods)


def _side(shape: Shape) -> int:
    return min(64, shape.L // 8)


def _window(shape: Shape, randn: Random) -> Arguments:
    side = _side(shape)
    return bidirectional(shape, randn, ("r",), 2 * side + 1, window=(side, side))


def _as_many_pairs(shape: Shape, randn: Random) -> Arguments:
    side = _side(shape)
    square = round((shape.L * (2 * side + 1) - side * (side + 1)) ** 0.5)
    return bidirectional(shape._replace(L=square), randn, ("r",))


@comparisons("cpu", "cuda")
def test_window_to_both_sides(machine: Machine, full: bool) -> list[Comparison]:
    """64 keys before and 64 after each of 32,768 queries, and a call of as many pairs without a
    window."""
    shape = Shape(1, 16 if machine.kind == "cuda" else 8, 32768, 0, 64)
    case = Case(shape=shape, note=f"{_side(shape)} each side of {shape.L:,}")
    methods = Method("window", _window, "ours"), Method("as many pairs, no window", _as_many_pairs)
    return compared("window to both sides", machine, case, shape, Shape(1, 2, 40, 0, 64), methods)


def _biases(shape: Shape, randn: Random) -> Arguments:
    x = bidirectional(shape, randn, terms=("r_bias",))
    return x | {f"{name}_all": torch.cat([x[f"{name}_mem"], x[name]], 2) for name in "kv"}


def _dense_biases(x: Arguments) -> Tensor:
    """Look up the bias of every pair, [H, L, S]."""
    q, k = x["q"], x["k_all"]
    rows, keys = (torch.arange(y.size(2), device=q.device) for y in (q, k))
    row = len(keys) - 1 + rows[:, None] - keys
    return F.scaled_dot_product_attention(q, k, x["v_all"], x["r_bias"][:, row] * q.size(3) ** -0.5)


def _plain_with_memory(x: Arguments) -> Tensor:
    return F.scaled_dot_product_attention(x["q"], x["k_all"], x["v_all"])


@comparisons("cpu", "cuda")
def test_relative_biases(machine: Machine, full: bool) -> list[Comparison]:
    """`r_bias` without r, bidirectional."""
    shape = Shape(8, 16, 2048, 2048, 64) if machine.kind == "cuda" else Shape(2, 8, 1024, 1024, 64)
    methods = (
        Method("r_bias alone", _biases, "ours"),
        Method("SDPA with dense bias", _biases, "other", _dense_biases),
        Method("baseline: plain SDPA", _biases, "baseline", _plain_with_memory),
    )
    return compared("relative biases", machine, Case(shape=shape), shape, Shape(2, 2, 12, 7, 64), methods)
