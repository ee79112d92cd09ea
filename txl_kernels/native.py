"""The `native` backend: C++ on the CPU, float32 and bfloat16, float32 accumulation.

Passes pointers and strides to `txl_kernels._native` after `functional` has checked every argument.
"""

import ctypes
import functools
import os
from typing import Any

import torch
from torch import Tensor

from txl_kernels import extension, philox, visibility
from txl_kernels.call import Call, empty_gradients, empty_like_rows

module, _import_error = extension.load("_native")

DTYPES = (torch.float32, torch.bfloat16)


def missing() -> str | None:
    """Why the C++ module is not there; None if it is."""
    return None if module is not None else extension.why_missing("_native", "C++", _import_error)


def cannot_run(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Why this backend cannot take tensors of this device and dtype, of any head width; None if it can."""
    if device.type != "cpu":
        return f"native runs on the cpu, not on {device.type}"
    if dtype not in DTYPES:
        return f"native takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return missing()


@functools.cache
def find_openmp() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch itself uses; 0 if it uses none we know.

    Asked of torch's own library, whose dependencies the search follows: another package's copy cannot be mistaken for it.
    """
    try:
        torch_cpu = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@functools.cache
def prepare() -> Any:
    """The module, told to run on torch's own thread pool: a second one would fight it for the cores."""
    module.set_openmp(find_openmp())
    return module


def library_at(address: int) -> str | None:
    """Path of the shared library mapped at an address of this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split(None, 5)
            low, high = (int(x, 16) for x in fields[0].split("-"))
            if low <= address < high and len(fields) == 6:
                return fields[5].rstrip()
    return None


def _view(x: Tensor | None) -> tuple[int, ...]:
    """(pointer, three strides) of a [.., .., .., D] tensor; fewer axes are padded with stride 0."""
    if x is None:
        return 0, 0, 0, 0
    strides = x.stride()
    if len(strides) == 4:
        return x.data_ptr(), strides[0], strides[1], strides[2]
    return (x.data_ptr(), strides[0], strides[1], 0) if len(strides) == 3 else (x.data_ptr(), strides[0], 0, 0)


def _bounds(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else (x.data_ptr(), *x.stride())


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _seed(call: Call) -> int:
    return 0 if call.seed is None else int(call.seed) & (2**64 - 1)


def _arguments(call: Call, out: Tensor, lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, r, content_bias, position_bias, k_mem, v_mem, start, end, seed, causal, window, zero_row, scale, drop = (
        call
    )
    memory_len = 0 if k_mem is None else k_mem.shape[2]
    sizes = (*q.shape[:3], memory_len, q.shape[3], r.shape[1], zero_row, causal, window or 0, q.dtype == torch.bfloat16)
    dropout = (0, 1.0) if seed is None else (philox.drop_threshold(drop), 1.0 / (1.0 - drop))
    tensors = [_view(x) for x in (q, k, v, k_mem, v_mem, r, content_bias, position_bias, out)]
    threads = torch.get_num_threads()
    return ((*sizes, threads), scale, *dropout, _seed(call), tensors, _bounds(start), _bounds(end), _pointer(lse))


def _check_values(call: Call) -> None:
    if call.start is not None or call.end is not None:
        visibility.check_values(call)


def forward(call: Call, memo: dict[str, Any] | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """(out [B, H, L, D] with q's strides where it is dense, lse float32 [B, H, L]) of a checked call.

    memo: kept between calls of the same signature.
    """
    _check_values(call)
    out = empty_like_rows(call.q)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32) if need_lse else None
    plan = None if memo is None else memo.get("native")
    if plan is None:
        plan = prepare().Plan(*_arguments(call, out, lse))
        if memo is not None:
            memo["native"] = plan
    plan.forward(call, out, lse, torch.get_num_threads(), _seed(call))
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, r, content_bias, position_bias, k_mem, v_mem; the last two empty without memory."""
    _check_values(call)
    grads = empty_gradients(call)
    dq, dk, dv, dr, du, dw, *memory_grads = grads
    views = [dout, dq, dk, dv, *memory_grads, dr, du, dw]
    prepare().Plan(*_arguments(call, out, lse)).backward([_view(x) for x in views], _pointer(dlse))
    return grads
