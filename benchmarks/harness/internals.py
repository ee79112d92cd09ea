"""Uses of txl_kernels beyond its public interface; the benchmarks have no others.

Nothing private is imported before it is used, so that benchmarks that need none of it run with
other versions of the packages, too (harness.base).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch import Tensor

if TYPE_CHECKING:
    from txl_kernels.call import Call


def instruction_set() -> str | None:
    """Return the instruction set of the native kernels, or None if they are not built."""
    from txl_kernels.backends import cpu

    return None if cpu.native.module is None else str(cpu.module().isa())


def takes_many_queries(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a backend that is available takes calls of more than 16 queries, and gradients."""
    if backend != "cuda":
        return True
    from txl_kernels.backends import protocol
    from txl_kernels.backends.limits import PREFILL

    return protocol.architecture(device) == PREFILL.capability and dtype in PREFILL.dtypes


def multiply_add(iterations: int, dtype: torch.dtype = torch.float32) -> float:
    """Run multiply-adds in registers, by the units that the kernels use for dtype, on all of
    torch's threads; return the number of operations."""
    from txl_kernels.backends import cpu

    return float(cpu.module().fma(iterations, torch.get_num_threads(), dtype == torch.bfloat16))


def read(x: Tensor) -> None:
    """Read a float32 tensor once, on all of torch's threads."""
    from txl_kernels.backends import cpu

    cpu.module().read(x.data_ptr(), x.numel(), torch.get_num_threads())


def _causal_call(tensors: list[Tensor]) -> "Call":
    """Return a checked call.

    tensors: q, k, v, r, content_bias, position_bias, k_mem, v_mem.
    """
    from txl_kernels.call import Call

    scale = tensors[0].size(-1) ** -0.5
    return Call(*tensors, *(None,) * 7, 0, 0, scale, 0.0, 0.0, scale, False)


def native_kernel(tensors: list[Tensor]) -> Callable[[], object]:
    """Return a function that runs the native causal forward kernel alone, without argument checks;
    tensors: see `_causal_call`."""
    from txl_kernels.backends import cpu

    call = _causal_call(tensors)
    out, threads = torch.empty_like(tensors[0]), torch.get_num_threads()
    plan = cpu.make_plan(call, out)
    return lambda: plan.forward(call, out, None, threads, 0)


def cuda_kernels(tensors: list[Tensor], decode: bool) -> Tensor:
    """Run the CUDA C++ kernels of decode, or of prefill, for any number of queries that they take;
    tensors: see `_causal_call`."""
    from txl_kernels.backends import cuda

    with mock.patch.object(cuda, "is_decode", return_value=decode):
        out: Tensor = cuda.forward(_causal_call(tensors), need_lse=False)[0]
    return out


def attention_of_the_layer(replacement: Callable[..., Tensor]) -> AbstractContextManager[object]:
    """A context in which `RelAttention` calls the replacement instead of rel_attention."""
    import txl_kernels.attention_layer

    return mock.patch.object(txl_kernels.attention_layer, "rel_attention", replacement)
