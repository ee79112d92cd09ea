"""Other tiles than the table's, each kernel by itself: microseconds of that kernel alone."""

from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import torch

from gpu_kit import cases
from gpu_kit.measure import clock_under, device, measure, profiled
from gpu_kit.records import Items
from gpu_kit.work import Work, both, choices, tensors
from txl_kernels.backends import triton

REPEATS = 5


class Inputs:
    """Tensors of one work, made when they are first wanted: all tiles of a width take the same."""

    def __init__(self, work: Work) -> None:
        self.work = work

    @cached_property
    def x(self) -> dict[str, Any]:
        return tensors(self.work, device())


def items() -> Items:
    """The table's first, of each kernel and width."""
    if triton.interpreted():
        for work in cases.swept("forward", 64)[:2]:
            small = replace(work, B=1, H=1, L=32, M=32, D=16)
            yield _named(work), partial(_time, small, Inputs(small))
        return
    for width in cases.WIDTHS:
        inputs = Inputs(cases.swept(cases.KERNELS[0], width)[0])
        for kernel in cases.KERNELS:
            for work in cases.swept(kernel, width):
                yield _named(work), partial(_time, work, inputs)


def _named(work: Work) -> str:
    return f"D{work.D} {work.kernel}, {work.name}"


def _time(work: Work, inputs: Inputs) -> dict[str, Any]:
    """us: of the work's kernel. A tile that computes something else is a failure."""
    x = inputs.x
    if not torch.cuda.is_available():
        with choices(work):
            return {"work": asdict(work), **measure(lambda: both(work, x))}
    table = replace(work, tile=None)
    with choices(table):
        want = both(table, x)
    with choices(work):
        out = both(work, x)
        for name, y in want.items():
            error = float((out[name].float() - y.float()).norm() / y.float().norm())
            if not error < 2e-2:
                raise ValueError(f"{name} differs by {error:.2g} from the table's tile")
        kernels = profiled(lambda: both(work, x), REPEATS)
        us = next(us for name, us in kernels.items() if name.startswith(f"{work.kernel}_kernel"))
        return {"work": asdict(work), "us": us, "sm_mhz": clock_under(lambda: both(work, x), 10.0)}
