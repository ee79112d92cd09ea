"""What the machine itself does at most, as contestants: its rate of arithmetic, and of moving memory."""

import torch
from machine import Machine
from race import Entry

from txl_kernels.backends import cpu

ARITHMETIC = {"cpu": "limit: FMA peak", "cuda": "limit: matrix products", "rehearsal": "limit: matrix products"}
MEMORY = {"cpu": "limit: a plain read", "cuda": "limit: a copy", "rehearsal": "limit: a copy"}
_ITERATIONS = 1_000_000


def arithmetic(machine: Machine) -> Entry:
    """Fused multiply-adds in registers on all of torch's threads; on a GPU the library's largest matrix product."""
    if machine.kind == "cpu":
        module, threads = cpu.prepare(), torch.get_num_threads()
        return Entry(
            lambda: module.fma(_ITERATIONS, threads), operations=module.fma(_ITERATIONS, threads), limit="operations"
        )
    n = machine.pick(cpu=0, cuda=8192, rehearsal=64)
    a, b = torch.randn(2, n, n, device=machine.device, dtype=machine.dtype)
    return Entry(lambda: a @ b, operations=2.0 * n**3, limit="operations")


def memory(machine: Machine, size: int) -> Entry:
    """Reading `size` bytes once on all of torch's threads; on a GPU a copy of a gibibyte, bytes read and written."""
    if machine.kind == "cpu":
        module, x = cpu.prepare(), torch.zeros(size // 4)
        return Entry(
            lambda: module.read(x.data_ptr(), x.numel(), torch.get_num_threads()), bytes=float(size), limit="bytes"
        )
    source = torch.ones(machine.pick(cpu=0, cuda=2**30, rehearsal=2**12), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return Entry(lambda: target.copy_(source), bytes=2.0 * source.numel(), limit="bytes")
