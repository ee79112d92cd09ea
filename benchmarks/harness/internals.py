"""All that the benchmarks use of txl_kernels beyond its public interface."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import txl_kernels.layer
from txl_kernels.backends import cpu, triton
from txl_kernels.call import Call


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter."""
    return triton.interpreted()


def instruction_set() -> str | None:
    """Of the native kernels; None where they are not built."""
    return None if cpu.native.module is None else str(cpu.prepare().isa())


def multiply_add(iterations: int, dtype: torch.dtype = torch.float32) -> float:
    """Multiply-adds of registers by the units that the kernels use for dtype, on all of torch's
    threads; returns how many operations."""
    return float(cpu.prepare().fma(iterations, torch.get_num_threads(), dtype == torch.bfloat16))


def read(x: Tensor) -> None:
    """Reads a float32 tensor once, on all of torch's threads."""
    cpu.prepare().read(x.data_ptr(), x.numel(), torch.get_num_threads())


def native_kernel(tensors: list[Tensor]) -> Callable[[], object]:
    """The native forward kernel alone, arguments already examined; causal.

    tensors: q, k, v, r, content_bias, position_bias, k_mem, v_mem.
    """
    q = tensors[0]
    call = Call(*tensors, None, None, None, None, None, 0, 0, q.size(-1) ** -0.5, 0.0, 0.0)
    out, threads = torch.empty_like(q), torch.get_num_threads()
    plan = cpu.make_plan(call, out)
    return lambda: plan.forward(call, out, None, threads, 0)


@contextlib.contextmanager
def attention_of_the_layer(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """`RelAttention` calls the replacement instead of rel_attention."""
    with _replaced(txl_kernels.layer, "rel_attention", replacement):
        yield


@contextlib.contextmanager
def triton_tile(kernel: str, tile: tuple[int, int, int, int]) -> Iterator[None]:
    """One of the Triton kernels takes this tile: (rows of queries, rows of keys, warps, stages)."""
    from txl_kernels.backends.triton import config, plan

    real = config.choose

    def choose(which: str, *rest: Any) -> config.Config:
        return config.Config(*tile) if which == kernel else real(which, *rest)

    with _replaced(config, "choose", choose, plan.forget):
        yield


@contextlib.contextmanager
def triton_same_bits() -> Iterator[None]:
    """The Triton backend adds up dr without atomics."""
    from txl_kernels.backends.triton import config

    with _replaced(config, "dr_by_atomics", lambda: False):
        yield


@contextlib.contextmanager
def triton_table_tile(tile: tuple[int, int, int, int]) -> Iterator[None]:
    """`triton_tile` of backward_table, which runs only without atomics."""
    with triton_same_bits(), triton_tile("backward_table", tile):
        yield


@contextlib.contextmanager
def triton_pointers() -> Iterator[None]:
    """The Triton backend uses pointers where it could use descriptors."""
    from txl_kernels.backends.triton import plan

    with _replaced(plan, "describable", lambda x: False, plan.forget):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any, forget: Callable[[], None] = lambda: None) -> Iterator[None]:
    """forget: drops what was made with the other value."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    forget()
    try:
        yield
    finally:
        setattr(owner, name, real)
        forget()
