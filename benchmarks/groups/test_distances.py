"""Relative biases without a table r, packed sequences, and a narrow window in a long sequence."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, Entry, Implementation, Role, comparisons, require
from harness.machine import Machine
from txl_kernels import bounds_from_cu_seqlens, rel_attention

Inputs = dict[str, Tensor]
Compute = Callable[[Inputs], Tensor]
PACKED, LONGEST = 32, 512  # number of sequences; the shortest has a quarter of the longest's tokens


def _randn(machine: Machine, sizes: dict[str, tuple[int, ...]]) -> Inputs:
    g = torch.Generator(machine.device).manual_seed(0)
    return {
        name: torch.randn(*size, generator=g, device=machine.device).to(machine.dtype).requires_grad_()
        for name, size in sizes.items()
    }


def _entry(make: Callable[[], Inputs], call: Compute, backward: bool, check: Callable[[], None] | None) -> Entry:
    x = make()

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = call(x)
            if backward:
                for y in x.values():
                    y.grad = None
                out.backward(torch.ones_like(out))

    return Entry(run, check)


def _exactly(x: Inputs) -> Inputs:
    return {name: y.detach().double() for name, y in x.items()}


# Relative biases alone.


def _numbers(shape: Shape, machine: Machine) -> Inputs:
    B, H, L, M, D = shape
    sizes = {"q": (B, H, L, D), "k": (B, H, M + L, D), "v": (B, H, M + L, D), "numbers": (H, M + 2 * L - 1)}
    return _randn(machine, sizes)


def _alone(M: int, x: Inputs, backend: str | None = None) -> Tensor:
    k_mem, k = x["k"].split([M, x["k"].size(2) - M], 2)
    v_mem, v = x["v"].split([M, x["v"].size(2) - M], 2)
    length = x["q"].size(2)
    out: Tensor = rel_attention(
        x["q"],
        k,
        v,
        None,
        memory=(k_mem, v_mem),
        r_bias=x["numbers"],
        causal=False,
        zero_row=length - 1,
        backend=backend,
    )
    return out


def _dense(M: int, x: Inputs) -> Tensor:
    """Look up the bias of every pair, [H, L, S]."""
    length, scale = x["q"].size(2), x["q"].size(3) ** -0.5
    device = x["q"].device
    row = M + torch.arange(length, device=device)[:, None] - torch.arange(M + length, device=device) + length - 1
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], x["numbers"][:, row] * scale)


def _plain(x: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"])


@comparisons("cpu", "cuda")
def test_numbers(machine: Machine, full: bool) -> list[Comparison]:
    """`r_bias` without r, bidirectional."""
    small = Shape(2, 2, 12, 7, 8)
    shape = machine.pick(cpu=Shape(2, 8, 1024, 1024, 64), cuda=Shape(8, 16, 2048, 2048, 64), interpreter=small)

    def check(compute: Callable[[int, Inputs], Tensor]) -> None:
        x = _numbers(small, machine)
        require(compute(small.M, x), _alone(small.M, _exactly(x), "reference"), "out")

    found = []
    for direction in DIRECTIONS:
        runs = []
        kinds: list[tuple[str, Any, Role]] = [
            ("r_bias alone", _alone, "ours"), ("SDPA with dense bias", _dense, "other"),
            ("baseline: plain SDPA", None, "baseline"),
        ]  # fmt: skip
        for name, compute, role in kinds:
            call = _plain if compute is None else functools.partial(compute, shape.M)
            prepare = functools.partial(
                _entry, functools.partial(_numbers, shape, machine), call, direction == "forward+backward",
                None if compute is None else functools.partial(check, compute),
            )  # fmt: skip
            runs.append(Implementation(name, prepare, role))
        found.append(Comparison("a number a distance", Case(direction=direction, shape=shape), runs, seconds=4))
    return found


# Packed sequences.


def _lengths(texts: int, longest: int) -> list[int]:
    return [round(longest * (0.25 + 0.75 * n / max(texts - 1, 1))) for n in range(texts)]


def _texts(batch: int, length: int, heads: int, longest: int, machine: Machine) -> Inputs:
    sizes = dict.fromkeys("qkv", (batch, heads, length, 64))
    return _randn(machine, sizes | {"r": (heads, 2 * longest - 1, 64)})


def _attend(settings: dict[str, Any], longest: int, x: Inputs) -> Tensor:
    out: Tensor = rel_attention(*(x[n] for n in "qkvr"), causal=False, zero_row=longest - 1, **settings)
    return out


def _check_packed(machine: Machine) -> None:
    """Check each packed sequence against a separate call in float64."""
    lengths = [5, 1, 12]
    x = _texts(1, sum(lengths), 2, max(lengths), machine)
    start, end = bounds_from_cu_seqlens(torch.tensor([0, *lengths], device=machine.device).cumsum(0), sum(lengths))
    got, exact = _attend({"start": start, "end": end}, 12, x), _exactly(x)
    parts = zip(*(exact[n].split(lengths, 2) for n in "qkv"), strict=True)
    alone = [_attend({"backend": "reference"}, 12, dict(zip("qkv", p, strict=True)) | {"r": exact["r"]}) for p in parts]
    require(got, torch.cat(alone, 2), "packed")


@comparisons("cpu", "cuda")
def test_packed(machine: Machine, full: bool) -> list[Comparison]:
    """Sequences of a quarter of the longest's length to all of it, packed and padded."""
    texts, longest = machine.pick(cpu=(PACKED, LONGEST), cuda=(PACKED, 4 * LONGEST), interpreter=(2, 12))
    lengths, heads = _lengths(texts, longest), 8
    ends = torch.tensor([0, *lengths], device=machine.device).cumsum(0)
    start, end = bounds_from_cu_seqlens(ends, sum(lengths))
    padded = {"end": torch.tensor(lengths, dtype=torch.int32, device=machine.device)[:, None]}
    kinds: list[tuple[str, dict[str, Any], tuple[int, int], Role]] = [
        ("packed", {"start": start, "end": end}, (1, sum(lengths)), "ours"),
        ("padded, told of lengths", padded, (texts, longest), "part"),
        ("padded, not told", {}, (texts, longest), "part"),
    ]
    share = sum(n * n for n in lengths) / (texts * longest**2)
    found = []
    for direction in DIRECTIONS:
        runs = []
        for name, settings, (batch, length), role in kinds:
            make = functools.partial(_texts, batch, length, heads, longest, machine)
            check = functools.partial(_check_packed, machine) if role == "ours" else None
            call = functools.partial(_attend, settings, longest)
            prepare = functools.partial(_entry, make, call, direction == "forward+backward", check)
            runs.append(Implementation(name, prepare, role))
        note = f"{texts} texts of {lengths[0]} to {longest}, {share:.0%} of the padded pairs"
        case = Case(direction=direction, shape=Shape(1, heads, sum(lengths), 0, 64), note=note)
        found.append(Comparison("packed texts", case, runs, seconds=4))
    return found


# A window on both sides.


@comparisons("cpu", "cuda")
def test_both_sides(machine: Machine, full: bool) -> list[Comparison]:
    """64 keys before and 64 after each of 32,768 queries, and a call of as many pairs without a
    window."""
    length, side, heads = machine.pick(cpu=(32768, 64, 8), cuda=(32768, 64, 16), interpreter=(48, 5, 1))
    pairs = length * (2 * side + 1) - side * (side + 1)
    square = round(pairs**0.5)

    def check() -> None:
        x = _texts(1, 40, 2, 6, machine)
        settings: dict[str, Any] = {"window": (5, 5)}
        require(_attend(settings, 6, x), _attend(settings | {"backend": "reference"}, 6, _exactly(x)), "window")

    found = []
    for direction in DIRECTIONS:
        runs = []
        for name, n, reach, settings in (
            ("window", length, side + 1, {"window": (side, side)}), ("as many pairs, no window", square, square, {})
        ):  # fmt: skip
            make = functools.partial(_texts, 1, n, heads, reach, machine)
            call = functools.partial(_attend, settings, reach)
            windowed = name == "window"
            prepare = functools.partial(
                _entry, make, call, direction == "forward+backward", check if windowed else None
            )
            runs.append(Implementation(name, prepare, "ours" if windowed else "part"))
        case = Case(direction=direction, shape=Shape(1, heads, length, 0, 64), note=f"{side} each side of {length:,}")
        found.append(Comparison("window to both sides", case, runs, seconds=4))
    return found
