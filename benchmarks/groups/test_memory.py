"""Peak memory against length, with L = M, of attention alone and of a training step. Each is
measured in a separate process."""

import functools

from harness.case import Case, Shape
from harness.comparison import Comparison, Implementation, comparisons
from harness.machine import Machine
from implementations.attention import BASELINE, DENSE, EAGER, ORIGINAL, Attention, check, ours
from implementations.memory import probe
from implementations.models import ENWIK8_BASE
from implementations.training import TRAINED
from implementations.training import check as check_training


@comparisons("cpu", "cuda")
def test_attention_memory(machine: Machine, full: bool) -> list[Comparison]:
    for_all, for_ours = (512, 1024, 2048) + (4096,) * full, (4096,) * (not full) + (8192, 16384) * full
    if machine.kind == "cuda":
        for_all, for_ours = (1024, 2048, 4096, 8192), (32768,)
    if machine.brief:  # a process for each implementation and length
        for_all, for_ours = for_all[:1], for_all[1:2]

    def probe_of(x: Attention, length: int) -> Implementation:
        lengths = for_all + (for_ours if x.role == "ours" else ())
        checked = functools.partial(check, x.compute, True, machine.dtype, machine.device)
        arguments = (x.name, lengths, length, machine, None if x is BASELINE else checked)
        prepare = functools.partial(probe, "attention", *arguments)
        return Implementation(x.name, prepare, x.role)

    mine, found = ours(machine), []
    for length in for_all + for_ours:
        everybody = [*mine, ORIGINAL, EAGER, DENSE, BASELINE] if length in for_all else mine
        case = Case(direction="forward+backward", shape=Shape(1, 8, length, length, 64))
        runs = [probe_of(x, length) for x in everybody]
        found.append(Comparison("peak memory", case, runs, clock="own", minimum=1))
    return found


@comparisons("cpu", "cuda")
def test_training_step_memory(machine: Machine, full: bool) -> list[Comparison]:
    layers, length = 2, 2048
    runs = []
    for algorithm, (name, role, make) in TRAINED.items():
        checked = functools.partial(check_training, make, machine.device)
        prepare = functools.partial(probe, "step", algorithm, (length,), length, machine, checked)
        runs.append(Implementation(name, prepare, role))
    shape = Shape(1, ENWIK8_BASE.n_head, length, length, ENWIK8_BASE.d_head)
    case = Case(unit="step", model="enwik8-base", layers=layers, shape=shape, note="training step")
    return [Comparison("peak memory", case, runs, clock="own", minimum=1)]
