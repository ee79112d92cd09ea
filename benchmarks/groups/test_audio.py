"""An encoder layer of Parakeet's size over 10 to 60 minutes of audio, forward: time and peak
memory, each in a separate process. The library's own layer runs only where memory suffices.

    make peers
    PEERS=.peers pytest benchmarks/groups/test_audio.py --benchmark-only [--full | --brief]
"""

import functools

from harness.case import Case, Shape
from harness.comparison import Comparison, Implementation, Role, comparisons
from harness.machine import Machine
from implementations import audio

WAYS: dict[str, Role] = {audio.ACCELERATED: "ours", audio.ORIGINAL: "other"}
WINDOW = 128  # frames on either side: 10 seconds
BRIEF = 0.5  # minutes


def _over(minutes: float, window: int | None, machine: Machine, memory: bool) -> Comparison:
    frames = round(minutes * audio.FRAMES)
    note = f"{minutes:g} minutes" + (f", window {window}" if window else "")
    shape = Shape(1, audio.HEADS, frames, 0, audio.WIDTH // audio.HEADS)
    case = Case(direction="forward", shape=shape, model="transformers Parakeet", layers=1, note=note)
    runs = [
        Implementation(way, way, functools.partial(audio.entry, way, window, frames, machine, memory), role)
        for way, role in WAYS.items()
    ]
    group = "peak memory of long audio" if memory else "long audio"
    brief = _over(BRIEF, window, machine, memory) if minutes > BRIEF else None
    return Comparison(group, case, runs, clock="own", minimum=1, brief=brief)


def _all(machine: Machine, full: bool, memory: bool) -> list[Comparison]:
    lengths = (10, 30, 60) if full else (10, 30)
    return [_over(minutes, window, machine, memory) for window in (None, WINDOW) for minutes in lengths]


@comparisons("cpu", backend=None)
def test_long_audio(machine: Machine, full: bool) -> list[Comparison]:
    return _all(machine, full, memory=False)


@comparisons("cpu", backend=None)
def test_long_audio_memory(machine: Machine, full: bool) -> list[Comparison]:
    return _all(machine, full, memory=True)
