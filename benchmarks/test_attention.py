"""Attention alone: rel_attention against the same computed otherwise, beside the machine's limits.

The yardstick, scaled_dot_product_attention without positions, does two products forward where attention with positions
does three, and seven with backward where it does eleven: 1.5x and 1.57x its time is level with it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from agreement import require
from contestants import COMPILED, DENSE, EAGER, FLEX, ORIGINAL, OTHERS, YARDSTICK, entry, ours
from inputs import Shape
from limits import ARITHMETIC, MEMORY, arithmetic, memory
from machine import Machine
from race import Entry, Race, races

Contestants = dict[str, Callable[[], Entry]]
QUICK = (ORIGINAL, EAGER, DENSE, YARDSTICK)


def contestants(
    machine: Machine, shape: Shape, backward: bool, others: tuple[str, ...] = QUICK, second_dtype: bool = True
) -> Contestants:
    """Ours on every backend, the others, ours in bfloat16 on a CPU, and the limit of arithmetic."""
    found: Contestants = {
        name: functools.partial(entry, attention, machine, shape, backward)
        for name, attention in (ours(machine, shape.L <= 16 and not backward) | {n: OTHERS[n] for n in others}).items()
    }
    if second_dtype and machine.kind == "cpu":
        for name, attention in ours(machine).items():
            found[f"{name}, bfloat16"] = functools.partial(entry, attention, machine, shape, backward, torch.bfloat16)
    return found | {ARITHMETIC[machine.kind]: functools.partial(arithmetic, machine)}


def both_ways(machine: Machine, shape: Shape, others: tuple[str, ...] = QUICK, **options: Any) -> list[Race]:
    found = []
    for backward in (False, True):
        names = tuple(n for n in others if not (n == FLEX and backward and machine.kind != "cuda"))
        runs = contestants(machine, shape, backward, names)
        found.append(Race("forward+backward" if backward else "forward", str(shape), runs, **options))
    return found


def training(machine: Machine, full: bool) -> list[Race]:
    if not machine.backends:
        return []
    if machine.kind == "rehearsal":
        return both_ways(machine, Shape(1, 2, 32, 32, 16), (EAGER, DENSE, YARDSTICK), least=2, most=2)
    if machine.kind == "cpu":
        return both_ways(machine, Shape(4, 8, 512, 512, 64), (*QUICK[:2], COMPILED, DENSE, FLEX, YARDSTICK))
    found = both_ways(machine, Shape(8, 16, 1024, 1024, 64), (EAGER, DENSE, YARDSTICK))
    found += both_ways(machine, Shape(8, 16, 2048, 2048, 64), (EAGER, DENSE, YARDSTICK))
    return found + both_ways(machine, Shape(22, 8, 512, 512, 64))


@races(training)
def test_training_shape(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def decode(machine: Machine, full: bool) -> list[Race]:
    """One query (on a GPU also a few): the work is reading keys, values and r once; other layers have filled the caches."""
    if not machine.backends:
        return []
    sizes = machine.pick(
        cpu=[(1, 3800), (1, 16000), (8, 3800)],
        cuda=[(b, m) for m in (3800, 800, 32768) for b in (1, 8, 64)],
        rehearsal=[(1, 48)],
    )
    heads = machine.pick(cpu=8, cuda=8, rehearsal=1)
    everybody = (EAGER, DENSE, YARDSTICK)
    shapes = {Shape(batch, heads, 1, memory_len, 64): everybody for batch, memory_len in sizes}
    if machine.kind == "cuda":  # where should the CUDA C++ kernels leave off?
        shapes |= {Shape(8, heads, length, 3800, 64): (YARDSTICK,) for length in (2, 4, 8, 16)}
    found = []
    for shape, others in shapes.items():
        size = int(shape.read_bytes(machine.dtype.itemsize))
        runs = contestants(machine, shape, False, others)
        del runs[ARITHMETIC[machine.kind]]
        if machine.kind == "cuda":  # one launch of a graph each: a GPU outruns Python here
            runs |= {f"{name}, CUDA graph": functools.partial(graphed, make, machine) for name, make in runs.items()}
        runs[MEMORY[machine.kind]] = functools.partial(memory, machine, size)
        found.append(
            Race("decode", str(shape), runs, clock="cold", seconds=machine.pick(cpu=4.0, cuda=1.5, rehearsal=1.0))
        )
    return found


def graphed(make: Callable[[], Entry], machine: Machine) -> Entry:
    """A contestant's call captured in a CUDA graph; its check also compares what a replay writes."""
    made = make()
    alone = made.run()
    machine.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.run()

    def check() -> None:
        if made.check is not None:
            made.check()
        captured.zero_()
        graph.replay()
        require(captured, alone.double(), "what the graph writes")

    def replay() -> None:
        graph.replay()
        made  # noqa: B018  the graph reads its tensors, which must live

    return Entry(replay, check, bytes=made.bytes)


@races(decode)
def test_decode(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def evaluation(machine: Machine, full: bool) -> list[Race]:
    if machine.kind == "rehearsal" or not machine.backends:
        return []
    return both_ways(machine, Shape(1, 8, 128, 3800, 64))


@races(evaluation)
def test_long_memory_short_segment(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def lengths(machine: Machine, full: bool) -> list[Race]:
    """Speed against length: L = M."""
    if not machine.backends:
        return []
    batch, heads, steps = machine.pick(
        cpu=(1, 8, [128, 256, 512, 1024] + [2048, 4096] * full),
        cuda=(4, 16, [256, 512, 1024, 2048, 4096]),
        rehearsal=(1, 1, []),
    )
    found = []
    for length in steps:
        shape = Shape(batch, heads, length, length, 64)
        for backward in (False, True):
            runs = contestants(machine, shape, backward, second_dtype=False)
            group = f"speed against length, {'forward+backward' if backward else 'forward'}"
            found.append(Race(group, str(shape), runs, seconds=2, least=3))
    return found


@races(lengths)
def test_length(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def slow_to_start(machine: Machine, full: bool) -> list[Race]:
    """On a GPU last of all: what must be compiled first, wide heads, and the longest."""
    if machine.kind != "cuda" or not machine.backends:
        return []
    found = both_ways(machine, Shape(8, 8, 1024, 1024, 128), (DENSE, YARDSTICK))
    found += both_ways(machine, Shape(8, 16, 8192, 8192, 64), (YARDSTICK,))
    return found + both_ways(machine, Shape(8, 16, 512, 512, 64), (FLEX, COMPILED, YARDSTICK))


@races(slow_to_start)
def test_slow_to_start(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)
