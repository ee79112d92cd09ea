"""Uses of txl_kernels beyond its public interface; the benchmarks have no others."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import txl_kernels.attention_layer
from txl_kernels.backends import cpu, cuda, triton
from txl_kernels.call import Call


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter."""
    return triton.interpreted()


def instruction_set() -> str | None:
    """Return the instruction set of the native kernels, or None if they are not built."""
    return None if cpu.native.module is None else str(cpu.prepare().isa())


def takes_many_queries(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a backend that is available takes calls of more than 16 queries, and gradients."""
    return backend != cuda.NAME or cuda.takes_kind(device, dtype, 64, decode=False, gradients=True)


def multiply_add(iterations: int, dtype: torch.dtype = torch.float32) -> float:
    """Run multiply-adds in registers, by the units that the kernels use for dtype, on all of
    torch's threads; return the number of operations."""
    return float(cpu.prepare().fma(iterations, torch.get_num_threads(), dtype == torch.bfloat16))


def read(x: Tensor) -> None:
    """Read a float32 tensor once, on all of torch's threads."""
    cpu.prepare().read(x.data_ptr(), x.numel(), torch.get_num_threads())


def native_kernel(tensors: list[Tensor]) -> Callable[[], object]:
    """Return a function that runs the native causal forward kernel alone, without argument checks.

    tensors: q, k, v, r, content_bias, position_bias, k_mem, v_mem.
    """
    q = tensors[0]
    scale = q.size(-1) ** -0.5
    call = Call(*tensors, *(None,) * 7, 0, 0, scale, 0.0, 0.0, scale, False)
    out, threads = torch.empty_like(q), torch.get_num_threads()
    plan = cpu.make_plan(call, out)
    return lambda: plan.forward(call, out, None, threads, 0)


@contextlib.contextmanager
def attention_of_the_layer(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """A context in which `RelAttention` calls the replacement instead of rel_attention."""
    with _replaced(txl_kernels.attention_layer, "rel_attention", replacement):
        yield


@contextlib.contextmanager
def triton_tile(kernel: str, tile: tuple[int, int, int, int]) -> Iterator[None]:
    """A context in which a Triton kernel uses this tile: (queries, keys, warps, stages)."""
    from txl_kernels.backends.triton import config, plan

    real = config.choose

    def choose(which: str, *rest: Any) -> config.Config:
        return config.Config(*tile) if which == kernel else real(which, *rest)

    with _replaced(config, "choose", choose, plan.forget):
        yield


@contextlib.contextmanager
def triton_same_bits() -> Iterator[None]:
    """A context in which the Triton backend computes dr without atomics."""
    from txl_kernels.backends.triton import config

    with _replaced(config, "dr_by_atomics", lambda: False):
        yield


@contextlib.contextmanager
def triton_table_tile(tile: tuple[int, int, int, int]) -> Iterator[None]:
    """`triton_tile` for backward_table, which runs only without atomics."""
    with triton_same_bits(), triton_tile("backward_table", tile):
        yield


@contextlib.contextmanager
def triton_pointers() -> Iterator[None]:
    """A context in which the Triton backend uses pointers even where it could use descriptors."""
    from txl_kernels.backends.triton import plan

    with _replaced(plan, "describable", lambda x: False, plan.forget):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any, forget: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A context with an attribute replaced; forget: drops what was cached for the other value."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    forget()
    try:
        yield
    finally:
        setattr(owner, name, real)
        forget()
