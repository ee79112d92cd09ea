"""Small problems: reinforcement learning, short utterances, batched generation, and the time saved
when some gradients are not required."""

import functools

import torch

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, Entry, Implementation, comparisons
from harness.limits import arithmetic, memory
from harness.machine import Machine
from implementations.attention import BASELINE, NAMES, Attention, make_inputs, rel_attention_on, timed

SHAPES = (Shape(1, 8, 128, 128, 64), Shape(32, 4, 20, 50, 64), Shape(64, 4, 1, 256, 64))
MEMORY = ("k_mem", "v_mem")
WANTED = {
    "all gradients": (*NAMES, *MEMORY),
    "memory needs none": NAMES,
    "memory and r need none": tuple(name for name in NAMES if name != "r"),
    "q, k and v alone": ("q", "k", "v"),
}


@comparisons("cpu", backend="native")
def test_small(machine: Machine, full: bool) -> list[Comparison]:
    found = []
    for shape in SHAPES:
        for direction in DIRECTIONS:
            backward = direction == "forward+backward"
            runs = [timed(x, machine, shape, backward) for x in (rel_attention_on("native"), BASELINE)]
            few = shape.L <= 16
            runs.append(memory(machine, int(shape.read_bytes(4))) if few else arithmetic(machine))
            found.append(Comparison("small and short", Case(direction=direction, shape=shape), runs, seconds=3))
    return found


@comparisons("cpu", backend="native")
def test_wanted_gradients(machine: Machine, full: bool) -> list[Comparison]:
    def entry(attention: Attention, shape: Shape, names: tuple[str, ...]) -> Entry:
        inputs = make_inputs(shape, torch.float32, machine.device)
        for name, x in inputs.items():
            x.requires_grad_(name in names)
        dout, asked = torch.randn_like(inputs["q"]), [inputs[name] for name in names]

        def run() -> None:
            torch.autograd.grad(attention.compute(inputs), asked, dout)

        return Entry(run)

    found = []
    for shape in (Shape(4, 8, 512, 512, 64), Shape(1, 8, 128, 3800, 64), Shape(1, 2, 8, 8, 64)):
        ours, runs = rel_attention_on("native"), []
        for what, names in WANTED.items():
            prepare = functools.partial(entry, ours, shape, names)
            runs.append(Implementation(f"{ours.name}, {what}", ours.algorithm, prepare, ours.role, ours.backend))
        prepare = functools.partial(entry, BASELINE, shape, ("q", "k_all", "v_all"))
        runs.append(Implementation(BASELINE.name, BASELINE.algorithm, prepare, BASELINE.role))
        case = Case(direction="forward+backward", shape=shape)
        found.append(Comparison("wanted gradients", case, runs, clock="wall", seconds=3))
    return found
