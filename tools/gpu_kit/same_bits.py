"""Whether the same call gives the same bits every time."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu_kit import cases
from gpu_kit.measure import device
from gpu_kit.records import Items
from gpu_kit.work import Work, both, choices, tensors
from txl_kernels.backends import triton

RUNS = 20
INTERPRETED = ("D64 descriptors", "D64 decode")


def compare(work: Work, runs: int = RUNS) -> dict[str, Any]:
    """differing: how often each tensor differed from its first value; empty where it never did."""
    torch.manual_seed(0)
    x = tensors(work, device())
    differing: dict[str, int] = {}
    with choices(work):
        first = both(work, x)
        for _ in range(runs - 1):
            for name, again in both(work, x).items():
                if not torch.equal(first[name], again):
                    differing[name] = differing.get(name, 0) + 1
    return {"runs": runs, "differing": differing}


def items() -> Items:
    for work in cases.same_bits():
        if not triton.interpreted():
            yield work.name, partial(compare, work)
        elif work.name in INTERPRETED:
            yield work.name, partial(compare, replace(work, **cases.tiny(work)), 2)
