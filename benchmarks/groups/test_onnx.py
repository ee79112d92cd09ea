"""An exported encoder in ONNX Runtime on two threads, as exported and rewritten: the time of the
whole encoder (FastConformer Large) and of its attention, and the peak memory of attention in a
separate process (Parakeet's sizes). 12.5 frames a second.

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
def test_encoder(machine: Machine, full: bool) -> list[Comparison]:
    """The whole encoder on 1 s, 3 s, 10 s and 30 s of audio."""
    found = []
    for frames in (13, 38, 125, 375):
        runs = [Implementation(x, functools.partial(encoders.encoder_entry, x, frames), r) for x, r in METHODS.items()]
        shape = Shape(1, 8, frames, 0, 64)
        case = Case(direction="forward", shape=shape, model="NeMo in ONNX Runtime", layers=17, note="whole encoder")
        found.append(Comparison("exported encoders", case, runs, clock="wall", seconds=20, maximum=60))
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
