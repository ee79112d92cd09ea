"""Small problems: reinforcement learning, short utterances, batched generation."""

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, comparisons
from harness.limits import arithmetic, memory
from harness.machine import Machine
from implementations.attention import BASELINE, rel_attention_on, timed

SHAPES = (Shape(1, 8, 128, 128, 64), Shape(32, 4, 20, 50, 64), Shape(64, 4, 1, 256, 64))


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
