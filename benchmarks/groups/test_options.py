"""What a window and padding save: the work follows the visible pairs, not the tensors' sizes."""

import functools
from dataclasses import replace
from typing import Any

import torch

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, Entry, Implementation, comparisons
from harness.machine import Machine
from implementations.attention import DENSE, Attention, Compute, ours
from implementations.attention_entry import entry
from implementations.padding import check_padded, padded, padded_dense, padded_eager, padded_inputs, padded_plain
from implementations.window import WINDOW, check_window, windowed


def window(machine: Machine, full: bool) -> list[Comparison]:
    if machine.kind == "interpreter":
        return []
    batch, heads = machine.pick(cpu=(1, 8), cuda=(8, 16), interpreter=(1, 1))
    few, many = (Shape(batch, heads, 512, memory_len, 64) for memory_len in (128, 7680))
    found = []
    for direction in DIRECTIONS:
        backward, runs = direction == "forward+backward", []
        for attention in ours(machine):
            inside = replace(attention, compute=functools.partial(windowed, backend=attention.backend))
            for label, call, shape in (
                (f"window {WINDOW} of 640 keys", inside, few),
                (f"window {WINDOW} of 8,192 keys", inside, many),
                ("all 640 keys", attention, few),
            ):
                prepare = functools.partial(_timed, call, machine, shape, backward, windowed=call is inside)
                name = f"{attention.name}, {label}"
                runs.append(Implementation(name, call.algorithm, prepare, call.role, call.backend))
        case = Case(direction=direction, shape=few, note=f"M{many.M} for 8,192 keys")
        found.append(Comparison("window", case, runs, seconds=3))
    return found


def _timed(call: Attention, machine: Machine, shape: Shape, backward: bool, windowed: bool) -> Entry:
    made = entry(call, machine, shape, backward)
    # Unlike the full call, a window is not what the check of attention computes.
    check = functools.partial(check_window, call.compute, machine, backward) if windowed else made.check
    return Entry(made.run, check)


@comparisons(window)
def test_window(run: Any, comparison: Comparison, implementation: str) -> None:
    run(comparison, implementation)


def padding(machine: Machine, full: bool) -> list[Comparison]:
    """Lengths from a quarter of the longest to all of it."""
    if machine.kind == "interpreter" or not machine.backends:
        return []
    batch, heads, length = machine.pick(cpu=(8, 4, 512), cuda=(32, 8, 1024), interpreter=(1, 1, 1))

    def prepare(call: Compute, right: bool) -> Entry:
        run = torch.no_grad()(functools.partial(call, padded_inputs(batch, heads, length, 64, machine)))
        return Entry(run, functools.partial(check_padded, call, machine) if right else None)

    runs = []
    for x in ours(machine):
        told = functools.partial(prepare, functools.partial(padded, backend=x.backend), True)
        blind = functools.partial(prepare, functools.partial(padded, backend=x.backend, told=False), False)
        runs.append(Implementation(x.name, x.algorithm, told, x.role, x.backend))
        runs.append(Implementation(f"{x.name}, not told of padding", "rel_attention-blind", blind, "part", x.backend))
    runs += [
        Implementation("Conformer as commonly written", "conformer", functools.partial(prepare, padded_eager, True)),
        Implementation(DENSE.name, DENSE.algorithm, functools.partial(prepare, padded_dense, True)),
        Implementation(
            "baseline: plain SDPA over the padding too",
            "sdpa",
            functools.partial(prepare, padded_plain, False),
            "baseline",
        ),
    ]
    shape = Shape(batch, heads, length, 0, 64)
    case = Case(direction="forward", shape=shape, note="bidirectional, 1/4 to all of it filled")
    return [Comparison("padding", case, runs, seconds=4)]


@comparisons(padding)
def test_padding(run: Any, comparison: Comparison, implementation: str) -> None:
    run(comparison, implementation)
