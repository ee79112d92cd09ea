"""Relative biases without a table r, packed sequences, and a narrow window in a long sequence."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import Case, Shape
from harness.comparison import Comparison, comparisons
from harness.machine import Machine
from implementations.ways import Arguments, Random, Way, bidirectional, compared, lengths, padded
from txl_kernels import bounds_from_cu_seqlens


def _numbers(shape: Shape, randn: Random) -> Arguments:
    x = bidirectional(shape, randn, terms=("r_bias",))
    return x | {f"{name}_all": torch.cat([x[f"{name}_mem"], x[name]], 2) for name in "kv"}


def _dense(x: Arguments) -> Tensor:
    """Look up the bias of every pair, [H, L, S]."""
    q, k = x["q"], x["k_all"]
    rows, keys = (torch.arange(y.size(2), device=q.device) for y in (q, k))
    row = len(keys) - 1 + rows[:, None] - keys
    return F.scaled_dot_product_attention(q, k, x["v_all"], x["r_bias"][:, row] * q.size(3) ** -0.5)


def _plain(x: Arguments) -> Tensor:
    return F.scaled_dot_product_attention(x["q"], x["k_all"], x["v_all"])


@comparisons("cpu", "cuda")
def test_numbers(machine: Machine, full: bool) -> list[Comparison]:
    """`r_bias` without r, bidirectional."""
    shape = Shape(8, 16, 2048, 2048, 64) if machine.kind == "cuda" else Shape(2, 8, 1024, 1024, 64)
    ways = (
        Way("r_bias alone", _numbers, "ours"),
        Way("SDPA with dense bias", _numbers, "other", _dense),
        Way("baseline: plain SDPA", _numbers, "baseline", _plain),
    )
    return compared("relative biases", machine, Case(shape=shape), shape, Shape(2, 2, 12, 7, 64), ways)


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
    ways = (
        Way("packed", _packed, "ours"),
        Way("padded, told of lengths", functools.partial(padded, terms=("r",))),
        Way("padded, not told", functools.partial(bidirectional, terms=("r",))),
    )
    share = sum(n * n for n in found) / pairs
    note = f"{shape.B} sequences of {found[0]} to {shape.L}, {share:.0%} of the padded pairs"
    case = Case(shape=Shape(1, shape.H, sum(found), 0, shape.D), note=note)
    return compared("packed sequences", machine, case, shape, Shape(3, 2, 12, 0, 64), ways)


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
def test_both_sides(machine: Machine, full: bool) -> list[Comparison]:
    """64 keys before and 64 after each of 32,768 queries, and a call of as many pairs without a
    window."""
    shape = Shape(1, 16 if machine.kind == "cuda" else 8, 32768, 0, 64)
    case = Case(shape=shape, note=f"{_side(shape)} each side of {shape.L:,}")
    ways = Way("window", _window, "ours"), Way("as many pairs, no window", _as_many_pairs)
    return compared("window to both sides", machine, case, shape, Shape(1, 2, 40, 0, 64), ways)
