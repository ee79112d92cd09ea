"""rel_attention in bfloat16 on a CPU, compared with float32 and SDPA without positions, and the
peak rates for both dtypes."""

import torch

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, comparisons
from harness.limits import arithmetic
from harness.machine import Machine
from implementations.attention import BASELINE, rel_attention_on, timed


@comparisons("cpu", backend="native")
def test_bfloat16(machine: Machine, full: bool) -> list[Comparison]:
    found, native, half = [], rel_attention_on("native"), torch.bfloat16
    for shape in (Shape(4, 8, 512, 512, 64), Shape(1, 8, 128, 3800, 64)):
        for direction in DIRECTIONS:
            backward = direction == "forward+backward"
            runs = [timed(x, machine, shape, backward, half) for x in (native, BASELINE)]
            runs += [timed(x, machine, shape, backward, torch.float32) for x in (native, BASELINE)]
            case = Case(direction=direction, shape=shape)
            found.append(Comparison("bfloat16", case, [*runs, arithmetic(machine, half), arithmetic(machine)]))
    return found
