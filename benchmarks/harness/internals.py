"""Uses of txl_kernels beyond its public interface; the benchmarks have no others."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

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
    return None if cpu.native.module is None else str(cpu.module().isa())


def takes_many_queries(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a backend that is available takes calls of more than 16 queries, and gradients."""
    return backend != cuda.NAME or cuda.takes_kind(device, dtype, 64, decode=False, gradients=True)


def multiply_add(iterations: int, dtype: torch.dtype = torch.float32) -> float:
    """Run multiply-adds in registers, by the units that the kernels use for dtype, on all of
    torch's threads; return the number of operations."""
    return float(cpu.module().fma(iterations, torch.get_num_threads(), dtype == torch.bfloat16))


def read(x: Tensor) -> None:
    """Read a float32 tensor once, on all of torch's threads."""
    cpu.module().read(x.data_ptr(), x.numel(), torch.get_num_threads())


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


def attention_of_the_layer(replacement: Callable[..., Tensor]) -> AbstractContextManager[object]:
    """A context in which `RelAttention` calls the replacement instead of rel_attention."""
    return mock.patch.object(txl_kernels.attention_layer, "rel_attention", replacement)
