"""A training step with the paper's layer sizes: forward, backward, clipping and Adam, with a full
memory."""

import functools
from dataclasses import replace

from harness.case import Case, Shape
from harness.comparison import Comparison, Implementation, comparisons
from harness.machine import Machine
from implementations.models import ENWIK8_BASE
from implementations.training import IN_GRAPHS, ORIGINAL, OURS, TRAINED, entry, without_attention


@comparisons("cpu", "cuda")
def test_training_step(machine: Machine, full: bool) -> list[Comparison]:
    sizes = [(12, 22)] if machine.kind == "cuda" else [(1, 2)] if machine.brief else [(2, 8)] + [(1, 22)] * full
    found = []
    for layers, batch in sizes:
        config = replace(ENWIK8_BASE, n_layer=layers)
        length = config.mem_len
        options = (config, batch, length, machine.device)
        runs = [
            Implementation(name, functools.partial(entry, algorithm, *options), role)
            for algorithm, (name, role, _) in TRAINED.items()
            if full or algorithm in (OURS, ORIGINAL)
        ]
        if machine.kind == "cuda":
            runs += [
                Implementation(
                    TRAINED[x].name + IN_GRAPHS, functools.partial(entry, x, *options, True), TRAINED[x].role
                )
                for x in (OURS, ORIGINAL)
            ]
        rest = functools.partial(without_attention, *options)
        runs.append(Implementation("lower bound: a step without attention", rest, "part"))
        shape = Shape(batch, config.n_head, length, length, config.d_head)
        case = Case(unit="token", model="enwik8-base", layers=layers, shape=shape)
        found.append(Comparison("training step", case, runs, clock="wall", seconds=15, minimum=3, maximum=30))
    return found
