"""Attention alone: rel_attention, other implementations of the same computation, and the machine's
limits.

The baseline is scaled_dot_product_attention without positions. Forward, it does two products where
attention with positions does three; with backward, seven instead of eleven. So 1.5x and 1.57x its
time is the same rate.
"""

from typing import Any

import torch

from harness.case import DIRECTIONS, Case, Direction, Shape
from harness.comparison import Comparison, Implementation, comparisons
from harness.limits import arithmetic, memory
from harness.machine import Machine
from implementations.attention import (
    BASELINE,
    COMPILED,
    CUDA_KERNELS,
    DENSE,
    EAGER,
    FLEX,
    ORIGINAL,
    Attention,
    ours,
    timed,
)
from implementations.methods import graphed

QUICK = (ORIGINAL, EAGER, DENSE, BASELINE)
Others = tuple[Attention, ...]


def implementations(
    machine: Machine, shape: Shape, direction: Direction, others: Others = QUICK, second_dtype: bool = True
) -> list[Implementation]:
    """Return rel_attention on every backend and the other implementations; on a CPU rel_attention
    and the baseline in bfloat16, too."""
    backward = direction == "forward+backward"
    found = [timed(x, machine, shape, backward) for x in (*ours(machine, shape.L <= 16 and not backward), *others)]
    if second_dtype and machine.kind == "cpu":
        found += [timed(x, machine, shape, backward, torch.bfloat16) for x in (*ours(machine), BASELINE)]
    return found


def both_ways(
    machine: Machine, shape: Shape, others: Others = QUICK, group: str = "attention", **options: Any
) -> list[Comparison]:
    """Return the comparisons of forward, and of forward with backward."""
    with_backward = tuple(x for x in others if x is not FLEX or machine.kind == "cuda")
    found = []
    for direction in DIRECTIONS:
        runs = implementations(machine, shape, direction, others if direction == "forward" else with_backward)
        case = Case(direction=direction, shape=shape)
        limits = [arithmetic(machine), *([arithmetic(machine, torch.bfloat16)] if machine.kind == "cpu" else [])]
        if shape.L <= 16:
            limits = [memory(machine, int(shape.read_bytes(machine.dtype.itemsize)))]
        found.append(Comparison(group, case, [*runs, *limits], **options))
    return found


@comparisons("cpu", "cuda", "interpreter")
def test_training_shape(machine: Machine, full: bool) -> list[Comparison]:
    if machine.kind == "interpreter":
        return both_ways(machine, Shape(1, 2, 32, 32, 16), (EAGER, DENSE, BASELINE), minimum=2, maximum=2)
    if machine.kind == "cpu":
        size = 128 if machine.brief else 512
        return both_ways(machine, Shape(4, 8, size, size, 64), (*QUICK[:2], COMPILED, DENSE, FLEX, BASELINE))
    found = both_ways(machine, Shape(8, 16, 1024, 1024, 64), (EAGER, DENSE, BASELINE))
    found += both_ways(machine, Shape(8, 16, 2048, 2048, 64), (EAGER, DENSE, BASELINE))
    return found + both_ways(machine, Shape(22, 8, 512, 512, 64))


@comparisons("cpu", "cuda", "interpreter")
def test_decode(machine: Machine, full: bool) -> list[Comparison]:
    """A call with one query (on a GPU also with a few), bound by reading keys, values and r once.
    The caches hold other data before each call, as if other layers had run."""
    sizes = machine.pick(
        cpu=[(1, 3800), (1, 16000), (8, 3800)],
        cuda=[(b, m) for m in (3800, 800, 32768) for b in (1, 8, 64)],
        interpreter=[(1, 48)],
    )
    heads = machine.pick(cpu=8, cuda=8, interpreter=1)
    everybody = (EAGER, DENSE, BASELINE)
    shapes = {Shape(batch, heads, 1, memory_len, 64): everybody for batch, memory_len in sizes}
    if machine.kind == "cuda":  # to see up to how many queries the CUDA C++ kernels are faster
        few = (BASELINE, *CUDA_KERNELS) if "cuda" in machine.backends else (BASELINE,)
        shapes |= {Shape(b, heads, length, 3800, 64): few for b in (1, 8) for length in (2, 4, 8, 16)}
    found = []
    for shape, others in shapes.items():
        runs = implementations(machine, shape, "forward", others)
        if machine.kind == "cuda":  # as CUDA graphs, since launches from Python are slower than the kernels
            runs += [graphed(x, machine) for x in runs]
        runs.append(memory(machine, int(shape.read_bytes(machine.dtype.itemsize))))
        seconds = machine.pick(cpu=4.0, cuda=1.5, interpreter=1.0)
        found.append(Comparison("decode", Case(direction="forward", shape=shape), runs, clock="cold", seconds=seconds))
    return found


@comparisons("cpu", "cuda")
def test_long_memory_short_segment(machine: Machine, full: bool) -> list[Comparison]:
    return both_ways(machine, Shape(1, 8, 128, 3800, 64))


@comparisons("cpu", backend="native")
def test_small(machine: Machine, full: bool) -> list[Comparison]:
    """Short utterances and batched generation."""
    shapes = Shape(32, 4, 20, 50, 64), Shape(64, 4, 1, 256, 64)
    return [x for shape in shapes for x in both_ways(machine, shape, (BASELINE,), "small and short", seconds=3)]


@comparisons("cpu", "cuda")
def test_length(machine: Machine, full: bool) -> list[Comparison]:
    """Speed against length, with L = M."""
    batch, heads, steps = 1, 8, [128, 256, 512, 1024] + [2048, 4096] * full
    if machine.kind == "cuda":
        batch, heads, steps = 4, 16, [256, 512, 1024, 2048, 4096]
    found = []
    for length in steps:
        shape = Shape(batch, heads, length, length, 64)
        for direction in DIRECTIONS:
            runs = implementations(machine, shape, direction, second_dtype=False)
            case = Case(direction=direction, shape=shape)
            found.append(Comparison("speed against length", case, [*runs, arithmetic(machine)], seconds=2, minimum=3))
    return found


@comparisons("cuda")
def test_slow_to_start(machine: Machine, full: bool) -> list[Comparison]:
    """Cases with long preparation, which run last on a GPU: those that must be compiled first, wide
    heads, and the longest sequences."""
    found = both_ways(machine, Shape(8, 8, 1024, 1024, 128), (DENSE, BASELINE))
    found += both_ways(machine, Shape(8, 16, 8192, 8192, 64), (BASELINE,))
    return found + both_ways(machine, Shape(8, 16, 512, 512, 64), (FLEX, COMPILED, BASELINE))
