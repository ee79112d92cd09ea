"""Attention layers and whole encoders of other libraries, original and accelerated: time, and peak
memory in a separate process.

    make peers
    PEERS=.peers pytest benchmarks/groups/test_integrations.py --benchmark-only [--full]
"""

import functools
from typing import Any

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, Implementation, Role, comparisons
from harness.machine import Machine
from implementations import peers

METHODS: dict[str, Role] = {peers.ACCELERATED: "ours", peers.ORIGINAL: "other"}


def _both(
    entry: Any, *before: Any, after: tuple[Any, ...] = (), methods: dict[str, Role] = METHODS
) -> list[Implementation]:
    """Return the implementations with the original and the accelerated layer, from entry(*before,
    method, *after)."""
    return [Implementation(x, functools.partial(entry, *before, x, *after), role) for x, role in methods.items()]


def _shape(title: str, length: int) -> Shape:
    memory = length if peers.LAYERS[title].name in peers.WITH_MEMORY else 0
    return Shape(peers.BATCHES[length], peers.HEADS, length, memory, peers.D_MODEL // peers.HEADS)


@comparisons("cpu", backend=None)
def test_layers(machine: Machine, full: bool) -> list[Comparison]:
    found = []
    for title in peers.LAYERS if full else peers.SHORT:
        for length in peers.BATCHES:
            for direction in DIRECTIONS:
                backward = direction == "forward+backward"
                runs = _both(peers.layer_entry, title, after=(length, backward))
                case = Case(direction=direction, shape=_shape(title, length), model=title)
                found.append(Comparison("other libraries' layers", case, runs, clock="wall", seconds=3, maximum=40))
    return found


@comparisons("cuda")
def test_layers_on_gpu(machine: Machine, full: bool) -> list[Comparison]:
    """Parakeet's layer of the installed transformers, and a layer with rotary positions instead."""
    found, methods = [], METHODS | {peers.ROTARY: "baseline"}
    for width in (64, 128):
        for batch, length in ((16, 250), (16, 1500), (64, 750), (64, 1500)):
            runs = _both(
                functools.partial(peers.layer_entry, machine=machine),
                peers.PARAKEET,
                after=(length, True, batch, width * peers.HEADS),
                methods=methods,
            )
            shape = Shape(batch, peers.HEADS, length, 0, width)
            case = Case(direction="forward+backward", shape=shape, model=peers.PARAKEET)
            found.append(Comparison("other libraries' layers", case, runs, seconds=1, minimum=3))
    return found


@comparisons("cpu", backend=None)
def test_layers_memory(machine: Machine, full: bool) -> list[Comparison]:
    lengths, found = tuple(peers.BATCHES)[1:], []
    for title in peers.LAYERS if full else peers.SHORT[:4]:
        for length in lengths:
            runs = _both(peers.memory_entry, title, after=(lengths, length, machine))
            case = Case(direction="forward+backward", shape=_shape(title, length), model=title)
            found.append(Comparison("peak memory of other libraries' layers", case, runs, clock="own", minimum=1))
    return found


@comparisons("cpu", backend=None)
def test_streaming(machine: Machine, full: bool) -> list[Comparison]:
    found = []
    for held, new in peers.STEPS:
        runs = _both(peers.stream_entry, after=(held, new))
        shape = Shape(1, peers.HEADS, new, held, peers.D_MODEL // peers.HEADS)
        case = Case(direction="forward", shape=shape, model="NeMo", note="a streaming step")
        found.append(
            Comparison("streaming steps of other libraries' layers", case, runs, clock="wall", seconds=3, maximum=60)
        )
    return found


@comparisons("cpu", backend=None)
def test_encoders(machine: Machine, full: bool) -> list[Comparison]:
    found = []
    for title in peers.ENCODERS:
        for seconds in (10, 30, 120) if full else (10, 30):
            runs = _both(peers.encoder_entry, title, after=(seconds * peers.ENCODERS[title].frames,))
            layers = peers.LAYERS_OF_ENCODER[title]
            case = Case(direction="forward", model=title, layers=layers, note=f"{seconds} s of audio")
            found.append(
                Comparison("other libraries' encoders", case, runs, clock="wall", seconds=12, minimum=3, maximum=20)
            )
    return found


@comparisons("cpu", backend=None)
def test_zipformer(machine: Machine, full: bool) -> list[Comparison]:
    """Time and peak memory of an encoder."""
    title, lengths, found = peers.ZIPFORMER, (1000, 3000), []
    for length in lengths:
        case = Case(
            direction="forward",
            model=title,
            layers=peers.LAYERS_OF_ENCODER[title],
            note=f"{length:,} frames, six stacks",
        )
        runs = _both(peers.encoder_entry, title, after=(length,))
        found.append(
            Comparison("other libraries' encoders", case, runs, clock="wall", seconds=12, minimum=3, maximum=20)
        )
        runs = _both(peers.encoder_memory_entry, title, after=(lengths, length, machine))
        found.append(Comparison("peak memory of other libraries' encoders", case, runs, clock="own", minimum=1))
    return found
