"""The machine's own maximum rates, as implementations: arithmetic, and reading memory. All use
random values, because some processors compute faster with zeros."""

import functools

import torch

from harness import internals
from harness.comparison import Entry, Implementation
from harness.machine import Machine

_ITERATIONS = 1_000_000


def arithmetic(machine: Machine, dtype: torch.dtype = torch.float32) -> Implementation:
    """Make the limit of arithmetic: multiply-adds in registers on all of torch's threads, by the
    units for dtype; on a GPU the library's largest matrix product."""
    name, prepare = "matrix products", functools.partial(_matrix_products, machine)
    if machine.kind == "cpu":
        name = "FMA peak" if dtype == torch.float32 else "bfloat16 peak, random values"
        prepare = functools.partial(_fma, dtype)
    label = None if dtype == torch.float32 else str(dtype).removeprefix("torch.")
    return Implementation(f"limit: {name}", prepare, "limit", dtype=label)


def memory(machine: Machine, size: int) -> Implementation:
    """Make the limit of memory: reading `size` bytes once on all of torch's threads; on a GPU
    copying a gibibyte, counted as bytes read and written."""
    if machine.kind == "cpu":
        return Implementation("limit: a plain read", functools.partial(_read, size), "limit")
    return Implementation("limit: a copy", functools.partial(_copy, machine), "limit")


def _fma(dtype: torch.dtype) -> Entry:
    def run() -> float:
        return internals.multiply_add(_ITERATIONS if dtype == torch.float32 else _ITERATIONS // 4, dtype)

    return Entry(run, operations=run(), limit="operations")


def _matrix_products(machine: Machine) -> Entry:
    n = machine.pick(cpu=0, cuda=8192, interpreter=64)
    a, b = torch.randn(2, n, n, device=machine.device, dtype=machine.dtype)
    return Entry(lambda: a @ b, operations=2.0 * n**3, limit="operations")


def _read(size: int) -> Entry:
    x = torch.rand(size // 4)
    return Entry(lambda: internals.read(x), bytes=float(size), limit="bytes")


def _copy(machine: Machine) -> Entry:
    size = machine.pick(cpu=0, cuda=2**30, interpreter=2**12)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return Entry(lambda: target.copy_(source), bytes=2.0 * source.numel(), limit="bytes")
