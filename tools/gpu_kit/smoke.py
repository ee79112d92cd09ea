"""Every kernel once, against float64; uninitialised memory is NaN where nothing is added up by
atomics."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu_kit import cases
from gpu_kit.measure import device
from gpu_kit.records import Items
from gpu_kit.work import Work, both, choices, tensors
from txl_kernels.backends import triton

INTERPRETED = ("D64 descriptors", "D64 atomics", "D64 bounds, dropout", "D64 decode")
MOST = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-5}  # relative errors that rounding explains


class Wrong(Exception):
    """The errors are beyond rounding."""


def check(work: Work) -> dict[str, Any]:
    """Relative errors by tensor. Raises Wrong."""
    torch.manual_seed(0)
    x = tensors(work, device())
    exact = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in x.items()}
    torch.use_deterministic_algorithms(not work.atomics)  # which fills what is not written with NaN
    try:
        with choices(work):
            got = both(work, x)
    finally:
        torch.use_deterministic_algorithms(False)
    want = both(work, exact, backend="reference")
    errors = {n: float((got[n].double() - y).norm() / y.norm()) for n, y in want.items()}
    wrong = {n: error for n, error in errors.items() if not error <= MOST[work.dtype]}
    if wrong:
        raise Wrong(", ".join(f"{n} {error:.2g}" for n, error in wrong.items()))
    return {"errors": {n: float(f"{error:.3g}") for n, error in errors.items()}}


def items(backend: str = "triton") -> Items:
    for work in cases.smallest():
        if work.backend != backend:
            continue
        if not triton.interpreted():
            yield work.name, partial(check, work)
        elif work.name in INTERPRETED:
            yield work.name, partial(check, replace(work, **cases.tiny(work)))
