"""What this machine can do at most: the rate of fused multiply-adds, and of reading memory."""

import time

import torch

from txl_kernels import native

_ITERATIONS = 1_000_000


def fma_peak(threads: int | None = None) -> float:
    """Operations a second (a multiply-add is two) of float32 registers on torch's threads, best instruction set."""
    threads = threads or torch.get_num_threads()
    begin = time.perf_counter()
    operations: float = native.prepare().fma(_ITERATIONS, threads)
    return operations / (time.perf_counter() - begin)


def read_once(x: torch.Tensor) -> None:
    """Reads a contiguous tensor on torch's threads."""
    native.prepare().read(x.data_ptr(), x.numel() * x.element_size() // 4, torch.get_num_threads())
