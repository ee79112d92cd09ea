"""The attention of an exported encoder in ONNX Runtime on two threads, as exported and rewritten:
time, and peak memory in a separate process. Parakeet's sizes at 12.5 frames a second.

    make peers
    PEERS=.peers pytest benchmarks/groups/test_onnx.py --benchmark-only [--full]
"""

import functools

from harness.case import Case, Shape
from harness.comparison import Comparison, Implementation, Role, comparisons
from harness.machine import Machine
from implementations import onnx_encoders as encoders

METHODS: dict[str, Role] = {encoders.REWRITTEN: "ours", encoders.ORIGINAL: "other"}
LAYERS = 24


def _case(layers: int, frames: int, note: str) -> Case:
    shape = Shape(1, encoders.HEADS, frames, 0, encoders.WIDTH)
    return Case(direction="forward", shape=shape, model="NeMo in ONNX Runtime", layers=layers, note=note)


@comparisons("cpu", backend=None)
def test_layers(machine: Machine, full: bool) -> list[Comparison]:
    """Two layers on 10 s, 30 s and 2 minutes of audio, without projections and with them."""
    found = []
    for projections in (False, True):
        for frames in (125, 375, 1500):
            prepare = {x: functools.partial(encoders.entry, x, 2, projections, frames) for x in METHODS}
            runs = [Implementation(x, prepare[x], role) for x, role in METHODS.items()]
            case = _case(2, frames, "with projections" if projections else "without projections")
            found.append(Comparison("exported encoders' attention", case, runs, clock="wall", seconds=8, maximum=30))
    return found


@comparisons("cpu", backend=None)
def test_memory(machine: Machine, full: bool) -> list[Comparison]:
    """24 layers on 2 and 10 minutes of audio; the exported graph on 10 only with --full (20 GB)."""
    found = []
    for frames in (1500, 7500):
        methods = [(x, role) for x, role in METHODS.items() if full or role == "ours" or frames == 1500]
        # A process for each length: the runtime keeps memory of earlier runs.
        prepare = {x: functools.partial(encoders.memory_entry, x, LAYERS, frames, machine) for x, _ in methods}
        runs = [Implementation(x, prepare[x], role) for x, role in methods]
        case = _case(LAYERS, frames, "with projections")
        found.append(Comparison("peak memory of exported encoders' attention", case, runs, clock="own", minimum=1))
    return found
